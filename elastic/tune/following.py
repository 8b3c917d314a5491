"""Follows a trial's job: reads its reports from storage, its state from the coordinator.

Rule: reports are read from the run directory, which has all of them, in order. The coordinator
sends only events that something has changed, so no report is lost while it is unreachable.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.core.study import Trial
from elastic.core.view import JobView
from elastic.storage.metrics import MetricsReader, Numbering
from elastic.storage.run_directory import RunDirectory
from elastic.wire.codec_jobs import JobEvent

if TYPE_CHECKING:
    from elastic.client.jobs import Client


Events = queue.SimpleQueue[tuple[int, str, JobEvent | Exception]]
"""(trial number, job id, event)."""


class Watch:
    """Follows one job in a thread, and puts its events into a queue."""

    def __init__(self, client: Client, trial: Trial, events: Events) -> None:
        """Start to follow a trial's current job, whose events go to this queue."""
        self._key = (trial.number, trial.attempt.job_id)
        self._events = events
        self._stream = client.watch(trial.attempt.job_id)
        self._thread = threading.Thread(target=self._run, name=f"watch-{trial.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stream.close()

    def _run(self) -> None:
        try:
            for event in self._stream:
                self._events.put((*self._key, event))
        except Exception as error:  # Raised where the queue is read.
            self._events.put((*self._key, error))


@dataclass
class Following:
    """The driver's state of a trial's current job that is not in the log.

    Attributes:
        run: the job's run directory.
        waiting: rows that were read and do not count yet; see `ready`.
        view: the newest view, None before the first.
    """

    watch: Watch
    reader: MetricsReader
    numbering: Numbering
    run: RunDirectory
    waiting: list[dict[str, Any]] = field(default_factory=list)
    view: JobView | None = None

    def ready(self, *, is_over: bool) -> list[dict[str, Any]]:
        """Return the waiting rows that count now.

        The last row, if it has a checkpoint, counts once that is committed: a trial that is
        stopped because of the report must keep the checkpoint. There is no such wait if a later
        row exists or the job is over.
        """
        self.waiting += self.reader.read()
        ready = self.waiting
        last = ready[-1] if ready else {}
        name = "" if is_over else last.get("checkpoint", "")
        if name and not self.run.is_committed(name):
            ready = ready[:-1]
        self.waiting = self.waiting[len(ready) :]
        return ready

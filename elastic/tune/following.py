"""What the driver hears of a trial's job: its reports from storage, its state from the coordinator.

Rule: reports are read from the run directory, where every one of them is, in order. That something
has happened comes from the coordinator, which may be away meanwhile: nothing is lost by that.
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

if TYPE_CHECKING:
    from elastic.client.jobs import Client


Events = queue.SimpleQueue[tuple[int, str, Any]]
"""Number of a trial, id of its job, and a view, None for something else, or an error."""


class Watch:
    """Follows one job in a thread of its own, and puts what happens into a queue."""

    def __init__(self, client: Client, trial: Trial, events: Events) -> None:
        """Begin to follow a trial's present job.

        Args:
            client: of its cluster.
            trial: which one.
            events: where to.
        """
        self._key = (trial.number, trial.attempt.job_id)
        self._events = events
        self._stream = client.watch(trial.attempt.job_id)
        self._thread = threading.Thread(target=self._run, name=f"watch-{trial.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._stream.close()

    def _run(self) -> None:
        try:
            for event in self._stream:
                self._events.put((*self._key, event if isinstance(event, JobView) else None))
        except Exception as error:  # Raised by whoever reads the queue.
            self._events.put((*self._key, error))


@dataclass
class Following:
    """What the driver knows of a trial's present job beside the log.

    Attributes:
        run: its run directory.
        waiting: rows that were read and do not count yet: see `ready`.
        view: newest one, None before the first.
    """

    watch: Watch
    reader: MetricsReader
    numbering: Numbering
    run: RunDirectory
    waiting: list[dict[str, Any]] = field(default_factory=list)
    view: JobView | None = None

    def ready(self, *, is_over: bool) -> list[dict[str, Any]]:
        """Return the rows that count from now on.

        One that came with a checkpoint counts once that is committed: who is stopped because of
        the report is to leave its checkpoint behind. Where a later row is there, or nothing more
        can come, it is not waited for.
        """
        self.waiting += self.reader.read()
        ready = self.waiting
        last = ready[-1] if ready else {}
        name = "" if is_over else last.get("checkpoint", "")
        if name and not self.run.is_committed(name):
            ready = ready[:-1]
        self.waiting = self.waiting[len(ready) :]
        return ready

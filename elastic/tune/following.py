"""What the driver hears of a trial's job: its reports from storage, its state from the coordinator.

Rule: reports are read from the run directory, where every one of them is, in order. That something
has happened comes from the coordinator, which may be away meanwhile: nothing is lost by that.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.core.study import Attempt, Report, Trial
from elastic.core.view import JobView
from elastic.storage.metrics import MetricsReader
from elastic.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from elastic.client.jobs import Client

Events = queue.SimpleQueue[tuple[int, str, Any]]
"""Number of a trial, id of its job, and a view, None for something else, or an error."""


class Numbering:
    """Numbers the reports of a run: one that is made again after a loss has its number again.

    In a loop over `train.epochs()` a place tells it. Other code begins again in a new process, with
    a checkpoint or from the start, and counts on from there.
    """

    def __init__(self, attempt: Attempt, reports: Sequence[Report]) -> None:
        """Begin before the first row of a run directory.

        Args:
            attempt: the present one.
            reports: those of the trial that are known.
        """
        self._named = {report.checkpoint: report.number for report in reports if report.checkpoint}
        self._named.update(attempt.begins)
        self._places: dict[str, int] = {}
        self._number = max(attempt.begins.values(), default=0)

    def take(self, row: Mapping[str, Any]) -> int:
        """Return the number of the next row, from 1."""
        place = json.dumps(row["at"]) if "at" in row else ""
        if place and place in self._places:
            return self._places[place]
        if not place and not self._places and row["index"] == 0:
            self._number = self._named.get(row.get("resumed_from", ""), 0)
        self._number += 1
        if place:
            self._places[place] = self._number
        if name := row.get("checkpoint"):
            self._named[name] = self._number
        return self._number


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

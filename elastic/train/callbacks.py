"""Callbacks in the driver: what all ranks reported, which checkpoint came with it, what failed.

Rule: their input is read from the run directory, where each rank writes its reports. So training
never waits for a callback, and no report is missed while the driver was not connected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.errors import StorageError
from elastic.storage.metrics import MetricsReader
from elastic.storage.run_directory import RunDirectory
from elastic.train.checkpoint import Checkpoint
from elastic.train.config import TrainRunContext, UserCallback
from elastic.train.metrics import as_reported

if TYPE_CHECKING:
    from elastic.train.result import Result


@dataclass
class _Progress:
    """Which reports the callbacks have received."""

    rows: dict[int, dict[Any, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    """By rank: rows that were read and not delivered yet, by their place in the run."""
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Reports of rank 0 that were not delivered yet, oldest first."""
    failures: int = 0


class CallbackRunner:
    """Calls the callbacks of one attempt; used by the driver's thread."""

    def __init__(self, callbacks: Sequence[UserCallback], run_context: TrainRunContext) -> None:
        """Prepare the runner; `begin` skips the reports of earlier attempts.

        Args:
            callbacks: if empty, nothing is read.
            run_context: of the run.
        """
        self._callbacks, self._context = callbacks, run_context
        self._run = RunDirectory(run_context.path)
        self._readers: dict[int, MetricsReader] = {}
        self._progress = _Progress()

    @property
    def receives(self) -> bool:
        return bool(self._callbacks)

    def begin(self) -> None:
        """Skip the reports of earlier attempts, and call `before_run`."""
        if self._callbacks:
            for rank in range(max(1, self._context.scaling_config.max_workers)):
                self._reader(rank).read()
        for callback in self._callbacks:
            callback.before_run(self._context)

    def poll(self) -> None:
        """Deliver the reports that all ranks have made by now."""
        if self._callbacks:
            self._read()
            self._deliver(is_over=False)

    def failed(self, failures: int, errors: Callable[[], Mapping[int, Exception]]) -> None:
        """Deliver a failure, once; `errors` returns what the last one raised."""
        if not self._callbacks or failures <= self._progress.failures:
            return
        self._progress.failures = failures
        found = dict(errors())
        self.poll()
        for callback in self._callbacks:
            callback.after_exception(self._context, found)

    def finish(self) -> None:
        """Deliver all that is left: no more reports will come."""
        if self._callbacks:
            self._read()
            self._deliver(is_over=True)

    def ended(self, result: Result) -> None:
        for callback in self._callbacks:
            callback.after_run(self._context, result)

    def _reader(self, rank: int) -> MetricsReader:
        if rank not in self._readers:
            self._readers[rank] = MetricsReader(self._run.files, rank)
        return self._readers[rank]

    def _read(self) -> None:
        try:
            for row in self._reader(0).read():
                self._progress.rows[0][_place(row)] = row
                self._progress.waiting.append(row)
            size = max((int(row.get("world_size", 1)) for row in self._progress.waiting), default=0)
            for rank in range(1, size):
                self._progress.rows[rank].update((_place(r), r) for r in self._reader(rank).read())
        except StorageError:
            pass  # Retried with the next poll.

    def _deliver(self, *, is_over: bool) -> None:
        waiting = self._progress.waiting
        while waiting:
            row, place = waiting[0], _place(waiting[0])
            size = int(row.get("world_size", 1))
            rows = [self._progress.rows[rank].get(place) for rank in range(size)]
            later = waiting[1:]
            is_past = is_over or any(r["generation"] != row["generation"] for r in later)
            if None in rows and not is_past:
                return
            name = next((r["checkpoint"] for r in rows if r and "checkpoint" in r), "")
            checkpoint = self._committed(name)
            # One checkpoint is in progress at a time: a later one means that this is settled.
            is_settled = is_past or any("checkpoint" in r for r in later)
            if name and checkpoint is None and not is_settled:
                return
            waiting.pop(0)
            for rank in range(size):
                self._progress.rows[rank].pop(place, None)
            metrics = [as_reported(r["metrics"]) if r else {} for r in rows]
            for callback in self._callbacks:
                callback.after_report(self._context, metrics, checkpoint)

    def _committed(self, name: str) -> Checkpoint | None:
        try:
            if name and self._run.is_committed(name):
                return Checkpoint(self._run.checkpoint_path(name))
        except StorageError:
            pass
        return None


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["generation"], row.get("at", row["index"])

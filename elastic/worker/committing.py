"""Making a checkpoint count: the lead writes the marker, tells the coordinator, and tells all.

Rule: a checkpoint counts once its marker is written, and that happens once, after every member
has said that its part is stored. What a report tells the coordinator it tells once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic.core.events.worker import TellPreemption, UserReported, WishBoundary, WorkerEvent
from elastic.core.messages import Progress
from elastic.core.world import CheckpointStatus, Generation, JobId
from elastic.errors import StorageError
from elastic.runtime.clock import Clock
from elastic.storage.marker import UNKNOWN, Marker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.worker.agreement import Agreement, Index, Outcome, Part
from elastic.worker.exchange import Answer
from elastic.worker.pruning import Pruner

log = logging.getLogger(__name__)

ANSWER_PATIENCE_S = 10.0
"""How long members that are to leave wait for the coordinator to record the checkpoint."""
RETRY_PATIENCE_S = 0.2
"""The same while an earlier report is still unanswered: the coordinator is away."""


class Link(Protocol):
    """The way from the training thread to the coordinator; nothing here waits."""

    def post(self, item: WorkerEvent | Progress) -> None:
        """Tell what happened."""
        ...

    def tell_work(self) -> None:
        """Have the agent hear now whether the main thread says that it works."""
        ...

    def wish(self, generation: Generation) -> WishBoundary | None:
        """Return how and why this generation is to be left at its next boundary, None if not."""
        ...

    def is_called_off(self, generation: Generation) -> bool:
        """Return whether this generation was to save where it leaves, and need not any more."""
        ...

    def save_wish(self, generation: Generation) -> int:
        """Return the number of the newest wish for a checkpoint in this generation, 0 for none."""
        ...

    def preemption(self, generation: Generation, now_ns: int) -> TellPreemption | None:
        """Return what is known of nodes that leave this generation's group, None if none do."""
        ...

    def expect_answer(self, generation: Generation, index: int) -> Answer:
        """Ask to be told what becomes of a report; called before it is posted."""
        ...


@dataclass(frozen=True)
class Place:
    """Where in the run a report is made."""

    job_id: JobId
    generation: Generation
    rank: int
    world_size: int


@dataclass(frozen=True)
class Round:
    """One checkpoint on its way.

    Attributes:
        key: of its agreement in the group's store.
        index: of the report in what the coordinator is told.
        metrics: of the report, JSON.
        leaves: every member leaves the group with it, if it is recorded.
        owns_files: we have written what is in its directory, and may delete it.
        validation: how it is to be validated, JSON, "" if it is not.
    """

    key: Index
    index: int
    metrics: str
    leaves: bool = False
    owns_files: bool = True
    validation: str = ""


class Committer:
    """Commits the checkpoints of one generation.

    Used by one thread at a time: the one that makes reports, or the one that uploads for it while
    it makes none with a checkpoint.
    """

    def __init__(
        self,
        place: Place,
        run: RunDirectory | None,
        *,
        link: Link,
        clock: Clock,
        pruner: Pruner | None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a generation; see `Reporter`."""
        self.place, self.run = place, run
        self._link, self._clock, self.pruner = link, clock, pruner
        self._on_commit = on_commit
        self._newest_posted = -1
        self._lock = threading.Lock()
        self._unanswered: Answer | None = None

    def post(
        self,
        index: int,
        metrics: str,
        checkpoint: str = "",
        status: CheckpointStatus = CheckpointStatus.COMMITTED,
    ) -> None:
        """Tell the coordinator of a report; done once for each."""
        place = self.place
        with self._lock:  # An upload in the background tells of an older report.
            self._newest_posted = max(self._newest_posted, index)
        report = UserReported(place.generation, place.rank, metrics, checkpoint, index, status)
        self._link.post(report)

    def has_posted(self, index: int) -> bool:
        """Return whether the report of this number, the newest one, was told."""
        return self._newest_posted >= index

    def conclude(self, agreement: Agreement, turn: Round) -> Outcome:
        """Commit as the lead, or hear from it what became of the checkpoint.

        Args:
            agreement: in which all parts are known.
            turn: which checkpoint.
        """
        parts = agreement.parts(turn.key)
        if parts[0].rank != self.place.rank:
            self.post(turn.index, turn.metrics)
            return agreement.wait_outcome(turn.key)
        outcome = self._commit(turn, parts)
        claimed = {file.path for part in parts for file in part.files}
        agreement.tell_outcome(turn.key, outcome, tuple(sorted(claimed)))
        return outcome

    def finish(self) -> None:
        """The train function returned: delete the checkpoints that are not to be kept."""
        if self.pruner is not None:
            self.pruner.finish()

    def _commit(self, turn: Round, parts: tuple[Part, ...]) -> Outcome:
        """Write the marker, report the path, and find out whether all may leave."""
        try:
            path = self._mark(turn, parts)
        except StorageError as error:
            self.post(turn.index, turn.metrics)
            return Outcome(error=str(error))
        answer = self._link.expect_answer(self.place.generation, turn.index)
        status = CheckpointStatus.COMMITTED
        if turn.validation:
            status = CheckpointStatus.PENDING_VALIDATION
        self.post(turn.index, turn.metrics, path, status)
        self._on_commit()
        outcome = Outcome(path=path, leaves=turn.leaves and self._is_recorded(answer, path))
        if self.pruner is not None:
            self.pruner.committed(parts[0].name, answer)
        return outcome

    def _mark(self, turn: Round, parts: tuple[Part, ...]) -> str:
        """Write the marker if the parts make a checkpoint, else remove what there is of it.

        Returns:
            The checkpoint's path.

        Raises:
            StorageError: why it does not count.
        """
        run, name = self.run, parts[0].name
        if run is None:
            raise StorageError("the job has no run directory")
        run.check_free(name)
        refusal = _refusal(parts)
        if refusal:
            if turn.owns_files:
                run.discard(name)
            raise StorageError(f"checkpoint {name} was not committed: {refusal}")
        files = _files_of(parts)
        if turn.owns_files:
            run.clear(name, kept={file.path for file in files})
        marker = Marker(
            job_id=self.place.job_id,
            generation=self.place.generation,
            index=turn.index,
            world_size=self.place.world_size,
            unix_ns=self._clock.unix_ns(),
            metrics=turn.metrics,
            files=files,
            validation=turn.validation,
        )
        if self.pruner is not None:
            self.pruner.commits()
        return run.commit(name, marker)

    def _is_recorded(self, answer: Answer, path: str) -> bool:
        """Wait for the coordinator's word; without it leaving would lose what was done since."""
        is_away = self._unanswered is not None and not self._unanswered.ready.is_set()
        if not answer.wait(RETRY_PATIENCE_S if is_away else ANSWER_PATIENCE_S):
            self._unanswered = answer
            log.warning(
                "boundary_put_off generation=%d reason='the coordinator has not recorded %s yet'",
                self.place.generation,
                path,
            )
            return False
        self._unanswered = None
        if not answer.accepted:
            log.warning("checkpoint_refused path=%s reason=%r", path, answer.reason)
        return answer.accepted


def _refusal(parts: tuple[Part, ...]) -> str:
    """Return why these parts make no checkpoint, "" if they do."""
    failed = [f"rank {part.rank}: {part.error}" for part in parts if part.error]
    if failed:
        more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        return failed[0] + more
    names = sorted({part.name for part in parts})
    if len(names) > 1:
        return f"members reported it under different names: {', '.join(names)}"
    seen: dict[str, tuple[int, int]] = {}
    for part in parts:
        for file in part.files:
            rank, other = seen.setdefault(file.path, (part.rank, file.size))
            if other != file.size:
                return (
                    f"ranks {rank} and {part.rank} both have a file {file.path}, of {other} and "
                    f"{file.size} bytes; give each rank's file a name of its own"
                )
    return ""


def _files_of(parts: tuple[Part, ...]) -> tuple[StoredFile, ...]:
    """Return every file once, as the member knows it that wrote it."""
    files: dict[str, StoredFile] = {}
    for part in parts:
        for file in part.files:
            if file.path not in files or file.crc32 != UNKNOWN:
                files[file.path] = file
    return tuple(files[path] for path in sorted(files))

"""Reported checkpoints: a checkpoint is made of the parts that members have stored.

The lead, the lowest rank with a part, makes the checkpoint, has it committed (`committer`), and
sends the others the outcome. Each report is sent to the coordinator once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.core.events.worker import NotifyPreemption, RequestLeave, UserReported
from elastic.core.facts import CheckpointStatus, Generation, JobId
from elastic.errors import StorageError
from elastic.runtime.clock import Clock
from elastic.storage.marker import UNKNOWN, CheckpointMarker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.committer import Commit, Committer, CoordinatorLink
from elastic.worker.checkpoint.report_votes import Index, ReportOutcome, ReportPart, ReportVotes

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""How long a report waits for the coordinator to record its checkpoint, before training goes on."""
LEAVING_TIMEOUT_S = 10.0
"""The same where all members leave once it is recorded."""


class ReportLink(CoordinatorLink, Protocol):
    """The way from the training thread to the coordinator, and back."""

    def deliver(self) -> None:
        """Handle now, in this thread, posts whose consumer runs here."""
        ...

    def report_work(self) -> None:
        """Report to the agent now whether the main thread marks itself as working."""
        ...

    def leave_request(self, generation: Generation) -> RequestLeave | None:
        """Return how and why this generation is to be left at its next boundary, None if not."""
        ...

    def is_called_off(self, generation: Generation) -> bool:
        """Return whether this generation was to save where it leaves, and need not any more."""
        ...

    def save_request(self, generation: Generation) -> int:
        """Return the number of the newest checkpoint request in this generation, 0 for none."""
        ...

    def preemption(self, generation: Generation, now_ns: int) -> NotifyPreemption | None:
        """Return what is known of nodes that leave this generation's group, None if none do."""
        ...


@dataclass(frozen=True)
class ReportOrigin:
    """Where in the run a report is made."""

    job_id: JobId
    generation: Generation
    rank: int
    world_size: int


@dataclass(frozen=True)
class PendingReport:
    """One checkpoint on its way.

    Attributes:
        key: of its votes in the group's store.
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


class ReportedCheckpoints:
    """The reported checkpoints of one generation.

    Used by one thread at a time: the one that makes reports, or the one that uploads for it while
    it makes none with a checkpoint.

    Attributes:
        pending: names of checkpoints that are recorded, or wait for that, and may have no marker.
        metadata: written beside the files of each; what is in them already has precedence.
    """

    def __init__(
        self,
        origin: ReportOrigin,
        run: RunDirectory | None,
        *,
        link: ReportLink,
        clock: Clock,
        committer: Committer | None,
        on_commit: Callable[[], None],
    ) -> None:
        self.origin, self.run = origin, run
        self.pending: set[str] = set()
        self.metadata: Mapping[str, Any] = {}
        self._link, self._clock, self._committer = link, clock, committer
        self._on_commit = on_commit
        self._newest_posted = -1
        self._lock = threading.Lock()

    def post(self, index: int, metrics: str) -> None:
        """Inform the coordinator of a report without a checkpoint; done once for each."""
        self._note_posted(index)
        origin = self.origin
        self._link.post(UserReported(origin.generation, origin.rank, metrics, "", index))

    def _note_posted(self, index: int) -> None:
        with self._lock:  # An upload in the background posts an older report.
            self._newest_posted = max(self._newest_posted, index)

    def has_posted(self, index: int) -> bool:
        return self._newest_posted >= index

    def flush_metrics(
        self, otherwise: str, is_over: Callable[[], bool], *, to_disk: bool = True
    ) -> None:
        """Have all lines of metrics written, or log what becomes of them otherwise.

        See `MetricsWriter.flush`; also called by the thread of an upload in the background.
        """
        try:
            if self.run is not None:
                self.run.metrics.flush(to_disk=to_disk, is_over=is_over)
        except StorageError as error:
            log.warning("%s error=%r", otherwise, str(error))

    def check_free(self, name: str) -> None:
        """Raise StorageError if one of this name is recorded, or may be, and has no marker yet."""
        if name in self.pending:
            raise StorageError(f"a checkpoint {name} was reported already; use another name")

    def conclude(self, votes: ReportVotes, report: PendingReport) -> ReportOutcome:
        """Commit as the lead, or receive the outcome from the lead."""
        parts = votes.parts(report.key)
        if parts[0].rank != self.origin.rank:
            self.post(report.index, report.metrics)
            return votes.wait_outcome(report.key)
        outcome = self._commit(report, parts)
        claimed = {file.path for part in parts for file in part.files}
        votes.report_outcome(report.key, outcome, tuple(sorted(claimed)))
        return outcome

    def finish(self, is_over: Callable[[], bool]) -> None:
        """The train function returned: wait for what is on its way; see `Committer.finish`."""
        if self._committer is not None:
            self._committer.finish(is_over)
        self._link.deliver()

    def _commit(self, report: PendingReport, parts: tuple[ReportPart, ...]) -> ReportOutcome:
        """Have the checkpoint committed; without the coordinator all continue; it comes later."""
        name, committer = parts[0].name, self._committer
        try:
            marker = self._marker(report, parts)
        except StorageError as error:
            self.post(report.index, report.metrics)
            return ReportOutcome(error=str(error))
        if committer is None or self.run is None:
            return ReportOutcome(error="the job has no run directory")
        origin, path = self.origin, self.run.checkpoint_path(name)
        status = CheckpointStatus.COMMITTED
        if report.validation:
            status = CheckpointStatus.PENDING_VALIDATION
        reported = UserReported(
            origin.generation, origin.rank, report.metrics, path, report.index, status
        )

        def ended(commit: Commit) -> None:
            if commit.path:
                self._on_commit()
            elif not commit.is_posted:
                self.post(report.index, report.metrics)

        commit = Commit(name, marker, lambda generation: reported, ended, report.owns_files)
        self._note_posted(report.index)
        committer.put(commit)
        is_over = committer.wait(commit, LEAVING_TIMEOUT_S if report.leaves else TIMEOUT_S)
        self._link.deliver()
        if not is_over:
            commit.owns_files = False  # Members release their own copies of it now.
            log.warning(
                "checkpoint_waits path=%s: the coordinator has not recorded it yet; %s",
                path,
                "the group is not left here" if report.leaves else "training goes on",
            )
            return ReportOutcome(path=path, is_pending=True)
        if commit.is_recorded and not commit.path:
            return ReportOutcome(path=path, is_pending=True)  # It has no marker yet.
        leaves = report.leaves and bool(commit.path)
        return ReportOutcome(path=commit.path, error=commit.error, leaves=leaves)

    def _marker(self, report: PendingReport, parts: tuple[ReportPart, ...]) -> CheckpointMarker:
        """Return the marker if the parts make a checkpoint, else remove what there is of it.

        Raises:
            StorageError: why it does not count.
        """
        run, name = self.run, parts[0].name
        if run is None:
            raise StorageError("the job has no run directory")
        self.check_free(name)
        run.check_free(name)
        refusal, files = _refusal(parts), _files_of(parts)
        try:
            if refusal:
                raise StorageError(f"checkpoint {name} was not committed: {refusal}")
            if report.owns_files:
                run.clear(name, kept={file.path for file in files})
            if self.metadata:
                run.add_metadata(name, self.metadata)
        except StorageError:
            if report.owns_files:
                run.discard(name)
            raise
        return CheckpointMarker(
            job_id=self.origin.job_id,
            generation=self.origin.generation,
            index=report.index,
            world_size=self.origin.world_size,
            unix_ns=self._clock.unix_ns(),
            metrics=report.metrics,
            files=files,
            validation=report.validation,
        )


def _refusal(parts: tuple[ReportPart, ...]) -> str:
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


def _files_of(parts: tuple[ReportPart, ...]) -> tuple[StoredFile, ...]:
    """Return every file once, as the member knows it that wrote it."""
    files: dict[str, StoredFile] = {}
    for part in parts:
        for file in part.files:
            if file.path not in files or file.crc32 != UNKNOWN:
                files[file.path] = file
    return tuple(files[path] for path in sorted(files))

"""`train.report`: metrics are kept at once, a checkpoint counts for all members or for none.

Without a checkpoint a report never blocks. With one (even if only other members have files), all
wait until it counts: members store their files, all vote (`report_votes`), and the lead, the lowest
rank with files, has it committed and informs the others (`reported_checkpoints`). While the
coordinator is away they continue, and it counts later. While storage fails, members retry
(`storage.retry`); if one gives up, all that wait raise StorageError, and no checkpoint counts. If
the files are uploaded later, or are there already, the vote comes first (`delivery`). If a planned
change is due and every member waits here, all leave at this report, once the coordinator has
recorded the checkpoint: nothing is lost.

Rule: every member calls `report` equally often in a generation; the n-th calls belong together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from elastic.core.config import JobSpec
from elastic.core.facts import EntryKind
from elastic.errors import GroupError, StorageError, UsageError
from elastic.runtime.clock import Clock
from elastic.storage.integrity import find_damage
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.delivery import (
    NO_PART,
    BackgroundDelivery,
    CheckpointUploadMode,
    DeliveredParts,
    Delivery,
    name_in,
    wait_given_up,
)
from elastic.worker.checkpoint.pruning import kept_names
from elastic.worker.checkpoint.report_votes import (
    Index,
    ReportOutcome,
    ReportPart,
    ReportVote,
    ReportVotes,
    VoteCount,
)
from elastic.worker.checkpoint.reported_checkpoints import (
    PendingReport,
    ReportedCheckpoints,
    ReportLink,
    ReportOrigin,
)

log = logging.getLogger(__name__)

METRICS_BYTES_MAX = 1024 * 1024
REQUEST_TIMEOUT_S = 10.0
"""How long a member without a checkpoint of its own waits because of a planned change."""


class _NewestCheckpoint:
    """The newest checkpoint that a member knows of; it counts once its marker is written."""

    def __init__(self, run: RunDirectory | None, path: str) -> None:
        """Begin with the one that a generation begins with, "" for none.

        It is recorded, but its writer may have been killed before it wrote the marker.
        """
        self._run = run
        self._counts = path
        self._pending = ""
        self._unmarked = run.name_of(path) if run is not None else ""

    @property
    def unmarked(self) -> str:
        """Return the name of one that is recorded, and may have no marker yet, "" for none."""
        return self._unmarked

    @property
    def known(self) -> str:
        """Return the path of the newest one that surely counts, without asking storage."""
        return self._counts

    def found(self, pending: str = "") -> str:
        """Return the path of the newest one that counts, as storage has it, "" for none.

        Args:
            pending: one that waits for the coordinator, by default the newest of those.
        """
        run, pending = self._run, pending or self._pending
        if run is not None:
            with contextlib.suppress(StorageError):
                if self._unmarked:
                    run.finish(self._unmarked)
                    self._unmarked = ""
            with contextlib.suppress(StorageError):
                name = run.name_of(pending)
                if name and run.is_committed(name):
                    self._counts = pending
        return self._counts

    def concluded(self, outcome: ReportOutcome) -> None:
        if outcome.is_pending:
            self._pending = outcome.path
        else:
            self._counts, self._pending = outcome.path, ""


class Reporter:
    """The reports of one generation; used by the thread that made it.

    Attributes:
        reports_since: reports made after the newest checkpoint in this generation.
        has_left: the members agreed to leave this generation.
    """

    def __init__(
        self,
        origin: ReportOrigin,
        run: RunDirectory | None,
        *,
        votes: ReportVotes,
        link: ReportLink,
        clock: Clock,
        newest_checkpoint: str = "",
        committer: Committer | None = None,
        spec: JobSpec | None = None,
        on_commit: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin a generation.

        Args:
            origin: of this member.
            run: the run directory, None if the job has none.
            votes: of this generation's group.
            link: to the coordinator.
            clock: for the time of day in files.
            newest_checkpoint: path of the one that this generation begins with.
            committer: makes checkpoints count, None if the job has no run directory.
            spec: which checkpoints are kept, None for all.
            on_commit: called when a checkpoint of ours counts, by the thread that committed it.
            is_over: whether the group is to be left at once.
        """
        self.reports_since = 0
        self.has_left = False
        self._origin = origin
        self._run = run
        self._votes = votes
        self._link = link
        self._clock = clock
        self._newest = _NewestCheckpoint(run, newest_checkpoint)
        self._reported = ReportedCheckpoints(
            origin, run, link=link, clock=clock, committer=committer, on_commit=on_commit
        )
        if self._newest.unmarked:
            self._reported.pending.add(self._newest.unmarked)
        self._spec = spec
        self._aside: ReportVotes | None = None
        self._is_over = is_over
        self._index = 0
        self._background: BackgroundDelivery | None = None
        self._in_place = False
        self._thread = (os.getpid(), threading.get_ident())

    @property
    def newest_checkpoint(self) -> str:
        """Return the path of the newest checkpoint that this member knows of, "" for none."""
        under_way = self._background
        outcome = under_way.outcome if under_way is not None and under_way.is_over() else None
        is_pending = outcome is not None and outcome.is_pending
        found = self._newest.found(outcome.path if outcome is not None and is_pending else "")
        return found if outcome is None or is_pending else outcome.path or found

    def damaged_checkpoint(self) -> str:
        """Return the path of the newest checkpoint if it is damaged, "" otherwise; reads all of it.

        It is set aside then, and the coordinator has the groups to come begin with the one before.
        """
        run, path = self._run, self.newest_checkpoint
        name = run.name_of(path) if run is not None else ""
        with contextlib.suppress(StorageError):
            if run is not None and name and find_damage(run, name):
                return path
        return ""

    def report(
        self, metrics: str, checkpoint: str | DeliveredParts | None = None, name: str | None = None
    ) -> None:
        """Keep metrics, and commit a checkpoint together with the other members.

        Args:
            metrics: JSON object.
            checkpoint: local directory with this member's files, or how they come to the run
                directory; `NO_PART` if it has none and waits for the others', None if it has none.
            name: of the checkpoint's directory, the same on all members; by default made from
                job, generation and number of the report, so that it is never used twice.

        Raises:
            StorageError: a member could not store its part; raised by every member that waits for
                it. Of an upload in the background, at the next report or at the end.
            GroupChanged: the members agreed to leave the group here.
            UsageError: called from another thread, with metrics that are not an object, or with a
                checkpoint that the members upload in different ways.
        """
        meets, delivered = checkpoint is not None, _copied(checkpoint)
        name = self._check_call(metrics, delivered, name)
        late = self._settle_upload(must_end=delivered is not None)
        index, self._index = self._index, self._index + 1
        self.reports_since += 1
        name = name or self._default_name(index)
        self._keep_metrics(index, metrics, checkpoint=name if delivered is not None else "")
        self._begin_part(index, name, delivered)
        requests = self._link.leave_request(self._origin.generation) is not None
        waits = requests or meets
        self._votes.vote(index, ReportVote(waits, requests, delivered is not None))
        count = VoteCount()
        if waits:
            patience_s = None if meets else REQUEST_TIMEOUT_S
            count = self._votes.wait_closed(index, patience_s=patience_s)
        validation = delivered.validation if delivered is not None else ""
        report = PendingReport(index, index, metrics, leaves=count.leaves(), validation=validation)
        if count.with_checkpoint == 0:
            self._reported.post(index, metrics)
        elif delivered is None:
            self._reported.post(index, metrics)
            self._receive(report, count.waiting)
        else:
            self._complete(report, name, delivered, count)
        if late:
            raise late

    def report_in_place(
        self,
        metrics: str,
        checkpoint: str | DeliveredParts | None = None,
        name: str | None = None,
        *,
        where: str,
        voters: int,
    ) -> None:
        """Do as `report`, in a loop that continues when the group changes.

        No member leaves here, because such a loop leaves between steps. When the group breaks while
        its members wait for each other, the checkpoint is given up, and training goes on.

        Args:
            metrics: JSON object.
            checkpoint: local directory with this member's files, or how they come to the run
                directory; None if it has none.
            name: of the checkpoint's directory.
            where: names the report, the same on all members: its place in the run.
            voters: how many members of this group will make it; others have made it before.
        """
        self._in_place = True
        meets, delivered = checkpoint is not None, _copied(checkpoint)
        name = self._check_call(metrics, delivered, name)
        late = self._settle_upload(must_end=delivered is not None)
        index, self._index = self._index, self._index + 1
        self.reports_since += 1
        name = name or f"checkpoint-{self._origin.job_id}-g{self._origin.generation:06d}-{where}"
        named = name if delivered is not None else ""
        self._keep_metrics(index, metrics, where, checkpoint=named)
        try:
            if self._is_over():
                raise GroupError("it is over already")
            self._begin_part(where, name, delivered)
            self._votes.vote(where, ReportVote(meets, False, delivered is not None), voters=voters)
            count = self._votes.wait_closed(where) if meets else VoteCount()
            validation = delivered.validation if delivered is not None else ""
            report = PendingReport(where, index, metrics, validation=validation)
            if delivered is not None:
                self._complete(report, name, delivered, count)
            else:
                self._reported.post(index, metrics)
                if count.with_checkpoint:
                    self._receive(report, count.waiting)
                elif meets:
                    self._votes.forget(where, count.waiting)
        except (GroupError, dist.DistError) as error:
            if not self._reported.has_posted(index):
                self._reported.post(index, metrics)
            if delivered is not None:
                log.warning("checkpoint_given_up name=%s: the group changed: %s", name, error)
        if late:
            raise late

    def kept(
        self, found: Sequence[tuple[str, CheckpointMarker]]
    ) -> list[tuple[str, CheckpointMarker]]:
        """Return those of some checkpoints that are to be kept; others may not be gone yet."""
        kept = kept_names(found, self._spec) if self._spec is not None else dict(found)
        return [pair for pair in found if pair[0] in kept]

    def is_uploading(self) -> bool:
        """Return whether a checkpoint of ours is being uploaded in the background."""
        return self._background is not None and not self._background.is_over()

    def position(self) -> str:
        """Return where in the run we are, in words that are the same after a fresh start.

        Reports are counted from the newest checkpoint: that is where the next attempt begins.
        """
        name = self._newest.known.rpartition("/")[2]
        return f"report {self.reports_since}" + (f" after {name}" if name else "")

    def is_at_start(self) -> bool:
        """Return whether the run has no report and no checkpoint to determine its place by."""
        return not self.reports_since and not self._newest.known

    def finish(self) -> None:
        """The train function returned: end what is under way, and delete what is not to be kept.

        Raises:
            StorageError: the last checkpoint could not be stored.
            GroupError: the group broke before it was; not for a loop that continues in place.
        """
        problem = self._settle_upload(must_end=True)
        self._reported.finish(self._is_over)
        if problem:
            raise problem

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write this beside the files of each reported checkpoint; the script's own comes first."""
        self._reported.metadata = metadata

    def close(self) -> None:
        """The generation is over: nothing comes of what is still under way."""
        background, self._background = self._background, None
        if background is not None:
            background.give_up("the group changed, or the train function was left")

    def flush(self, *, has_returned: bool = True, group_over: bool = False) -> None:
        """The train function is over, however it ended: let all that was reported be seen.

        Not part of `close`: storage that is slow must not hold up the next group.

        Args:
            has_returned: have it on the disk too; a recovery does not wait for that.
            group_over: the function was left because of its group.
        """
        self._reported.flush_metrics(
            "metrics_lost", lambda: self._is_over() or group_over, to_disk=has_returned
        )

    def _check_call(
        self, metrics: str, delivered: DeliveredParts | None, name: str | None
    ) -> str | None:
        """Refuse a call that cannot work; return the checkpoint's name, None for the default."""
        if self.has_left:
            self._leave()
        if (os.getpid(), threading.get_ident()) != self._thread:
            raise UsageError(
                "train.report was called from another thread or process than the one that runs "
                "the train function; hand the values over and report them there"
            )
        if len(metrics) > METRICS_BYTES_MAX:
            raise UsageError(
                f"train.report: metrics have {len(metrics)} characters as JSON, at most "
                f"{METRICS_BYTES_MAX} are kept; write large data into a checkpoint"
            )
        if not isinstance(json.loads(metrics), dict):
            raise UsageError(f"train.report: metrics {metrics[:80]}: expected a dict")
        if delivered is None:
            return name
        if self._run is None:
            raise UsageError(
                "train.report: the job has no run directory for checkpoints; give it one "
                "(RunConfig(storage_path=...), or --storage-path)"
            )
        if name is not None and ("/" in name or not name.strip(".")):
            raise UsageError(
                f"train.report: checkpoint_dir_name={name!r}: expected the name of one directory, "
                f"without slashes; it is made in {self._run.path}/checkpoints"
            )
        if delivered.mode is not CheckpointUploadMode.NO_UPLOAD:
            return name
        return name_in(self._run, delivered.path, "checkpoint_upload_mode=NO_UPLOAD for")

    def _default_name(self, index: int) -> str:
        origin = self._origin
        return f"checkpoint-{origin.job_id}-g{origin.generation:06d}-{index:06d}"

    # ------------------------------------------------------------ this member's share

    def _keep_metrics(
        self, index: int, metrics: str, where: str = "", *, checkpoint: str = ""
    ) -> None:
        """Write this report's line.

        Args:
            index: number of the report in this generation.
            metrics: JSON object.
            where: names the report in a loop that continues, "" elsewhere.
            checkpoint: name of the one that it has a part of, "" for none.
        """
        if self._run is None:
            return
        record: dict[str, Any] = {
            "generation": self._origin.generation,
            "rank": self._origin.rank,
            "index": index,
            "unix_ns": self._clock.unix_ns(),
            "world_size": self._origin.world_size,
            "metrics": json.loads(metrics),
        }
        if checkpoint:
            record["checkpoint"] = checkpoint
        if index == 0 and self._newest.known and not where:
            record["resumed_from"] = self._newest.known.rpartition("/")[2]
        if where:
            record["at"] = where  # A run that goes back reports this place again.
        self._run.metrics.add(self._origin.rank, record)

    def _begin_part(self, key: Index, name: str, delivered: DeliveredParts | None) -> None:
        """Inform the others of our part, before our vote: that it is stored, or that it comes."""
        if delivered is not None and delivered.way:
            self._votes.report_way(key, delivered.way)
        elif delivered is not None:
            # The line that names the checkpoint, before our part of it.
            self._reported.flush_metrics("metrics_kept", self._is_over)
            self._votes.add_part(key, self._store(key, name, Path(delivered.path)))

    def _store(self, key: Index, name: str, source: Path) -> ReportPart:
        """Copy this member's files; a failure is sent to all, not raised here."""
        run, rank = self._run, self._origin.rank
        if run is None:
            return ReportPart(rank, name, error="the job has no run directory")
        try:
            self._reported.check_free(name)
            wait_given_up(name)
            files = run.upload(source, name, claim=lambda path: self._votes.claim(key, path))
        except StorageError as error:
            return ReportPart(rank, name, error=str(error))
        return ReportPart(rank, name, files)

    # ------------------------------------------------------------ all together

    def _complete(
        self, report: PendingReport, name: str, delivered: DeliveredParts, count: VoteCount
    ) -> None:
        """Complete a checkpoint that we have a part of; all members must upload in the same way."""
        members = count.with_checkpoint
        ways = self._votes.ways(report.key)
        alike = members if delivered.way else 0
        if ways != (delivered.way,) * alike:
            self._reported.post(report.index, report.metrics)
            raise UsageError(
                f"train.report: {members} ranks brought parts of one checkpoint in different ways "
                f"(this one: {delivered.way or 'SYNC'}; not SYNC: {', '.join(ways) or 'none'}): "
                f"pass the same checkpoint_upload_mode and checkpoint_upload_fn on every rank"
            )
        if not delivered.way:
            outcome = self._reported.conclude(self._votes, report)
            self._votes.forget(report.key, count.waiting)
            if outcome.path:
                delivered.release()
            self._take(outcome)
            return
        self._votes.forget(report.key, count.waiting)
        owns_files = (
            delivered.upload is None and delivered.mode is not CheckpointUploadMode.NO_UPLOAD
        )
        report = replace(report, key=_later(report.key), owns_files=owns_files)
        is_aside = delivered.mode is CheckpointUploadMode.ASYNC and not report.leaves
        readers = members if is_aside else count.waiting
        delivery = Delivery(report, name, delivered, members, readers)
        if is_aside:
            if self._aside is None:
                self._aside = self._votes.open_again()
            # Known before it runs, so that whatever ends this call can give it up.
            self._background = BackgroundDelivery(delivery, self._reported, self._aside)
            self._background.start()
        else:
            self._reported.flush_metrics("metrics_kept", self._is_over)
            self._take(delivery.make(self._reported, self._votes, lambda: None))

    def _receive(self, report: PendingReport, waiting: int) -> None:
        """Learn, without a part of our own, what became of the others' checkpoint.

        Not of one that is uploaded in the background, while all train on.
        """
        ways = self._votes.ways(report.key)
        if ways:
            self._votes.forget(report.key, waiting)
        if ways and not report.leaves and any(map(_is_aside, ways)):
            return
        key = _later(report.key) if ways else report.key
        outcome = self._votes.wait_outcome(key)
        if not report.leaves:
            self._votes.forget(key, waiting)
        self._take(outcome)

    def _settle_upload(self, *, must_end: bool) -> StorageError | None:
        """Take what became of the upload in the background; wait for it if it must end now.

        Returns:
            Why it failed, for the end of this report: members may learn of it one report apart,
            and each must make all of them.
        """
        background = self._background
        if background is None or not (must_end or background.is_over()):
            return None
        try:
            outcome = background.wait(self._is_over)
        except (GroupError, dist.DistError):
            self.close()
            if not self._in_place:
                raise
            return None
        except Exception:
            self._background = None
            raise
        self._background = None
        if outcome.error:
            return StorageError(outcome.error)
        self._go_on_from(outcome, self._index - 1 - background.delivery.report.index)
        return None

    def _take(self, outcome: ReportOutcome) -> None:
        """Continue from what became of a checkpoint."""
        if outcome.error:
            raise StorageError(outcome.error)
        self._go_on_from(outcome, 0)
        if outcome.leaves:
            self.has_left = True
            self._leave()

    def _go_on_from(self, outcome: ReportOutcome, reports_since: int) -> None:
        """Count from this checkpoint, unless the group is over, which has refused it."""
        if not outcome.path:
            return
        self.reports_since = reports_since
        self._newest.concluded(outcome)
        if outcome.is_pending:
            self._reported.pending.add(outcome.path.rpartition("/")[2])
        else:
            self._reported.pending.clear()

    def _leave(self) -> NoReturn:
        generation = self._origin.generation
        leave_request = self._link.leave_request(generation)
        raise GroupChanged(leave_request.reason if leave_request is not None else "", generation)


def _is_aside(way: str) -> bool:
    return way.startswith(CheckpointUploadMode.ASYNC.value)


def _copied(checkpoint: str | DeliveredParts | None) -> DeliveredParts | None:
    if checkpoint is NO_PART:
        return None
    return DeliveredParts(checkpoint) if isinstance(checkpoint, str) else checkpoint


def _later(key: Index) -> Index:
    """Return the key of what is agreed on once the parts are there; it outlives later reports."""
    return f"{key}-later"


def place_of_failure(reporter: Reporter | None, kind: EntryKind, generation: int) -> str:
    """Return where in the run a failure happened, to recognize repeats.

    A script that has reported nothing keeps its place by itself, if at all: where it stands is
    not known, so that none of its failures repeats another, and max_failures alone counts.

    Args:
        reporter: of the call that failed, None before the first group.
        kind: of what was called.
        generation: the group that it was called in.
    """
    position = reporter.position() if reporter is not None else ""
    if kind is EntryKind.FUNCTION or (reporter is not None and not reporter.is_at_start()):
        return position
    return f"{position} of generation {generation}".lstrip()

"""`train.report`: metrics are kept at once, a checkpoint counts for all members or for none.

Without a checkpoint a report waits for nobody. With one, this member stores its files, everyone
votes (`agreement`), and the lead, the lowest rank that brought files, writes the marker, reports
the path and tells the others. If a planned change is due and every member waits here, all leave
at this very report, once the coordinator has recorded the checkpoint: nothing is lost.

Rule: every member calls `report` equally often in a generation; the n-th calls belong together.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from elastic.core.events.worker import UserReported, WorkerEvent
from elastic.core.messages import Progress
from elastic.core.world import Generation, JobId
from elastic.errors import GroupError, StorageError, UsageError
from elastic.runtime.clock import Clock
from elastic.storage.marker import UNKNOWN, Marker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.worker.agreement import Agreement, Index, Outcome, Part, Tally, Vote
from elastic.worker.exchange import Answer
from elastic.worker.interrupt import GroupChanged
from elastic.worker.pruning import Pruner

log = logging.getLogger(__name__)

METRICS_BYTES_MAX = 1024 * 1024
ANSWER_PATIENCE_S = 10.0
"""How long members that are to leave wait for the coordinator to record the checkpoint."""
RETRY_PATIENCE_S = 0.2
"""The same while an earlier report is still unanswered: the coordinator is away."""
WISH_PATIENCE_S = 10.0
"""How long a member without a checkpoint of its own waits because of a planned change."""


class Link(Protocol):
    """The way from the training thread to the coordinator; nothing here waits."""

    def post(self, item: WorkerEvent | Progress) -> None:
        """Tell what happened."""
        ...

    def wish(self, generation: Generation) -> str:
        """Return why this generation is to be left at its next boundary, "" if it is not."""
        ...

    def save_wish(self, generation: Generation) -> int:
        """Return the number of the newest wish for a checkpoint in this generation, 0 for none."""
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


class Reporter:
    """The reports of one generation; used by the thread that made it.

    Attributes:
        newest_checkpoint: path of the newest checkpoint that this member knows of, "" for none.
        reports_since: reports made after it in this generation.
        has_left: the members agreed to leave this generation.
    """

    def __init__(
        self,
        place: Place,
        run: RunDirectory | None,
        *,
        agreement: Agreement,
        link: Link,
        clock: Clock,
        newest_checkpoint: str = "",
        pruner: Pruner | None = None,
    ) -> None:
        """Begin a generation.

        Args:
            place: of this member.
            run: the run directory, None if the job has none.
            agreement: of this generation's group.
            link: to the coordinator.
            clock: for the time of day in files.
            newest_checkpoint: path of the one that this generation begins with.
            pruner: deletes checkpoints that are not to be kept, None to keep all.
        """
        self._pruner = pruner
        self.newest_checkpoint = newest_checkpoint
        self.reports_since = 0
        self.has_left = False
        self._place = place
        self._run = run
        self._agreement = agreement
        self._link = link
        self._clock = clock
        self._index = 0
        self._posted = 0
        self._unanswered: Answer | None = None
        self._thread = (os.getpid(), threading.get_ident())

    def report(self, metrics: str, checkpoint: str | None = None, name: str | None = None) -> None:
        """Keep metrics, and commit a checkpoint together with the other members.

        Args:
            metrics: JSON object.
            checkpoint: local directory with this member's files; None if it has none.
            name: of the checkpoint's directory, the same on all members; by default made from
                job, generation and number of the report, so that it is never used twice.

        Raises:
            StorageError: a member could not store its part, or the metrics cannot be written;
                raised by every member that brought a part.
            GroupChanged: the members agreed to leave the group here.
            UsageError: called from another thread, or with metrics that are not an object.
        """
        self._check_call(metrics, checkpoint)
        index, self._index = self._index, self._index + 1
        self.reports_since += 1
        problem = self._keep_metrics(index, metrics)
        name = name or self._default_name(index)
        if checkpoint is not None:
            self._agreement.add_part(index, self._store(index, name, Path(checkpoint)))
        wishes = bool(self._link.wish(self._place.generation))
        waits = wishes or checkpoint is not None
        self._agreement.vote(index, Vote(waits, wishes, checkpoint is not None))
        tally = Tally()
        if waits:
            patience_s = WISH_PATIENCE_S if checkpoint is None else None
            tally = self._agreement.wait_closed(index, patience_s=patience_s)
        if tally.with_checkpoint == 0:
            self._post(metrics, "")
        else:
            self._conclude(index, index, metrics, tally, has_part=checkpoint is not None)
        if problem:
            raise problem

    def report_in_place(
        self,
        metrics: str,
        checkpoint: str | None = None,
        name: str | None = None,
        *,
        where: str,
        voters: int,
    ) -> None:
        """Do as `report`, in a loop that goes on when the group changes.

        Nobody leaves here, because such a loop leaves between steps. When the group breaks while
        its members wait for each other, the checkpoint is given up, and training goes on.

        Args:
            metrics: JSON object.
            checkpoint: local directory with this member's files; None if it has none.
            name: of the checkpoint's directory.
            where: names the report, the same on all members: its place in the run.
            voters: how many members of this group will make it; others have made it before.
        """
        self._check_call(metrics, checkpoint)
        index, self._index = self._index, self._index + 1
        self.reports_since += 1
        problem = self._keep_metrics(index, metrics)
        name = name or f"checkpoint-{self._place.job_id}-g{self._place.generation:06d}-{where}"
        try:
            if checkpoint is not None:
                self._agreement.add_part(where, self._store(where, name, Path(checkpoint)))
            vote = Vote(checkpoint is not None, False, checkpoint is not None)
            self._agreement.vote(where, vote, voters=voters)
            if checkpoint is None:
                self._post(metrics, "")
            else:
                tally = self._agreement.wait_closed(where)
                self._conclude(where, index, metrics, tally, has_part=True)
        except (GroupError, dist.DistError) as error:
            if not self._has_posted(index):
                self._post(metrics, "")
            if checkpoint is not None:
                log.warning("checkpoint_given_up name=%s: the group changed: %s", name, error)
        if problem:
            raise problem

    def position(self) -> str:
        """Return where in the run we are, in words that are the same after a fresh start.

        Reports are counted from the newest checkpoint: that is where the next attempt begins.
        """
        name = self.newest_checkpoint.rpartition("/")[2]
        return f"report {self.reports_since}" + (f" after {name}" if name else "")

    def _check_call(self, metrics: str, checkpoint: str | None) -> None:
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
        if checkpoint is not None and self._run is None:
            raise UsageError(
                "train.report: the job has no run directory for checkpoints; give it one "
                "(RunConfig(storage_path=...), or --storage-path)"
            )

    def _default_name(self, index: int) -> str:
        place = self._place
        return f"checkpoint-{place.job_id}-g{place.generation:06d}-{index:06d}"

    # ------------------------------------------------------------ this member's share

    def _keep_metrics(self, index: int, metrics: str) -> StorageError | None:
        """Write the line; what goes wrong is raised after the vote, which others wait for."""
        if self._run is None:
            return None
        record: dict[str, Any] = {
            "generation": self._place.generation,
            "rank": self._place.rank,
            "index": index,
            "unix_ns": self._clock.unix_ns(),
            "metrics": json.loads(metrics),
        }
        try:
            self._run.append_metrics(self._place.rank, record)
        except StorageError as error:
            return error
        return None

    def _store(self, key: Index, name: str, source: Path) -> Part:
        """Copy this member's files; a failure is told to all, not raised here."""
        run, rank = self._run, self._place.rank
        if run is None:
            return Part(rank, name, error="the job has no run directory")
        try:
            files = run.upload(source, name, claim=lambda path: self._agreement.claim(key, path))
        except StorageError as error:
            return Part(rank, name, error=str(error))
        return Part(rank, name, files)

    # ------------------------------------------------------------ all together

    def _conclude(
        self, key: Index, index: int, metrics: str, tally: Tally, *, has_part: bool
    ) -> None:
        """Commit as the lead, or hear from it what became of the checkpoint.

        Args:
            key: of the report in the group's store.
            index: of the report in what the coordinator is told.
            metrics: of the report.
            tally: how the members voted.
            has_part: we brought files.
        """
        parts = self._agreement.parts(key) if has_part else ()
        if parts and parts[0].rank == self._place.rank:
            outcome = self._commit(index, metrics, parts, leaves=tally.leaves())
            claimed = {file.path for part in parts for file in part.files}
            self._agreement.tell_outcome(key, outcome, tuple(sorted(claimed)))
        else:
            self._post(metrics, "")
            outcome = self._agreement.wait_outcome(key)
        if outcome.error:
            raise StorageError(outcome.error)
        self.newest_checkpoint = outcome.path
        self.reports_since = 0
        if outcome.leaves:
            self.has_left = True
            self._leave()

    def _commit(
        self, index: int, metrics: str, parts: tuple[Part, ...], *, leaves: bool
    ) -> Outcome:
        """Write the marker, report the path, and find out whether all may leave."""
        try:
            path = self._mark(index, metrics, parts)
        except StorageError as error:
            self._post(metrics, "")
            return Outcome(error=str(error))
        answer = self._link.expect_answer(self._place.generation, index)
        self._post(metrics, path)
        outcome = Outcome(path=path, leaves=leaves and self._is_recorded(answer, path))
        if self._pruner is not None:
            self._pruner.committed(parts[0].name, answer)
        return outcome

    def finish(self) -> None:
        """The train function returned: delete the checkpoints that are not to be kept."""
        if self._pruner is not None:
            self._pruner.finish()

    def flush(self) -> None:
        """The train function is over, however it ended: let all that was reported be seen."""
        try:
            if self._run is not None:
                self._run.flush_metrics()
        except StorageError as error:
            log.warning("metrics_lost error=%r", str(error))

    def _mark(self, index: int, metrics: str, parts: tuple[Part, ...]) -> str:
        """Write the marker if the parts make a checkpoint, else remove what there is of it.

        Returns:
            The checkpoint's path.

        Raises:
            StorageError: why it does not count.
        """
        run, name = self._run, parts[0].name
        if run is None:
            raise StorageError("the job has no run directory")
        if run.is_committed(name):
            raise StorageError(f"{run.checkpoint_path(name)} exists already; use another name")
        refusal = _refusal(parts)
        if refusal:
            run.discard(name)
            raise StorageError(f"checkpoint {name} was not committed: {refusal}")
        marker = Marker(
            job_id=self._place.job_id,
            generation=self._place.generation,
            index=index,
            world_size=self._place.world_size,
            unix_ns=self._clock.unix_ns(),
            metrics=metrics,
            files=_files_of(parts),
        )
        return run.commit(name, marker)

    def _is_recorded(self, answer: Answer, path: str) -> bool:
        """Wait for the coordinator's word; without it leaving would lose what was done since."""
        is_away = self._unanswered is not None and not self._unanswered.ready.is_set()
        if not answer.wait(RETRY_PATIENCE_S if is_away else ANSWER_PATIENCE_S):
            self._unanswered = answer
            log.warning(
                "boundary_put_off generation=%d reason='the coordinator has not recorded %s yet'",
                self._place.generation,
                path,
            )
            return False
        self._unanswered = None
        if not answer.accepted:
            log.warning("checkpoint_refused path=%s reason=%r", path, answer.reason)
        return answer.accepted

    def _leave(self) -> NoReturn:
        generation = self._place.generation
        raise GroupChanged(self._link.wish(generation), generation)

    def _has_posted(self, index: int) -> bool:
        return self._posted > index

    def _post(self, metrics: str, checkpoint: str) -> None:
        place = self._place
        self._posted += 1
        self._link.post(UserReported(place.generation, place.rank, metrics, checkpoint))


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

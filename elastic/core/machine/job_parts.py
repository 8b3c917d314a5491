"""The parts of a job's state: its newest group, the release of its workers, what came of it.

Rule: what belongs to one of them is reset with it. Each phase here has a table of legal moves in
`transitions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from elastic.core.facts import (
    NO_GENERATION,
    CheckpointRecord,
    Failure,
    Generation,
    Group,
    WorkerId,
)
from elastic.core.machine.transitions import GROUP, RELEASE, GroupPhase, ReleasePhase, check_move
from elastic.core.policy.failure import FailureHistory
from elastic.core.policy.ranks import RankPlace
from elastic.core.records import FormerWorker, RankFailure

RANK_FAILURES_MAX = 16
"""Per job: each may have a traceback of 32,000 characters, and the record is written whole."""


class WaveKind(Enum):
    """The transition that the workers report one after the other."""

    COME_UP = "come up"
    """Members of a new group begin to train."""
    LEAVE = "leave"
    """Members stop at a boundary."""
    START = "start"
    """Workers of a job without a group become ready."""


@dataclass
class ReportWave:
    """The workers that have not sent this report yet.

    Attributes:
        left: workers that may be missing; the last of them is, as far as is known.
    """

    kind: WaveKind
    generation: Generation
    left: list[WorkerId] = field(default_factory=list)


@dataclass
class GroupHang:
    """Members of a group that keep the others waiting.

    Attributes:
        stuck: why the group can never continue, "" if it can.
        culprits: members that are about to be killed as hung, and since when their stacks are
            written.
        works: work of a member for which the others have waited long; for people.
    """

    stuck: str = ""
    culprits: dict[WorkerId, int] = field(default_factory=dict)
    works: str = ""


@dataclass
class LeavingNodes:
    """What was done about nodes of a group that leave.

    Attributes:
        is_news: its members were not notified yet of one of them.
        saved_ns: when a checkpoint was last requested because it needs them.
        saved_before: path of the newest automatic checkpoint of its generation when its members
            were asked to save where they leave, "" for none.
        is_unsaved: its members left the group before in order to save, and that save failed.
    """

    is_news: bool = False
    saved_ns: int | None = None
    saved_before: str = ""
    is_unsaved: bool = False


@dataclass
class Interruption:
    """How training is interrupted, until each member of a group has done a step.

    Attributes:
        since_ns: when it began, None while training is not interrupted.
        lost: members lost meanwhile, and how; for people.
    """

    since_ns: int | None = None
    lost: list[str] = field(default_factory=list)


@dataclass
class NewestGroup:
    """What is known of a job's newest group, in this term.

    Attributes:
        group: its members by rank; None before the first one.
        anew_ns: since when its members are replaced by new processes, which all start together;
            None if they are not.
        announced_ns: when it was announced, or ordered to leave.
        training_since_ns: when the last member began to train, None before.
        first_steps: wall clock at the end of each member's first step in this generation.
        holders: members of the last group before in which a step was committed; empty after a
            restart of the coordinator.
        has_looped: a member was in a loop that can be saved at any step, in this group or before.
        ends_announced: the newest generation notified of its end before the next was computed.
        placed: the ranks of its members, computed once.
        wave: reports of its workers that are spread over time now, None for none.
    """

    group: Group | None = None
    phase: GroupPhase = GroupPhase.NONE
    anew_ns: int | None = None
    announced_ns: int = 0
    training_since_ns: int | None = None
    first_steps: dict[WorkerId, int] = field(default_factory=dict)
    holders: frozenset[WorkerId] = frozenset()
    has_looped: bool = False
    ends_announced: Generation = NO_GENERATION
    hang: GroupHang = field(default_factory=GroupHang)
    leavers: LeavingNodes = field(default_factory=LeavingNodes)
    interruption: Interruption = field(default_factory=Interruption)
    placed: tuple[Group, tuple[RankPlace, ...]] | None = None
    wave: ReportWave | None = None

    def move(self, phase: GroupPhase) -> None:
        """Enter a phase; raise InvariantViolation if that move is not allowed."""
        if phase is not self.phase:
            check_move(GROUP, "the newest group of a job", self.phase, phase)
            self.phase = phase

    @property
    def is_asked_to_leave(self) -> bool:
        return self.phase in (GroupPhase.LEAVING, GroupPhase.SAVING)


@dataclass
class JobRelease:
    """Why a job should hold fewer workers or none, and how far that has come.

    Attributes:
        paused: a user paused it: it should hold no workers.
        stopping: why it ends once it holds no workers, "" if it does not; then `paused`, too.
        hurries: its workers must end at once, whatever their scripts are doing.
        yields_to: the job for which the queue makes it release its slots, "" for none.
        yields: workers that the queue makes it release for another job.
        preempted_by: the job that preempted it, "" once it trains again.
        passed_over_until_ns: it is not preempted before, because it could not be saved when it
            was last.
        pause_request: number of the checkpoint request before its pause, 0 for none.
        deadline_ns: time limit for the checkpoint, then for the boundary; None before.
        request_again_ns: a late pause requests no other checkpoint before.
    """

    phase: ReleasePhase = ReleasePhase.NONE
    paused: bool = False
    stopping: str = ""
    hurries: bool = False
    yields_to: str = ""
    yields: frozenset[WorkerId] = frozenset()
    preempted_by: str = ""
    passed_over_until_ns: int = 0
    pause_request: int = 0
    deadline_ns: int | None = None
    request_again_ns: int = 0

    def move(self, phase: ReleasePhase) -> None:
        """Enter a phase; raise InvariantViolation if that move is not allowed."""
        if phase is not self.phase:
            check_move(RELEASE, "the release of a job's workers", self.phase, phase)
            self.phase = phase

    @property
    def is_leaving(self) -> bool:
        """Return whether its group was asked to leave, and no other one is formed."""
        return self.phase is ReleasePhase.LEAVING

    def reset(self) -> None:
        """Reset the progress of a pause or preemption, for the next time."""
        self.move(ReleasePhase.NONE)
        self.pause_request = 0
        self.deadline_ns = None
        self.request_again_ns = 0


@dataclass
class JobOutcome:
    """What has failed in a job, and what its train function returned.

    Attributes:
        failure, failed_worker: the newest failure, and whose it is.
        rank_failures, failed_in: what members have raised, and in which generation.
        failure_generation, loss_generation: the newest that was charged for a failure, a loss. A
            damaged checkpoint is charged as a loss, and sets both.
        history: failures and losses, against their budgets.
        preemptions: how many nodes an announced drain took from its groups; a separate budget.
        finished: results of the train function, by finished member; kept after it is gone.
        result: that of rank 0, once the job has succeeded.
        former: workers that are gone, the newest of them.
        restart_at_ns: no worker is started before (back-off).
    """

    failure: Failure | None = None
    failed_worker: str = ""
    rank_failures: tuple[RankFailure, ...] = ()
    failed_in: Generation = NO_GENERATION
    failure_generation: Generation = NO_GENERATION
    loss_generation: Generation = NO_GENERATION
    history: FailureHistory = field(default_factory=FailureHistory)
    preemptions: int = 0
    finished: dict[WorkerId, str] = field(default_factory=dict)
    result: str = ""
    former: tuple[FormerWorker, ...] = ()
    restart_at_ns: int = 0

    def is_charged_already(self, generation: Generation, after: FailureHistory) -> bool:
        """Return whether the job was charged for this attempt; if not, it is now.

        An attempt fails once, however many of its workers are lost: a wrong batch raises in every
        rank, and a step that needs too much memory kills all workers of a node. Before the first
        group every worker is an attempt of its own.

        Args:
            generation: of the worker that is gone.
            after: the history if its exit is charged.
        """
        if after.failures > self.history.failures:
            newest = self.failure_generation
            self.failure_generation = max(newest, generation)
        elif after.losses > self.history.losses:
            newest = self.loss_generation
            self.loss_generation = max(newest, generation)
        else:
            return False
        return NO_GENERATION < generation <= newest

    def note_failure(self, generation: Generation, rank: int, failure: Failure) -> bool:
        """Record a failure of a member of the newest group; return whether it is new."""
        if self.failed_in != generation:
            self.rank_failures, self.failed_in = (), generation
        is_known = any(one.rank == rank for one in self.rank_failures)
        if rank < 0 or is_known or len(self.rank_failures) == RANK_FAILURES_MAX:
            return False
        self.rank_failures = (*self.rank_failures, RankFailure(rank, failure))
        return True


@dataclass
class JobReports:
    """What members have reported of a job, and what they are asked to.

    Attributes:
        checkpoints: the recorded ones, oldest first.
        save_request: number of the newest unserved checkpoint request, 0 for none.
        metrics: the newest, as JSON.
        newest: (generation, index) of the newest metrics of this term.
        micro_batches: per step, as last reported by its members in this term; 0 if unknown.
    """

    checkpoints: tuple[CheckpointRecord, ...] = ()
    save_request: int = 0
    metrics: str = ""
    newest: tuple[Generation, int] = (NO_GENERATION, -1)
    micro_batches: int = 0

    def automatic_of(self, generation: Generation) -> str:
        """Return the path of the newest automatic checkpoint of a generation, "" for none."""
        found = [one for one in self.checkpoints if one.automatic and one.generation == generation]
        return found[-1].path if found else ""


@dataclass(frozen=True)
class Growth:
    """How far a job that feeds another one has grown; as far as its newest group after a restart.

    Attributes:
        workers: it has at most so many, or its min.
        fed: generation of the job that it feeds when it last grew.
        share: of that one's steps that waited for data then.
    """

    workers: int = 0
    fed: Generation = NO_GENERATION
    share: float = 0.0


@dataclass
class JobSize:
    """Within which bounds a job has workers, beside those of its spec.

    Attributes:
        bounds: (min, max) workers that a user set after the submission, None for those of the spec.
        growth: how far it has grown, if it feeds another one.
    """

    bounds: tuple[int, int] | None = None
    growth: Growth = field(default_factory=Growth)


@dataclass(frozen=True)
class JobSubmission:
    """What the coordinator noted when it took the job.

    Attributes:
        sequence: its number among all jobs of the cluster.
        submitter: name of the token or certificate, "" if callers are not identified.
    """

    sequence: int
    submitter: str = ""

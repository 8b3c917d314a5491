"""Events and effects of the coordinator's state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.events.shared import Note, Tick
from elastic.core.messages import (
    AgentMessage,
    CoordinatorMessage,
    Hello,
)
from elastic.core.telemetry import Goodput
from elastic.core.world import (
    CheckpointRecord,
    Failure,
    Generation,
    Group,
    JobId,
    JobPhase,
    NodeId,
    SessionId,
    WorkerId,
)


@dataclass(frozen=True)
class RankFailure:
    """The exception that a worker's code raised."""

    rank: int
    failure: Failure


@dataclass(frozen=True)
class FormerWorker:
    """A worker that is gone.

    Attributes:
        worker_id: "node/serial".
        rank: in its last group, -1 if it was in none.
        generation: of that group, 0 if it was in none.
    """

    worker_id: WorkerId
    rank: int
    generation: Generation


FORMER_MAX = 1000


@dataclass(frozen=True)
class JobRecord:
    """The durable state of one job; written whole.

    Attributes:
        group: the newest group, None before the first.
        generation: of the newest group; never decreases, also while there is no group.
        failures: how often user code raised so far.
        losses: how many workers were lost in a row without a healthy period.
        preemptions: how many nodes an announced drain took from its groups so far.
        checkpoints: recorded and kept, oldest first.
        reason: why it waits, or how it ended.
        failure, failed_worker: the first failure of the last attempt, shown once and last.
        rank_failures: of the group in which that was, in the order of their reports; at most
            `RANK_FAILURES_MAX`.
        result: JSON that rank 0's train function returned.
        metrics: JSON of rank 0's newest report.
        sequence: order of submission.
        min_workers, max_workers: the bounds that a user set later, 0 for those of the spec.
        paused: a user paused it; the phase shows whether it still holds workers.
        stopping: why it ends as soon as it holds no workers, "" if it does not; then `paused`, too.
        preempted_by: the job that it gave all its workers to, and the priorities: "j-1 (priority
            10 over 0)"; "" once it trains again.
        submitter: name of the token or certificate, "" if callers are not identified.
        is_save_requested: the newest group's members must save their state where they leave.
        leaves_for: the job that they leave for, and the priorities; "" for none.
        since_unix_ns: wall clock when it entered its phase, 0 if unknown. For people only: no
            decision may depend on a clock that can be set.
        goodput: the time of its workers by category, when this was written.
        former: workers that it had, oldest first; the newest `FORMER_MAX`. Their output is on
            their nodes.
    """

    spec: JobSpec
    phase: JobPhase
    generation: Generation = 0
    group: Group | None = None
    failures: int = 0
    losses: int = 0
    preemptions: int = 0
    checkpoints: tuple[CheckpointRecord, ...] = ()
    reason: str = ""
    failure: Failure | None = None
    failed_worker: str = ""
    result: str = ""
    metrics: str = ""
    sequence: int = 0
    min_workers: int = 0
    max_workers: int = 0
    paused: bool = False
    preempted_by: str = ""
    submitter: str = ""
    is_save_requested: bool = False
    leaves_for: str = ""
    since_unix_ns: int = 0
    stopping: str = ""
    rank_failures: tuple[RankFailure, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    former: tuple[FormerWorker, ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and largest permitted group size now."""
        return self.min_workers or self.spec.min_workers, self.max_workers or self.spec.max_workers


@dataclass(frozen=True)
class Cordon:
    """A node on which no new workers start, by order of an operator."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class NodesRecord:
    """The durable state of nodes; written whole.

    Attributes:
        cordons: by node, also of nodes that are not connected now.
    """

    cordons: tuple[Cordon, ...] = ()


@dataclass(frozen=True)
class Recovered:
    """First event of a term: the contents of the journal (empty on a new store).

    Attributes:
        term: counts the terms on this store from 1, and never decreases.
        history: id of the store in which the term counts.
        secret: random, of this term; agents authenticate to each other with keys derived from it.
        unix_ns: the wall clock now, 0 if unknown.
    """

    jobs: tuple[JobRecord, ...]
    term: int = 1
    history: str = ""
    nodes: NodesRecord = NodesRecord()
    secret: bytes = field(default=b"", repr=False, compare=False)
    unix_ns: int = field(default=0, compare=False)


@dataclass(frozen=True)
class AgentConnected:
    """An agent opened a stream and sent its Hello."""

    session: SessionId
    hello: Hello


@dataclass(frozen=True)
class AgentDisconnected:
    """A stream ended, or its keepalive timed out."""

    session: SessionId
    reason: str


@dataclass(frozen=True)
class AgentMessageReceived:
    """A message came over a stream."""

    session: SessionId
    message: AgentMessage


@dataclass(frozen=True)
class SubmitRequested:
    """A user submits a job; answered by `Reply`.

    Attributes:
        submitter: name of the token or certificate, "" if callers are not identified.
        dry_run: only answer whether the job would be accepted now.
    """

    request_id: str
    spec: JobSpec
    submitter: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class StopRequested:
    """A user stops a job; answered by `Reply`. Stopping an ended job is refused.

    Attributes:
        now: stop without a checkpoint. Otherwise the state is saved first, if possible.
    """

    request_id: str
    job_id: JobId
    reason: str
    now: bool = False


@dataclass(frozen=True)
class CheckpointRequested:
    """A user requests a checkpoint of a job now; answered by `Reply`, before one is taken.

    Refused if none can be taken: the job has ended, does not train, or has no run directory. The
    reply's text is the number of the request.
    """

    request_id: str
    job_id: JobId


@dataclass(frozen=True)
class NodeDrainRequested:
    """An operator drains a node; answered by `Reply`."""

    request_id: str
    node_id: NodeId
    timeout_ns: int
    reason: str


@dataclass(frozen=True)
class EventBatch:
    """Events that were queued together, oldest first.

    The machine decides once after all of them: if ten thousand agents send at the same moment, ten
    thousand evaluations of the same group would have the same result.
    """

    events: tuple[CoordinatorEvent, ...]


@dataclass(frozen=True)
class NodeCordonRequested:
    """An operator cordons or uncordons a node; answered by `Reply`.

    Attributes:
        cordoned: no new workers may start there; False removes the cordon.
        reason: for people; of a cordon only.
    """

    request_id: str
    node_id: NodeId
    cordoned: bool
    reason: str


@dataclass(frozen=True)
class PauseRequested:
    """A user pauses a job, which releases its workers; answered by `Reply`."""

    request_id: str
    job_id: JobId


@dataclass(frozen=True)
class ResumeRequested:
    """A user resumes a paused job; answered by `Reply`."""

    request_id: str
    job_id: JobId


@dataclass(frozen=True)
class ScaleRequested:
    """A user sets other bounds for a job's group; answered by `Reply`.

    Attributes:
        min_workers, max_workers: 0 leaves that bound unchanged.
    """

    request_id: str
    job_id: JobId
    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class WokeFromSuspend:
    """This coordinator did not run for a while: it was stopped, or its machine was.

    Attributes:
        slept_ns: for how long.
    """

    slept_ns: int


CoordinatorEvent = (
    Recovered
    | WokeFromSuspend
    | EventBatch
    | AgentConnected
    | AgentDisconnected
    | AgentMessageReceived
    | SubmitRequested
    | StopRequested
    | CheckpointRequested
    | NodeDrainRequested
    | NodeCordonRequested
    | PauseRequested
    | ResumeRequested
    | ScaleRequested
    | Tick
)


@dataclass(frozen=True)
class Persist:
    """Make these records durable (replacing those of the same job) before later effects.

    The driver sends nothing of the effects behind this one before the store has confirmed it. So a
    group that some worker knows of is in the store, and a coordinator that restarts reads it there
    and announces it again. One that was killed before the store confirmed has announced nothing:
    the next coordinator forms a group from what the store has, under the same number, which then
    stands for one group only.
    """

    records: tuple[JobRecord, ...]


@dataclass(frozen=True)
class PersistNodes:
    """Make this record durable (replacing the previous one) before later effects."""

    record: NodesRecord


@dataclass(frozen=True)
class Forget:
    """Remove the records of these ended jobs; need not be durable before later effects."""

    job_ids: tuple[JobId, ...]


@dataclass(frozen=True)
class SendAgent:
    """Send over this session; if it is gone, the message is dropped."""

    session: SessionId
    message: CoordinatorMessage


@dataclass(frozen=True)
class CloseSession:
    """End the stream after the messages sent before."""

    session: SessionId
    reason: str


@dataclass(frozen=True)
class Reply:
    """Reply to a user's request.

    Attributes:
        error: "" for success, else one of "already_exists", "not_found", "invalid",
            "failed_precondition", "exhausted".
        text: for success the id of the object, for a drain its time limit in ns, else the error
            text.
    """

    request_id: str
    error: str
    text: str


CoordinatorEffect = Persist | PersistNodes | Forget | SendAgent | CloseSession | Reply | Note

"""What can happen to the coordinator's machine, and what it may ask for."""

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
    """What a worker's code raised.

    Attributes:
        rank: of the worker, in the group that it failed in.
    """

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
    """All that must survive the coordinator of one job; written whole.

    Attributes:
        phase: where the job stands.
        group: the newest group, None before the first.
        generation: of the newest group; never falls, also when there is no group now.
        failures: how often user code raised so far.
        losses: how many workers were lost in a row without a healthy period.
        preemptions: how many nodes an announced drain took from its groups so far.
        checkpoints: recorded and kept, oldest first.
        reason: why it waits, or how it ended.
        failure, failed_worker: the first failure of the last attempt, shown once and last.
        rank_failures: of the group in which that was, in the order in which they were heard of; at
            most `RANK_FAILURES_MAX`.
        result: JSON that rank 0's train function returned.
        metrics: JSON of rank 0's newest report.
        sequence: order of submission.
        min_workers, max_workers: the bounds that a user set later, 0 for those of the spec.
        paused: a user wants it to hold no workers; the phase says whether it holds some still.
        stopping: why it ends as soon as it holds none, "" if it need not; it is paused, too.
        preempted_by: the job that it gave all its workers to, and the priorities: "j-1 (priority
            10 over 0)"; "" once it trains again.
        submitter: by which token or certificate, "" if users are not told from each other.
        is_save_requested: the newest group's members were told to save their state where they
            leave.
        leaves_for: the job for which they were, and the priorities; "" if it is for none.
        since_unix_ns: wall clock when it entered its phase, 0 if not known. For people only: no
            decision may rest on a clock that can be set.
        goodput: where the time of its workers went, when this was written.
        former: workers that it had, oldest first; the newest `FORMER_MAX`. Their output is where
            they ran.
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
        """Return the smallest and the largest group that it may have now."""
        return self.min_workers or self.spec.min_workers, self.max_workers or self.spec.max_workers


@dataclass(frozen=True)
class Cordon:
    """A node on which no new workers start, because an operator said so.

    Attributes:
        reason: for people.
    """

    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class NodesRecord:
    """All that must survive the coordinator of nodes; written whole.

    Attributes:
        cordons: by node, also of nodes that are not here now.
    """

    cordons: tuple[Cordon, ...] = ()


@dataclass(frozen=True)
class Recovered:
    """First event of a coordinator's life: what the journal holds (nothing, at the very first).

    Attributes:
        term: counts the lives of coordinators on this store from 1, and never falls.
        history: names the store that the term counts in.
        nodes: what it holds of nodes.
        secret: drawn for this life; agents prove to each other by it whom they serve.
        unix_ns: the wall clock at this moment, 0 if not known.
    """

    jobs: tuple[JobRecord, ...]
    term: int = 1
    history: str = ""
    nodes: NodesRecord = NodesRecord()
    secret: bytes = field(default=b"", repr=False, compare=False)
    unix_ns: int = field(default=0, compare=False)


@dataclass(frozen=True)
class AgentConnected:
    """An agent opened a stream and introduced itself."""

    session: SessionId
    hello: Hello


@dataclass(frozen=True)
class AgentDisconnected:
    """A stream ended, or keepalive gave it up."""

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
        submitter: by which token or certificate, "" if users are not told from each other.
        only_asks: whether it would be taken at this moment is all that is to be answered.
    """

    request_id: str
    spec: JobSpec
    submitter: str = ""
    only_asks: bool = False


@dataclass(frozen=True)
class StopRequested:
    """A user stops a job; answered by `Reply`. Stopping an ended job is refused by name.

    Attributes:
        now: where it stands. Otherwise what can be saved is saved first.
    """

    request_id: str
    job_id: JobId
    reason: str
    now: bool = False


@dataclass(frozen=True)
class CheckpointRequested:
    """A user wants a checkpoint of a job now; answered by `Reply`, before one is taken.

    Refused by name when none can be taken: the job has ended, does not train, or has no run
    directory. The answer's text is the number of the wish.
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
    """Events that have all come before the machine looked, oldest first.

    What follows from them is decided once: when ten thousand agents speak at the same moment, ten
    thousand looks at the same group would come to the same.
    """

    events: tuple[CoordinatorEvent, ...]


@dataclass(frozen=True)
class NodeCordonRequested:
    """An operator lets no new workers start on a node, or lets them again; answered by `Reply`.

    Attributes:
        cordoned: False takes a cordon back.
        reason: for people; of a cordon only.
    """

    request_id: str
    node_id: NodeId
    cordoned: bool
    reason: str


@dataclass(frozen=True)
class PauseRequested:
    """A user wants a job to give its workers back, and to go on later; answered by `Reply`."""

    request_id: str
    job_id: JobId


@dataclass(frozen=True)
class ResumeRequested:
    """A user wants a paused job to go on; answered by `Reply`."""

    request_id: str
    job_id: JobId


@dataclass(frozen=True)
class ScaleRequested:
    """A user sets other bounds for a job's group; answered by `Reply`.

    Attributes:
        min_workers, max_workers: 0 leaves that bound as it is.
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
    """Make these records durable (replacing those of the same job) before what follows."""

    records: tuple[JobRecord, ...]


@dataclass(frozen=True)
class PersistNodes:
    """Make this record durable (replacing the one before) before what follows."""

    record: NodesRecord


@dataclass(frozen=True)
class Forget:
    """Remove the records of these ended jobs; need not be durable before what follows."""

    job_ids: tuple[JobId, ...]


@dataclass(frozen=True)
class SendAgent:
    """Send over this session; if it is gone, the message is dropped."""

    session: SessionId
    message: CoordinatorMessage


@dataclass(frozen=True)
class CloseSession:
    """End the stream after what was sent before."""

    session: SessionId
    reason: str


@dataclass(frozen=True)
class Reply:
    """Answer to a request of a user.

    Attributes:
        error: "" for success, else one of "already_exists", "not_found", "invalid",
            "failed_precondition", "exhausted".
        text: for success the id of what was asked for, of a drain the nanoseconds that it has, else
            what to tell the user.
    """

    request_id: str
    error: str
    text: str


CoordinatorEffect = Persist | PersistNodes | Forget | SendAgent | CloseSession | Reply | Note

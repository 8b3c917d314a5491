"""Events and effects of the coordinator's state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import JobId, NodeId, SessionId
from elastic.core.messages import (
    AgentMessage,
    CoordinatorMessage,
    Hello,
)
from elastic.core.records import JobRecord, NodesRecord


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
    nodes: NodesRecord = field(default_factory=NodesRecord)
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

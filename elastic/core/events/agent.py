"""Events and effects of the agent's state machine."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.copy_messages import CopyOrder
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import (
    Entry,
    ExitCause,
    HeldCopy,
    JobId,
    NodeId,
    SessionId,
)
from elastic.core.messages import (
    AgentMessage,
    Assign,
    CoordinatorMessage,
    LinksTried,
    PipeToAgent,
    PipeToWorker,
    TryLinks,
)


@dataclass(frozen=True)
class Connected:
    """A stream to the coordinator is open; nothing has been sent yet."""

    session: SessionId


@dataclass(frozen=True)
class ConnectionLost:
    """The stream ended, or the attempt to open one failed.

    Attributes:
        jitter: 0.0 to 1.0, drawn by the driver, to spread the next attempts.
    """

    session: SessionId
    reason: str
    jitter: float


@dataclass(frozen=True)
class CoordinatorMessageReceived:
    """A message of the coordinator came."""

    session: SessionId
    message: CoordinatorMessage


@dataclass(frozen=True)
class ProcessStarted:
    """A requested process was started; it is not warm yet."""

    process_id: int
    pid: int


@dataclass(frozen=True)
class SpawnFailed:
    """The operating system refused to start the process."""

    process_id: int
    detail: str


@dataclass(frozen=True)
class ProcessMessageReceived:
    """A message came over a process's pipe."""

    process_id: int
    message: PipeToAgent


@dataclass(frozen=True)
class ProcessExited:
    """A process is gone; nothing more will come over its pipe."""

    process_id: int
    cause: ExitCause


@dataclass(frozen=True)
class ProcessStopped:
    """The kernel shows the process as stopped (True) or running again (False)."""

    process_id: int
    stopped: bool


@dataclass(frozen=True)
class DrainSignalled:
    """SIGTERM or a notice: this node must leave within `timeout_ns`; at once if it is 0."""

    reason: str
    timeout_ns: int


@dataclass(frozen=True)
class CopiesChanged:
    """The copies on this node changed; these are all of them."""

    copies: tuple[HeldCopy, ...]


@dataclass(frozen=True)
class PushFailed:
    """Snapshots of a job cannot be sent to this node; there is no automatic retry."""

    job_id: JobId
    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class LinksProbed:
    """A link probe ended: which other nodes this one reached."""

    answer: LinksTried


@dataclass(frozen=True)
class HealthChanged:
    """The faults of this node changed; `problems` are all of them."""

    problems: tuple[str, ...]


AgentEvent = (
    Connected
    | ConnectionLost
    | CoordinatorMessageReceived
    | ProcessStarted
    | SpawnFailed
    | ProcessMessageReceived
    | ProcessExited
    | ProcessStopped
    | DrainSignalled
    | CopiesChanged
    | PushFailed
    | LinksProbed
    | HealthChanged
    | Tick
)


@dataclass(frozen=True)
class Connect:
    """Open a stream to the coordinator under this session id (the machine numbers them)."""

    session: SessionId


@dataclass(frozen=True)
class Disconnect:
    """Drop the stream; no `ConnectionLost` is awaited for it."""

    session: SessionId


@dataclass(frozen=True)
class SendCoordinator:
    """Send over the session; if it is gone, the message is dropped."""

    session: SessionId
    message: AgentMessage


ANY_JOB = JobId("")


@dataclass(frozen=True)
class Spawn:
    """Start a spare process under this number (numbers are never reused)."""

    process_id: int
    job_id: JobId = ANY_JOB
    entry: Entry | None = None


@dataclass(frozen=True)
class SendProcess:
    """Send over the process's pipe; if it is gone, the message is dropped."""

    process_id: int
    message: PipeToWorker


@dataclass(frozen=True)
class OpenLog:
    """From here on the process's output belongs to this worker; comes before its `Assign`."""

    process_id: int
    assign: Assign


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to the process and all its descendants."""

    process_id: int
    reason: str


@dataclass(frozen=True)
class ShowStacks:
    """Make the process write the stacks of all its threads to its output (by a signal)."""

    process_id: int


@dataclass(frozen=True)
class HandleCopy:
    """Carry out the coordinator's order about copies.

    Answered by `CopiesChanged` whenever the held copies change, and by `PushFailed`. An agent that
    dies before has lost its copies, and reports that by its next Hello.
    """

    order: CopyOrder


@dataclass(frozen=True)
class ProbeLinks:
    """Try to connect to these nodes; answered by `LinksProbed`."""

    order: TryLinks


@dataclass(frozen=True)
class ExitAgent:
    """End the agent process; every process it started is gone or is killed now.

    Attributes:
        code: 0 done, 75 drained, 69 the coordinator refused for good.
    """

    code: int
    reason: str


AgentEffect = (
    Connect
    | Disconnect
    | SendCoordinator
    | Spawn
    | SendProcess
    | OpenLog
    | Kill
    | ShowStacks
    | HandleCopy
    | ProbeLinks
    | ExitAgent
    | Note
)

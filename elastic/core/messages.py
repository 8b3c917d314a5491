"""Messages between agents, the coordinator and workers; `wire.codec` maps each to proto.

Rule: messages state the current facts or requests, so that receiving one twice, or a later one
without an earlier one, does no harm. After a broken connection one `Hello` restores the whole
state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.copy_messages import CopiesHeld, CopyFailed, DropCopy, KeepCopy, Replicate
from elastic.core.facts import (
    NO_GENERATION,
    Assignment,
    CheckpointStatus,
    CollectiveCount,
    Generation,
    HeldCopy,
    JobId,
    LeavingNode,
    Node,
    NodeId,
    RefusalCode,
    ReportKind,
    WorkerId,
    WorkerReport,
)
from elastic.core.telemetry import Goodput, Telemetry

PROTOCOL = "1.0"
"""Version that both sides of every connection must have; any other is refused."""


@dataclass(frozen=True)
class Report:
    """One call of `train.report` by one worker.

    Attributes:
        kind: its kind; (generation, kind, index) identifies a report of a worker.
        index: counts this worker's reports of the script in this generation from 0; see `kind`.
        rank: the worker's rank when it reported.
        metrics: JSON object.
        checkpoint: path of a complete, uploaded checkpoint directory, "" for none.
        status: of that checkpoint. After a validation, the checkpoint was reported before; this
            report has the outcome, with all metrics.
        request: number of the newest checkpoint request that preceded it, 0 for none.
    """

    worker_id: WorkerId
    job_id: JobId
    generation: Generation
    index: int
    rank: int
    metrics: str
    checkpoint: str = ""
    status: CheckpointStatus = CheckpointStatus.COMMITTED
    request: int = 0
    kind: ReportKind = ReportKind.SCRIPT


def is_metrics(report: Report) -> bool:
    """Return whether this is the script's own report from rank 0, the metrics of the run."""
    return report.rank == 0 and report.kind is ReportKind.SCRIPT


# ---------------------------------------------------------------- agent -> coordinator


@dataclass(frozen=True)
class Hello:
    """The first message of every connection: the node and all that runs on it.

    Attributes:
        workers: every worker of this agent without a `ForgetWorker`.
        draining: the node is about to leave (SIGTERM, a notice).
        drain_reason: why, when draining.
        drain_timeout_ns: time left for it.
        reports_due: number of unacknowledged reports that follow after `Welcome`.
        copies: copies that this node holds.
        copies_at: "host:port" where its agent receives and serves copies, "" for none.
        problems: faults of the node, a phrase for each; see `NodeHealth`.
    """

    node: Node
    workers: tuple[WorkerReport, ...] = ()
    draining: bool = False
    drain_reason: str = ""
    drain_timeout_ns: int = 0
    reports_due: int = 0
    copies: tuple[HeldCopy, ...] = ()
    copies_at: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerUpdate:
    """A worker changed; `report` is its complete new state."""

    report: WorkerReport


@dataclass(frozen=True)
class Reported:
    """A worker's report; the agent keeps and resends it until `ReportAck` comes."""

    report: Report


@dataclass(frozen=True)
class DrainNotice:
    """This node is about to leave: its workers should leave at a step boundary."""

    reason: str
    timeout_ns: int


@dataclass(frozen=True)
class NodeHealth:
    """All faults of this node now; it gets no new workers while there is one.

    Attributes:
        problems: a phrase for each, such as "the disk of /tmp is full"; empty if healthy.
    """

    problems: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """Telemetry, sent after the first step of a generation, and then about once a second.

    Attributes:
        steps: optimizer steps (loader iterations) that this worker did in this generation.
        first_step_unix_ns: wall clock at the end of the first one.
        spent: its time in train functions by category, since its process became this worker. The
            numbers never decrease, so the next message makes up for a lost one.
        telemetry: of its newest steps.
    """

    worker_id: WorkerId
    generation: Generation
    steps: int
    first_step_unix_ns: int = 0
    spent: Goodput = field(default_factory=Goodput)
    telemetry: Telemetry = field(default_factory=Telemetry)


@dataclass(frozen=True)
class Pulse:
    """The main thread of a worker stopped making progress, or resumed; a healthy run sends none.

    Durations count back from the time of sending. It is repeated while it holds, so that a stale
    one expires soon.

    Attributes:
        waiting_ns: how long it has waited for its peers, 0 if it does not.
        still_ns: how long it has made no progress without waiting, 0 if it moves or waits.
        epoch, step: its position, for people.
        begun: collectives begun in groups within its group; empty if unknown.
        longest_ns: the longest pause in this process after which it moved on.
        has_stepped: a step was committed in this process.
        working_ns: how long it has worked since it last waited, 0 if that is not long.
        work: its current work, for people; "" if it does not work for long.
    """

    worker_id: WorkerId
    generation: Generation
    waiting_ns: int
    still_ns: int
    epoch: int = 0
    step: int = 0
    begun: tuple[CollectiveCount, ...] = ()
    longest_ns: int = 0
    has_stepped: bool = True
    working_ns: int = 0
    work: str = ""


@dataclass(frozen=True)
class ProbeAck:
    """Reply to `Probe`, with the same number."""

    number: int


@dataclass(frozen=True)
class LogLines:
    """Output of a worker, for a reader that follows it. Bypasses the state machines.

    Attributes:
        unix_ns: the agent's wall clock when these lines were printed, 0 if unknown.
        generation, rank: of the worker at that time; 0 and -1 before its first group.
    """

    follow_id: str
    worker_id: WorkerId
    text: str
    end: bool = False
    unix_ns: int = 0
    generation: Generation = NO_GENERATION
    rank: int = -1


@dataclass(frozen=True)
class LinksTried:
    """Reply to `TryLinks`; a node that refuses the connection counts as reached."""

    job_id: JobId
    reached: tuple[NodeId, ...] = ()
    unreachable: tuple[NodeId, ...] = ()


AgentMessage = (
    Hello
    | WorkerUpdate
    | Reported
    | DrainNotice
    | NodeHealth
    | Progress
    | LogLines
    | Pulse
    | ProbeAck
    | LinksTried
    | CopiesHeld
    | CopyFailed
)


# ---------------------------------------------------------------- coordinator -> agent


@dataclass(frozen=True)
class Welcome:
    """The node is registered.

    Attributes:
        coordinator: its name, for people.
        term: number of its term on its store, from 1; 0 if not given. An agent that has seen a
            later one refuses it.
        history: id of the store in which `term` counts; a new or restored store has another.
    """

    coordinator: str
    term: int = 0
    history: str = ""


@dataclass(frozen=True)
class Refusal:
    """The node is not registered; `final` means that a retry is of no use."""

    reason: str
    final: bool


@dataclass(frozen=True)
class StartWorker:
    """Run a worker of this job under this id; idempotent for the same id.

    Attributes:
        ahead: it calls its train function before it has a group, up to where it needs one. The
            group trains meanwhile, in a loop that new members can enter.
    """

    worker_id: WorkerId
    spec: JobSpec
    ahead: bool = False


@dataclass(frozen=True)
class StopWorker:
    """End this worker: ask it, and kill it after the grace period. Unknown ids are no error.

    Attributes:
        asks: a script with its own SIGTERM handler gets that signal and the whole grace period.
    """

    worker_id: WorkerId
    grace_ns: int
    reason: str
    asks: bool = False


@dataclass(frozen=True)
class ForgetWorker:
    """The coordinator knows that this worker is gone: stop reporting it."""

    worker_id: WorkerId


@dataclass(frozen=True)
class Announce:
    """Leave its group, if any, at once, and join this one."""

    assignment: Assignment


@dataclass(frozen=True)
class LeaveGroup:
    """Leave the group of this generation and wait for the next.

    Attributes:
        at_boundary: True: at the next boundary that all members agree on (nothing is lost);
            False: at once, because the group cannot continue.
        saves: at that boundary the state is saved first, because no member returns soon. A later
            order without it cancels that: a member that waits for storage leaves at once.
        follows: the next group is being computed: the worker's report that it has left may wait
            for its turn (`policy.pacing`).
    """

    worker_id: WorkerId
    generation: Generation
    at_boundary: bool
    reason: str
    saves: bool = False
    follows: bool = False


@dataclass(frozen=True)
class SaveState:
    """A user requests a checkpoint now: take one at the end of this step, and continue.

    Attributes:
        generation: of the group that should take it; the next group gets its own message.
        request: number of the request; a greater one is newer, one already served is ignored.
    """

    worker_id: WorkerId
    generation: Generation
    request: int


@dataclass(frozen=True)
class Preemption:
    """Nodes of the group are about to leave; sent to every member, and again when it changes.

    Attributes:
        generation: of the group; the next one gets its own message, if it has leaving nodes.
        timeout_ns: time until the first of them is gone, from the time of sending.
        reason: of the first one.
        nodes: the leaving nodes, by id.
    """

    worker_id: WorkerId
    generation: Generation
    timeout_ns: int
    reason: str
    nodes: tuple[LeavingNode, ...]


@dataclass(frozen=True)
class ReportAck:
    """The report was accepted (its checkpoint is durable), or refused for the given reason."""

    worker_id: WorkerId
    generation: Generation
    index: int
    accepted: bool
    reason: str = ""
    code: RefusalCode = RefusalCode.NONE
    kind: ReportKind = ReportKind.SCRIPT


@dataclass(frozen=True)
class Release:
    """The drained node is not needed any more: its agent may end."""

    reason: str


@dataclass(frozen=True)
class FollowLogs:
    """Send the output of this worker as `LogLines`. Bypasses the state machines.

    Attributes:
        tail_lines: how many lines of existing output, -1 for all.
        follow: continue until the worker ends or `stop` comes.
        room: credit in characters, 0 for no limit. A message with the same id adds credit.
    """

    follow_id: str
    worker_id: WorkerId
    tail_lines: int = -1
    follow: bool = False
    stop: bool = False
    room: int = 0


@dataclass(frozen=True)
class Probe:
    """A liveness check. The agent replies at once; any other message from it counts as well."""

    number: int


@dataclass(frozen=True)
class DumpStacks:
    """Make this worker write all its stacks to its output. Unknown ids are no error."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True)
class RunEvents:
    """Events of a job for its run directory; rank 0 writes them there.

    Attributes:
        lines: JSON objects, oldest first, in the schema of the event log. A new rank 0 receives
            those again that the file has already. No two have the same `time_unix_ns`.
    """

    worker_id: WorkerId
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """A user requests a profile of a worker: sample its stacks.

    Attributes:
        seconds: for how long.
        name: of the file, in the run's directory.
    """

    worker_id: WorkerId
    seconds: float
    name: str


@dataclass(frozen=True)
class Coordinators:
    """The addresses of all coordinators, including the leader. Bypasses the state machines.

    Attributes:
        addresses: "host:port" each; kept in addition to those that the agent was started with.
    """

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """An operator drains this node; the agent remembers that across coordinators.

    Attributes:
        timeout_ns: time until it must be gone, from the time of sending; the earliest end counts.
    """

    reason: str
    timeout_ns: int


@dataclass(frozen=True)
class Link:
    """The link to another node.

    Attributes:
        address: "host:port" where a worker of the job listens on it.
    """

    node_id: NodeId
    address: str


@dataclass(frozen=True)
class TryLinks:
    """Probe links: connect without sending anything, and report which nodes were reached.

    Attributes:
        job_id: of the group that makes no progress.
    """

    job_id: JobId
    links: tuple[Link, ...]


CoordinatorMessage = (
    Welcome
    | Coordinators
    | Refusal
    | StartWorker
    | StopWorker
    | ForgetWorker
    | Announce
    | LeaveGroup
    | ReportAck
    | Release
    | Drain
    | FollowLogs
    | Probe
    | TryLinks
    | DumpStacks
    | SaveState
    | Preemption
    | KeepCopy
    | DropCopy
    | Replicate
    | RunEvents
    | Profile
)


# ---------------------------------------------------------------- agent <-> worker (the pipe)


@dataclass(frozen=True)
class Assign:
    """A spare process becomes a worker.

    Attributes:
        host: address that this worker's store and gloo bind to and announce.
        devices: its own accelerators, as CUDA_VISIBLE_DEVICES entries; empty on CPU.
        node_devices: those of all the job's workers on this node, in the order of the workers.
        log_dir: directory of its output files, for people.
        ahead: call the train function before there is a group, up to where it needs one.
        snapshots: paths of the agent's shared memory for this job, one for each slot; empty: the
            worker allocates its own memory.
    """

    worker_id: WorkerId
    spec: JobSpec
    host: str
    devices: tuple[str, ...] = ()
    log_dir: str = ""
    ahead: bool = False
    snapshots: tuple[str, ...] = ()
    node_devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """End; the agent kills after `grace_ns`.

    Attributes:
        asks: as in `StopWorker`; a later order without it ends the script at once.
    """

    reason: str
    grace_ns: int
    asks: bool = False


@dataclass(frozen=True)
class Ping:
    """A liveness check of the control thread; answered by `Pong` with the same number."""

    number: int


PipeToWorker = (
    Assign
    | Announce
    | LeaveGroup
    | ReportAck
    | Stop
    | Ping
    | SaveState
    | Preemption
    | RunEvents
    | Profile
)


@dataclass(frozen=True)
class Warm:
    """The spare has finished its imports and waits for a job."""

    pid: int


@dataclass(frozen=True)
class Pong:
    """Reply to `Ping`; also sent without one when `times` changes.

    Attributes:
        number: of the ping, 0 for none.
        times: factor on the time that it may be silent, 0 for no limit. Native code may block its
            control thread without a hang: before the first step of a process, and in work that
            the script has declared.
    """

    number: int
    times: int = 1


PipeToAgent = Warm | WorkerUpdate | Reported | Progress | Pong | Pulse

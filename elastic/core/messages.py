"""What agents, the coordinator and workers tell each other; `wire.codec` maps each to proto.

Rule: messages state facts or wishes as they are now, so that receiving one twice, or a later
one without an earlier one, does no harm. A broken connection is healed by one `Hello` that
says all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.cluster_messages import Coordinators, Drain
from elastic.core.config import JobSpec
from elastic.core.copy_messages import (
    CopiesHeld,
    CopyEndpoint,
    CopyFailed,
    DropCopy,
    KeepCopy,
    Replicate,
)
from elastic.core.link_messages import LinksTried, TryLinks
from elastic.core.telemetry import Goodput, Telemetry
from elastic.core.world import (
    NO_GENERATION,
    Assignment,
    CheckpointStatus,
    CollectiveCount,
    Generation,
    HeldCopy,
    JobId,
    LeavingNode,
    Node,
    RefusalCode,
    ReportKind,
    WorkerId,
    WorkerReport,
)

PROTOCOL = "1.0"
"""What both sides of every connection must speak; another one is refused."""


@dataclass(frozen=True)
class Report:
    """One call of `train.report` by one worker.

    Attributes:
        kind: what it is; (generation, kind, index) names one of a worker's reports.
        index: counts this worker's reports of the script in this generation from 0; see `kind`.
        rank: the worker's rank when it reported.
        metrics: JSON object.
        checkpoint: path of a complete, uploaded checkpoint directory, "" for none.
        status: of that checkpoint. One whose validation is over was reported before; this then
            says what came of it, with all its metrics.
        request: number of the newest wish for a checkpoint that it was taken after, 0 for none.
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
    """Return whether this is how far a run is, as its script sees it."""
    return report.rank == 0 and report.kind is ReportKind.SCRIPT


# ---------------------------------------------------------------- agent -> coordinator


@dataclass(frozen=True)
class Hello:
    """The first message of every connection: who I am and all that runs here.

    Attributes:
        workers: every worker of this agent that the coordinator has not told it to forget.
        draining: the node has been told to leave (SIGTERM, a notice).
        drain_reason: why, when draining.
        drain_timeout_ns: how much time is left for it.
        reports_due: how many reports follow as soon as the agent is welcome, because they have
            not been acknowledged yet.
        copies: what this node holds for others.
        copies_at, copies_fingerprint: where it takes and gives them; see `CopyEndpoint`.
        problems: what is wrong with the node, a phrase for each; see `NodeHealth`.
    """

    node: Node
    workers: tuple[WorkerReport, ...] = ()
    draining: bool = False
    drain_reason: str = ""
    drain_timeout_ns: int = 0
    reports_due: int = 0
    copies: tuple[HeldCopy, ...] = ()
    copies_at: str = ""
    copies_fingerprint: str = ""
    problems: tuple[str, ...] = ()

    @property
    def copy_endpoint(self) -> CopyEndpoint:
        """Return where it takes and gives copies."""
        return CopyEndpoint(self.copies_at, self.copies_fingerprint)


@dataclass(frozen=True)
class WorkerUpdate:
    """A worker changed; `report` says all about it."""

    report: WorkerReport


@dataclass(frozen=True)
class Reported:
    """A worker reported; kept by the agent and sent again until `ReportAck` comes."""

    report: Report


@dataclass(frozen=True)
class DrainNotice:
    """This node is about to leave: let its workers go at a step boundary."""

    reason: str
    timeout_ns: int


@dataclass(frozen=True)
class NodeHealth:
    """All that is wrong with this node now; it takes no new workers until nothing is.

    Attributes:
        problems: a phrase for each, such as "the disk of /tmp is full"; empty when all is well.
    """

    problems: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """Telemetry: the first step of a generation is over, and then about one a second.

    Attributes:
        steps: optimizer steps (loader iterations) that this worker did in this generation.
        first_step_unix_ns: wall clock at the end of the first one.
        spent: where its time in train functions went, since its process became this worker; the
            numbers never fall, so that one which is lost is made good by the next.
        telemetry: how its newest steps went.
    """

    worker_id: WorkerId
    generation: Generation
    steps: int
    first_step_unix_ns: int = 0
    spent: Goodput = field(default_factory=Goodput)
    telemetry: Telemetry = field(default_factory=Telemetry)


@dataclass(frozen=True)
class Pulse:
    """The main thread of a worker stands, or moves again; a healthy run sends none.

    Durations count back from the moment of sending. It is said again as long as it holds, so that
    one that is not said any more is not believed for long.

    Attributes:
        waiting_ns: how long it has waited for its peers, 0 if it does not.
        still_ns: how long it has not moved and not waited either, 0 if it moves or waits.
        epoch, step: where it is, for people.
        begun: what was begun in groups within its group; empty if that cannot be told.
        longest_ns: the longest time that it stood still in this process and then moved on.
        has_stepped: a step was committed in this process.
        working_ns: how long it has worked since it last waited, 0 if that is not long.
        work: what it does, for people; "" if it does not work for long.
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
    """Answer to `Probe`, with the same number."""

    number: int


@dataclass(frozen=True)
class LogLines:
    """Output of a worker, for whoever follows. Never passes through a machine.

    Attributes:
        unix_ns: the agent's wall clock when these lines were printed, 0 if not known.
        generation, rank: that the worker had then; 0 and -1 before its first group.
    """

    follow_id: str
    worker_id: WorkerId
    text: str
    end: bool = False
    unix_ns: int = 0
    generation: Generation = NO_GENERATION
    rank: int = -1


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
        term: which leadership of its store this is, from 1; 0 from a coordinator that does not
            say. An agent that has seen a later one refuses it.
        history: names the store that `term` counts in; a new or restored store has another.
    """

    coordinator: str
    term: int = 0
    history: str = ""


@dataclass(frozen=True)
class Refusal:
    """The node is not registered; `final` means that trying again is of no use."""

    reason: str
    final: bool


@dataclass(frozen=True)
class StartWorker:
    """Run a worker of this job under this id; a second one for the same id changes nothing.

    Attributes:
        ahead: it calls its train function before it has a group, up to where it needs one: the
            group trains meanwhile, in a loop that a newcomer can enter.
    """

    worker_id: WorkerId
    spec: JobSpec
    ahead: bool = False


@dataclass(frozen=True)
class StopWorker:
    """End this worker: ask, and kill after the grace period. Unknown ids are no error.

    Attributes:
        asks: a script that has a handler of its own for SIGTERM gets it, and has all that time.
    """

    worker_id: WorkerId
    grace_ns: int
    reason: str
    asks: bool = False


@dataclass(frozen=True)
class ForgetWorker:
    """The coordinator knows that this worker is gone: stop mentioning it."""

    worker_id: WorkerId


@dataclass(frozen=True)
class Announce:
    """Leave whatever group you are in, at once, and join this one."""

    assignment: Assignment


@dataclass(frozen=True)
class LeaveGroup:
    """Leave the group of this generation and wait for the next.

    Attributes:
        at_boundary: True: at the next boundary that all members agree on (nothing is lost);
            False: at once, because the group cannot go on.
        saves: at that boundary the state is saved first, because no member comes back soon. A later
            order without it takes that back: who waits for storage leaves at once.
        follows: the next group is being worked out: that its worker is out need not be said before
            its turn (`policy.spreading`).
    """

    worker_id: WorkerId
    generation: Generation
    at_boundary: bool
    reason: str
    saves: bool = False
    follows: bool = False


@dataclass(frozen=True)
class SaveState:
    """A user wants a checkpoint now: take one at the end of this step, and go on.

    Attributes:
        generation: of the group that is to take it; another one is told anew.
        request: number of the wish; a greater one is newer, one that was served already is none.
    """

    worker_id: WorkerId
    generation: Generation
    request: int


@dataclass(frozen=True)
class Preemption:
    """Nodes of your group were told to leave; told to every member, and again when it changes.

    Attributes:
        generation: of the group; another one is told anew, if nodes of it are still to leave.
        timeout_ns: until the first of them is gone, from the moment of sending.
        reason: of that one.
        nodes: which they are, by id.
    """

    worker_id: WorkerId
    generation: Generation
    timeout_ns: int
    reason: str
    nodes: tuple[LeavingNode, ...]


@dataclass(frozen=True)
class ReportAck:
    """The report was taken (a checkpoint in it is durable), or refused for the reason given."""

    worker_id: WorkerId
    generation: Generation
    index: int
    accepted: bool
    reason: str = ""
    code: RefusalCode = RefusalCode.NONE
    kind: ReportKind = ReportKind.SCRIPT


@dataclass(frozen=True)
class Release:
    """The drained node has no workers left that matter: the agent may end."""

    reason: str


@dataclass(frozen=True)
class FollowLogs:
    """Send the output of this worker as `LogLines`. Never passes through a machine.

    Attributes:
        tail_lines: how many lines of what there is already, -1 for all.
        follow: go on until the worker ends or `stop` comes.
        room: for how many characters the reader has room, 0 for all that come. Said again with
            the same id: for so many more.
    """

    follow_id: str
    worker_id: WorkerId
    tail_lines: int = -1
    follow: bool = False
    stop: bool = False
    room: int = 0


@dataclass(frozen=True)
class Probe:
    """Are you there? An agent answers at once; any other word of it is as good an answer."""

    number: int


@dataclass(frozen=True)
class DumpStacks:
    """Have this worker write all its stacks to its output. Unknown ids are no error."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True)
class RunEvents:
    """What happened to a job, for the run's directory; its first rank writes it there.

    Attributes:
        lines: JSON objects, oldest first, in the schema of the event log; those that the file has
            already are told again to another worker. No two have the same `time_unix_ns`.
    """

    worker_id: WorkerId
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """A user wants to know where a worker spends its time: sample its stacks for so long.

    Attributes:
        seconds: for how long.
        name: of the file, in the run's directory.
    """

    worker_id: WorkerId
    seconds: float
    name: str


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
    """A spare becomes a worker.

    Attributes:
        host: address that this worker's store and gloo bind to and announce.
        devices: accelerators that are its own, as CUDA_VISIBLE_DEVICES entries; empty on CPU.
        node_devices: those that the job's workers of this node have, in the order of the workers.
        log_dir: directory of its output files, for people.
        ahead: call the train function before there is a group, up to where it needs one.
        snapshots: paths of the agent's memory for this job, one for each slot; empty: the worker
            takes memory of its own.
        tls: paths of this node's certificate, its key, and the authority, with which copies are
            fetched from other nodes; empty: as the announcement says.
    """

    worker_id: WorkerId
    spec: JobSpec
    host: str
    devices: tuple[str, ...] = ()
    log_dir: str = ""
    ahead: bool = False
    snapshots: tuple[str, ...] = ()
    tls: tuple[str, ...] = ()
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
    """Is your control thread alive? Answered with the same number."""

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
    """The spare has imported what a worker needs and waits for a job."""

    pid: int


@dataclass(frozen=True)
class Pong:
    """Answer to `Ping`; or said unasked, when `times` changes.

    Attributes:
        number: of the ping, 0 for none.
        times: it may be silent for so many times as long as others, 0 for as long as it likes.
            Native code may keep its control thread from answering, and be no hang: before the
            first step of a process, and in what a script says that it works at.
    """

    number: int
    times: int = 1


PipeToAgent = Warm | WorkerUpdate | Reported | Progress | Pong | Pulse

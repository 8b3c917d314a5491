"""Events and effects of the worker's state machine."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.events.shared import Note, Tick
from elastic.core.facts import (
    Assignment,
    CheckpointStatus,
    CollectiveCount,
    Failure,
    Generation,
    LeavingNode,
    RefusalCode,
    ReportKind,
)
from elastic.core.messages import (
    Assign,
    PipeToAgent,
    PipeToWorker,
)


@dataclass(frozen=True)
class Started:
    """First event: the process runs, torch is imported."""

    pid: int


@dataclass(frozen=True)
class OrderReceived:
    """A message came over the pipe.

    Attributes:
        is_handled: the script has its own handler of SIGTERM.
        silent_times: how long native code may block the main thread, as in `Pong.times`.
    """

    message: PipeToWorker
    is_handled: bool = False
    silent_times: int = 1


@dataclass(frozen=True)
class PipeClosed:
    """The agent is gone."""


@dataclass(frozen=True)
class StoreOpened:
    """This worker's rendezvous store listens."""

    address: str


@dataclass(frozen=True)
class SetupFailed:
    """The entry point could not be loaded (a missing script, an import error)."""

    failure: Failure


@dataclass(frozen=True)
class GroupFormed:
    """The group of this generation was formed; main thread."""

    generation: Generation


@dataclass(frozen=True)
class GroupFailed:
    """Forming failed or was aborted; main thread."""

    generation: Generation
    detail: str


@dataclass(frozen=True)
class LoopStateChanged:
    """The train function entered or left a loop that continues when the group changes."""

    inside: bool


@dataclass(frozen=True)
class CopiesRequested:
    """The user requests a copy of the state on another node every n steps; 0 for none.

    Attributes:
        is_sharded: each node has only its own rows of the state, so each needs a copy.
    """

    every_n_steps: int
    is_sharded: bool = False


@dataclass(frozen=True)
class MicroBatchesDeclared:
    """A step of the loop is split into so many micro-batches, the maximum number of workers."""

    num_micro_batches: int


@dataclass(frozen=True)
class TrainReturned:
    """The train function returned.

    Attributes:
        result: JSON.
        left: how and where it returned, for people: "left in epoch 0, step 5 (exit 0)".
    """

    generation: Generation
    result: str
    left: str = ""


@dataclass(frozen=True)
class TrainRaised:
    """User code raised.

    Attributes:
        group_broken: a broken collective caused the error, not user code.
        exit_code: set when user code ended the process (sys.exit(3)).
    """

    generation: Generation
    failure: Failure
    group_broken: bool
    exit_code: int | None = None


@dataclass(frozen=True)
class TrainLeft:
    """The train function was left by order (interrupt, or at a boundary)."""

    generation: Generation
    at_boundary: bool


NEXT_INDEX = -1


@dataclass(frozen=True)
class UserReported:
    """`train.report` was called on the main thread; the checkpoint, if any, is uploaded.

    Attributes:
        index: of the report in its generation, from 0; `NEXT_INDEX` for the one after the last
            that was counted. One with a slow upload may come after later ones.
    """

    generation: Generation
    rank: int
    metrics: str
    checkpoint: str
    index: int = NEXT_INDEX
    status: CheckpointStatus = CheckpointStatus.COMMITTED


@dataclass(frozen=True)
class CheckpointWritten:
    """An automatic checkpoint is in storage, except for its marker; the writer's thread.

    Attributes:
        generation: of this worker now.
        index: number of the snapshot in the run.
        metrics: JSON object: its position in the run.
        request: number of the newest checkpoint request that preceded it, 0 for none.
    """

    generation: Generation
    index: int
    metrics: str
    checkpoint: str
    request: int = 0


@dataclass(frozen=True)
class Validated:
    """The validation of a reported checkpoint ended, and its result is in storage.

    Attributes:
        generation: of this worker now.
        index: of this event, from 0 in each process.
        metrics: JSON object: all of the checkpoint's.
    """

    generation: Generation
    index: int
    metrics: str
    checkpoint: str
    status: CheckpointStatus


@dataclass(frozen=True)
class ActivitySampled:
    """The control thread's sample of the main thread, at the time set by the machine.

    Attributes:
        beats: increases with the main thread's progress; 0 until its training loop is first seen.
        waiting_ns: how long it has waited for its peers, 0 if it does not.
        epoch, step: its position, for people.
        begun: collectives begun in groups within its group, if known.
        has_stepped: a step was committed in this process.
        work: its current work, for people; "" if not sampled, as there is no long wait.
    """

    beats: int
    waiting_ns: int = 0
    epoch: int = 0
    step: int = 0
    begun: tuple[CollectiveCount, ...] = ()
    has_stepped: bool = True
    work: str = ""


WorkerEvent = (
    Started
    | OrderReceived
    | PipeClosed
    | StoreOpened
    | SetupFailed
    | GroupFormed
    | GroupFailed
    | LoopStateChanged
    | CopiesRequested
    | MicroBatchesDeclared
    | TrainReturned
    | TrainRaised
    | TrainLeft
    | UserReported
    | CheckpointWritten
    | Validated
    | ActivitySampled
    | Tick
)


@dataclass(frozen=True)
class SendPipe:
    """Send to the agent over the pipe."""

    message: PipeToAgent


@dataclass(frozen=True)
class Setup:
    """Open the store, set the environment, load the entry point; main thread.

    Answered by `StoreOpened` or `SetupFailed`.
    """

    assign: Assign


@dataclass(frozen=True)
class FormGroup:
    """Form this group; main thread. Answered by `GroupFormed` or `GroupFailed`."""

    assignment: Assignment


@dataclass(frozen=True)
class EnterTrain:
    """Call the train function; main thread. Answered by one of the Train events."""

    assignment: Assignment


@dataclass(frozen=True)
class AbortGroup:
    """Abort this generation's group, or its forming, so that no thread stays blocked in it."""

    generation: Generation


@dataclass(frozen=True)
class CloseGroup:
    """Close the connections to a group in which this worker has finished; main thread.

    Peers that still wait for it in that group then get an error, as if its process had ended.
    """

    generation: Generation


@dataclass(frozen=True)
class SignalScript:
    """Send the main thread SIGTERM, which the script's own handler receives."""

    reason: str


@dataclass(frozen=True)
class InterruptTrain:
    """Make the main thread leave the group that it trains in.

    Attributes:
        final: the process must end: the train function is left at once. Otherwise a loop that
            can continue in the next group leaves by itself, at its next micro-batch.
    """

    generation: Generation
    reason: str
    final: bool = False


@dataclass(frozen=True)
class RequestLeave:
    """Make the next boundary of this generation the last: all members leave there together.

    Attributes:
        saves: the state is saved there, because the job pauses.
    """

    generation: Generation
    reason: str
    saves: bool = False


@dataclass(frozen=True)
class RequestCheckpoint:
    """Make the group of this generation take a checkpoint soon, unless it has for this request.

    There is no reply: the checkpoint is reported like any other.
    """

    generation: Generation
    request: int


@dataclass(frozen=True)
class NotifyPreemption:
    """Notify user code that nodes of this generation's group are about to leave; no reply.

    Attributes:
        deadline_ns: when the first of them is gone, on this machine's monotonic clock.
        reason: of the first one.
        nodes: the leaving nodes with their ranks.
    """

    generation: Generation
    deadline_ns: int
    reason: str
    nodes: tuple[LeavingNode, ...]


@dataclass(frozen=True)
class ResolveReport:
    """Notify the waiting thread whether its checkpoint or report was recorded."""

    generation: Generation
    index: int
    accepted: bool
    reason: str
    code: RefusalCode = RefusalCode.NONE
    kind: ReportKind = ReportKind.SCRIPT


@dataclass(frozen=True)
class ExitWorker:
    """Exit at once with this code, after flushing the output."""

    code: int
    reason: str


WorkerEffect = (
    SendPipe
    | Setup
    | FormGroup
    | EnterTrain
    | AbortGroup
    | CloseGroup
    | SignalScript
    | InterruptTrain
    | RequestLeave
    | RequestCheckpoint
    | NotifyPreemption
    | ResolveReport
    | ExitWorker
    | Note
)

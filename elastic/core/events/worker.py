"""What can happen to a worker's machine, and what it may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.events.shared import Note, Tick
from elastic.core.messages import (
    Assign,
    PipeToAgent,
    PipeToWorker,
)
from elastic.core.world import (
    Assignment,
    CheckpointStatus,
    CollectiveCount,
    Failure,
    Generation,
    LeavingNode,
    RefusalCode,
    ReportKind,
)


@dataclass(frozen=True)
class Started:
    """First event: the process runs, torch is imported."""

    pid: int


@dataclass(frozen=True)
class OrderReceived:
    """A message came over the pipe.

    Attributes:
        is_handled: the script has a handler of its own for SIGTERM.
        silent_times: for how long native code may run in the main thread, as in `Pong.times`.
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
    """The entry point could not be loaded (a script that is not there, an import error)."""

    failure: Failure


@dataclass(frozen=True)
class GroupFormed:
    """The group of this generation stands; main thread."""

    generation: Generation


@dataclass(frozen=True)
class GroupFailed:
    """Forming failed or was aborted; main thread."""

    generation: Generation
    detail: str


@dataclass(frozen=True)
class LoopStateChanged:
    """The train function has entered or left a loop that goes on when the group changes."""

    inside: bool


@dataclass(frozen=True)
class CopiesRequested:
    """The user wants a copy of the state on another node after each so many steps; 0 for none.

    Attributes:
        is_sharded: each node has rows of the state alone, so that a copy of each is wanted.
    """

    every_n_steps: int
    is_sharded: bool = False


@dataclass(frozen=True)
class MicroBatchesDeclared:
    """A step of the loop is shared out in so many micro-batches: no more workers can take part."""

    num_micro_batches: int


@dataclass(frozen=True)
class TrainReturned:
    """The train function returned.

    Attributes:
        result: JSON.
        left: how and where, for people: "left in epoch 0, step 5 (exit 0)".
    """

    generation: Generation
    result: str
    left: str = ""


@dataclass(frozen=True)
class TrainRaised:
    """User code raised.

    Attributes:
        group_broken: the error came out of a broken collective, it is no fault of user code.
        exit_code: set when user code asked the process to end (sys.exit(3)).
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
        index: which report of its generation it is, from 0; `NEXT_INDEX` for the one after the
            last that was counted. One whose upload took longer is told after later ones.
        status: of the checkpoint.
    """

    generation: Generation
    rank: int
    metrics: str
    checkpoint: str
    index: int = NEXT_INDEX
    status: CheckpointStatus = CheckpointStatus.COMMITTED


@dataclass(frozen=True)
class CheckpointWritten:
    """An automatic checkpoint lies in storage, all but its marker; the writer's thread.

    Attributes:
        generation: that this worker is in now.
        index: which snapshot of the run it is.
        metrics: JSON object: where in the run it was taken.
        checkpoint: its path.
        request: number of the newest wish that it was taken after, 0 for none.
    """

    generation: Generation
    index: int
    metrics: str
    checkpoint: str
    request: int = 0


@dataclass(frozen=True)
class Validated:
    """The validation of a reported checkpoint is over, and what came of it is in storage.

    Attributes:
        generation: that this worker is in now.
        index: of this word, from 0 in each process.
        metrics: JSON object: all of the checkpoint's.
        checkpoint: its path.
        status: how it went.
    """

    generation: Generation
    index: int
    metrics: str
    checkpoint: str
    status: CheckpointStatus


@dataclass(frozen=True)
class ActivitySampled:
    """What the control thread saw of the main thread, at the moment that the machine asked for.

    Attributes:
        beats: grows whenever the main thread moves; 0 until the training loop is first seen.
        waiting_ns: how long it has waited for its peers, 0 if it does not.
        epoch, step: where it is, for people.
        begun: what was begun in groups within its group, if it can be told.
        has_stepped: a step was committed in this process.
        work: what it does, for people; "" if it was not asked, as nobody waits for long.
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
    """Write to the agent."""

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
    """Free everyone who is blocked in this generation's group, or in forming it; any thread."""

    generation: Generation


@dataclass(frozen=True)
class CloseGroup:
    """Close the connections to a group that this worker has finished in; the main thread.

    Who waits for it in that group can then never be helped, and finds out: as if it had ended its
    process.
    """

    generation: Generation


@dataclass(frozen=True)
class SignalScript:
    """Send the main thread SIGTERM, for which the script has a handler of its own."""

    reason: str


@dataclass(frozen=True)
class InterruptTrain:
    """Make the main thread leave the group that it trains in.

    Attributes:
        final: the process is to end: the train function is left at once. Otherwise a loop that
            can go on in the next group leaves by itself, at its next micro-batch.
    """

    generation: Generation
    reason: str
    final: bool = False


@dataclass(frozen=True)
class RequestLeave:
    """Let the next boundary of this generation be the last: leave there, all together.

    Attributes:
        saves: what is done by then is saved there, because the job rests.
    """

    generation: Generation
    reason: str
    saves: bool = False


@dataclass(frozen=True)
class RequestCheckpoint:
    """Let the group of this generation take a checkpoint soon, unless it served this wish already.

    Answered by nothing: a checkpoint that was taken is told as any other is.
    """

    generation: Generation
    request: int


@dataclass(frozen=True)
class NotifyPreemption:
    """Let user code know that nodes of this generation's group are to leave; answered by nothing.

    Attributes:
        deadline_ns: when the first of them is gone, on this machine's monotonic clock.
        reason: of that one.
        nodes: which they are, with the ranks that go with them.
    """

    generation: Generation
    deadline_ns: int
    reason: str
    nodes: tuple[LeavingNode, ...]


@dataclass(frozen=True)
class ResolveReport:
    """Tell the thread that waits whether its checkpoint, or its word, was recorded."""

    generation: Generation
    index: int
    accepted: bool
    reason: str
    code: RefusalCode = RefusalCode.NONE
    kind: ReportKind = ReportKind.SCRIPT


@dataclass(frozen=True)
class ExitWorker:
    """End the process at once with this code; output is flushed before."""

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

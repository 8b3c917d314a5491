"""Tables of the legal phase transitions: the machines check them, tests and docs read them.

Rule: a machine changes a phase only after `check_move` agreed. A table lists every phase of its
enum, moves to itself included where they mean something (a newer generation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from elastic.core.facts import JobPhase, NodePhase, WorkerPhase
from elastic.errors import InvariantViolation

Phase = TypeVar("Phase", bound=Enum)


class ConnectionPhase(Enum):
    """The phase of an agent's stream to the coordinator."""

    DISCONNECTED = "disconnected"
    """No stream; the next attempt waits for its back-off."""
    CONNECTING = "connecting"
    GREETED = "greeted"
    """The stream is open and `Hello` was sent; nothing else is sent before the reply."""
    REGISTERED = "registered"


class ProcessPhase(Enum):
    """The phase of a process that an agent requested."""

    SPAWNING = "spawning"
    """Requested; it has no pid yet, so it can get neither messages nor signals."""
    WARMING = "warming"
    WARM = "warm"
    """A spare: torch is imported, no job yet."""
    ASSIGNED = "assigned"
    """It works for a job."""
    STOPPING = "stopping"
    """Asked to end; killed after the grace period."""
    KILLED = "killed"
    """SIGKILL is sent; only its exit is awaited."""
    GONE = "gone"


class GroupPhase(Enum):
    """The phase of a job's newest group."""

    NONE = "none"
    """There was none yet, or its members were ordered to leave at once."""
    OPEN = "open"
    """It was announced, and is to continue."""
    LEAVING = "leaving"
    """Its members were asked to leave at a boundary."""
    SAVING = "saving"
    """And to save their state there, because no member continues with it."""


class ReleasePhase(Enum):
    """How far a job has come that should hold no workers: it is paused, stopped or preempted."""

    NONE = "none"
    SAVING = "saving"
    """A checkpoint was requested before its group leaves."""
    SAVED = "saved"
    """That request was served."""
    LEAVING = "leaving"
    """Its group was asked to leave, and no other one is formed."""


class MainPhase(Enum):
    """The phase of a worker's main thread, as known to its control thread."""

    IDLE = "idle"
    SETTING_UP = "setting_up"
    FORMING = "forming"
    TRAINING = "training"
    OVER = "over"
    """The process was ordered to end; the last phase."""


class StepPhase(Enum):
    """What the iteration of a training loop that runs now is worth."""

    OUTSIDE = "outside"
    """No micro-batch is at hand: the loop has not begun, or is between two iterations."""
    GATHERING = "gathering"
    """This rank has more micro-batches in this step: nothing happens yet but gradients."""
    DUE = "due"
    """The last one: gradients are exchanged, and optimizers are to step."""
    COMPUTING = "computing"
    """Inside a step of `train.steps`: its micro-batches are computed, nothing else happens yet."""
    SETTLED = "settled"
    """All of such a step that needs other ranks is done: its optimizers are to step, here alone."""
    COMMITTING = "committing"
    """The optimizers step."""
    COMMITTED = "committed"
    VOID = "void"
    """The group broke: the rest of this iteration does nothing, the step is done again."""
    RECEIVED = "received"
    """Others have committed this step, and gave us their state: the rest does nothing."""


@dataclass(frozen=True)
class TransitionTable(Generic[Phase]):
    """The legal transitions of one kind of object.

    Attributes:
        name: printed in errors and as the heading of the rendered table.
        starts: phases in which an object may first be known.
        moves: for every phase those that may follow it; none for a final one.
    """

    name: str
    starts: tuple[Phase, ...]
    moves: Mapping[Phase, tuple[Phase, ...]]


_W = WorkerPhase
WORKER: TransitionTable[WorkerPhase] = TransitionTable(
    "WORKER",
    (_W.STARTING,),
    {
        _W.STARTING: (_W.READY, _W.EXITED),
        _W.READY: (_W.FORMING, _W.EXITED),
        _W.FORMING: (_W.FORMING, _W.TRAINING, _W.BROKEN, _W.READY, _W.EXITED),
        _W.TRAINING: (_W.FORMING, _W.FINISHED, _W.BROKEN, _W.READY, _W.EXITED),
        _W.BROKEN: (_W.FORMING, _W.EXITED),
        _W.FINISHED: (_W.FORMING, _W.EXITED),
        _W.EXITED: (),
    },
)
"""A worker, as its own machine sees each transition."""


def seen(table: TransitionTable[Phase], name: str) -> TransitionTable[Phase]:
    """Return the table for an observer that sees only some phases: several moves look like one.

    Reports replace each other and get lost with connections, so an observer must accept every phase
    that is reachable by several moves, and the same phase again.
    """
    reached: dict[Phase, tuple[Phase, ...]] = {}
    for phase in table.moves:
        found = [phase]
        for one in found:
            found.extend(after for after in table.moves[one] if after not in found)
        reached[phase] = tuple(one for one in table.moves if one in found)
    return TransitionTable(name, tuple(table.moves), reached)


WORKER_SEEN: TransitionTable[WorkerPhase] = seen(WORKER, "WORKER_SEEN")
"""A worker, as agents and the coordinator may see it from one report to the next."""

_J = JobPhase
JOB: TransitionTable[JobPhase] = TransitionTable(
    "JOB",
    (_J.PENDING,),
    {
        _J.PENDING: (_J.RUNNING, _J.PAUSED, _J.STOPPING, _J.FAILED, _J.STOPPED),
        _J.RUNNING: (_J.PENDING, _J.STOPPING, _J.SUCCEEDED, _J.FAILED, _J.STOPPED),
        _J.STOPPING: (_J.SUCCEEDED, _J.FAILED, _J.STOPPED),
        _J.PAUSED: (_J.PENDING, _J.FAILED, _J.STOPPED),
        _J.SUCCEEDED: (),
        _J.FAILED: (),
        _J.STOPPED: (),
    },
)
"""A job; the replacement of its group by the next is not a transition."""

_G = GroupPhase
GROUP: TransitionTable[GroupPhase] = TransitionTable(
    "GROUP",
    (_G.NONE, _G.OPEN, _G.SAVING),
    {
        _G.NONE: (_G.OPEN,),
        _G.OPEN: (_G.LEAVING, _G.SAVING, _G.NONE),
        _G.LEAVING: (_G.SAVING, _G.OPEN, _G.NONE),
        _G.SAVING: (_G.LEAVING, _G.OPEN, _G.NONE),
    },
)
"""The newest group of a job; the next one takes its place, open."""

_R = ReleasePhase
RELEASE: TransitionTable[ReleasePhase] = TransitionTable(
    "RELEASE",
    (_R.NONE, _R.LEAVING),
    {
        _R.NONE: (_R.SAVING, _R.LEAVING),
        _R.SAVING: (_R.SAVED, _R.LEAVING, _R.NONE),
        _R.SAVED: (_R.LEAVING, _R.NONE),
        _R.LEAVING: (_R.NONE,),
    },
)
"""The release of a job's workers; a job that saves by itself, or not at all, leaves at once."""

_N = NodePhase
NODE: TransitionTable[NodePhase] = TransitionTable(
    "NODE",
    (_N.READY, _N.DRAINING, _N.DISCONNECTED),
    {
        _N.READY: (_N.DISCONNECTED, _N.DRAINING, _N.LOST),
        _N.DISCONNECTED: (_N.READY, _N.DRAINING, _N.LOST, _N.LEFT),
        _N.DRAINING: (_N.DISCONNECTED, _N.LOST, _N.LEFT),
        _N.LOST: (_N.READY, _N.DRAINING),
        _N.LEFT: (_N.READY, _N.DRAINING),
    },
)
"""A node, as the coordinator sees it; one that was lost or has left may come back."""

_C = ConnectionPhase
CONNECTION: TransitionTable[ConnectionPhase] = TransitionTable(
    "CONNECTION",
    (_C.DISCONNECTED,),
    {
        _C.DISCONNECTED: (_C.CONNECTING,),
        _C.CONNECTING: (_C.GREETED, _C.DISCONNECTED),
        _C.GREETED: (_C.REGISTERED, _C.DISCONNECTED),
        _C.REGISTERED: (_C.DISCONNECTED,),
    },
)
"""An agent's stream; each new attempt is a new session."""

_P = ProcessPhase
PROCESS: TransitionTable[ProcessPhase] = TransitionTable(
    "PROCESS",
    (_P.SPAWNING,),
    {
        _P.SPAWNING: (_P.WARMING, _P.WARM, _P.GONE),
        _P.WARMING: (_P.WARM, _P.KILLED, _P.GONE),
        _P.WARM: (_P.ASSIGNED, _P.KILLED, _P.GONE),
        _P.ASSIGNED: (_P.STOPPING, _P.KILLED, _P.GONE),
        _P.STOPPING: (_P.KILLED, _P.GONE),
        _P.KILLED: (_P.GONE,),
        _P.GONE: (),
    },
)
"""A process of an agent, from the request to the exit."""

_M = MainPhase
MAIN: TransitionTable[MainPhase] = TransitionTable(
    "MAIN",
    (_M.IDLE,),
    {
        _M.IDLE: (_M.SETTING_UP, _M.FORMING, _M.OVER),
        _M.SETTING_UP: (_M.IDLE, _M.OVER),
        _M.FORMING: (_M.IDLE, _M.TRAINING, _M.OVER),
        _M.TRAINING: (_M.IDLE, _M.OVER),
        _M.OVER: (),
    },
)
"""The main thread of a worker process; one order at a time."""

_S = StepPhase
STEP: TransitionTable[StepPhase] = TransitionTable(
    "STEP",
    (_S.OUTSIDE,),
    {
        _S.OUTSIDE: (_S.OUTSIDE, _S.GATHERING, _S.DUE, _S.COMPUTING, _S.RECEIVED, _S.VOID),
        _S.GATHERING: (_S.GATHERING, _S.DUE, _S.OUTSIDE),
        _S.DUE: (_S.COMMITTING, _S.VOID, _S.OUTSIDE),
        _S.COMPUTING: (_S.COMPUTING, _S.SETTLED, _S.VOID, _S.OUTSIDE),
        _S.SETTLED: (_S.COMMITTING, _S.OUTSIDE),
        _S.COMMITTING: (_S.COMMITTED, _S.VOID, _S.OUTSIDE),
        _S.COMMITTED: (_S.OUTSIDE,),
        _S.VOID: (_S.VOID, _S.OUTSIDE),
        _S.RECEIVED: (_S.OUTSIDE,),
    },
)
"""An iteration of a training loop; it is left for `outside` wherever the loop or its group is."""


def check_move(table: TransitionTable[Phase], what: str, old: Phase, new: Phase) -> None:
    """Check that a transition is legal; the machine adds its recent events to the error.

    Raises:
        InvariantViolation: the table does not list the move.
    """
    if new in table.moves[old]:
        return
    legal = ", ".join(phase.value for phase in table.moves[old])
    raise InvariantViolation(
        f"{what}: move {old.value} -> {new.value} is not in table {table.name}; "
        f"from {old.value} the legal ones are: {legal or 'none, it is a last phase'}"
    )

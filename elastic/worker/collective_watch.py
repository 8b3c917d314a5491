"""Whether the main thread waits in a collective of a sharded model, as the control thread sees it.

`fully_shard` waits for the other ranks inside forward, backward and the optimizer, in code of
torch's that tells nobody. From outside two things show it: torch counts the collectives that each
group has begun, and the stack of a thread that waits in one ends inside torch.distributed.

Rule: the main thread is asked for nothing, and its stack is read only if it has not moved since
the look before. What cannot be told apart counts as a movement, so that nobody is accused of it.
"""

from __future__ import annotations

import os
import sys
import threading
from enum import Enum
from types import FrameType

import torch

from elastic.core.world import Begun
from elastic.worker import c10d, waits

LATE_NS = 300_000_000
"""Looks further apart are not one sight: nobody knows what was between them."""

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
DISTRIBUTED = "distributed/"
PLUMBING = ("_ops.py", "_library/", "_dynamo/", "utils/")
"""Files of torch through which a call goes on its way down."""
COMPILING = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")
OPERATORS = "_ops.py"
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators; compiled models call them without torch.distributed's files."""
SHARDING = ("fsdp/", "tensor/", "_composable/", "_functional_collectives.py")
"""Under `DISTRIBUTED`: what a sharded model and its optimizer call collectives through."""
CALLED = ("distributed_c10d.py", "c10d_logger.py", "utils.py")
"""Under `DISTRIBUTED`: what everyone calls collectives through."""


WAITS = (waits.Waits.wait.__code__, waits.Waits.wait_messages.__code__)
"""Where we wait in torch's place."""
WAITS_DEPTH = 8
"""Frames of that, and of `threading` below it."""


class Stance(Enum):
    """Where a thread is.

    `CALLED` is a collective that the script calls by itself. It may let the others wait in one on
    purpose, while one rank writes a file, for as long as torch's own timeout allows: that says
    nothing of whoever they wait for. While torch is `COMPILING`, which may take minutes, it moves.
    """

    ELSEWHERE = "elsewhere"
    SHARDING = "sharding"
    CALLED = "called"
    COMPILING = "compiling"


class CollectiveWatch:
    """Looks at the main thread of a worker whose model is sharded."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._moves = 0
        self._place: tuple[int, ...] = ()
        self._looked_ns = 0
        self._since_ns = 0
        self._has_moved = True

    def look(self, beats: int, now_ns: int) -> tuple[int, int]:
        """Take one look, for as long as the loop itself does not say that it waits.

        Args:
            beats: how far the training loop says it is; not 0.
            now_ns: monotonic.

        Returns:
            A number that differs from the last one's if the main thread has moved, and since when
            it has been seen in a collective, in nanoseconds until now; 0 if it is not in one.
        """
        try:
            return self._look(beats, now_ns)
        except Exception:
            # Who cannot be seen is not accused, and goes on training.
            self._move()
            return beats + self._moves, 0

    def begun(self) -> tuple[Begun, ...]:
        """Return what this process has begun in groups within its group.

        Nothing if it has moved at the last look: what is said of who moves is that it moves.
        """
        try:
            return () if self._has_moved else tuple(Begun(*one) for one in c10d.begun_in_parts())
        except Exception:
            return ()  # Whom it waits for cannot be told.

    def _look(self, beats: int, now_ns: int) -> tuple[int, int]:
        place = (beats, *c10d.issued())
        self._has_moved = False
        is_late = now_ns - self._looked_ns > LATE_NS
        self._looked_ns = now_ns
        if is_late:
            self._since_ns = 0
        if place != self._place:
            self._place = place
            self._move()
            return beats + self._moves, 0
        stance = stance_of(threading.main_thread())
        if stance is Stance.SHARDING:
            self._since_ns = self._since_ns or now_ns
            return beats + self._moves, max(1, now_ns - self._since_ns)
        if stance in (Stance.CALLED, Stance.COMPILING) or self._since_ns:
            self._move()
        return beats + self._moves, 0

    def _move(self) -> None:
        self._moves += 1
        self._since_ns = 0
        self._has_moved = True


def stance_of(thread: threading.Thread) -> Stance:
    """Return where a thread is, by its stack."""
    # Nothing may keep the frame: it would keep the tensors in it.
    frame = _outside_of_waits(sys._current_frames().get(thread.ident or 0))
    found = _stance(frame)
    return _elsewhere(frame) if found is Stance.ELSEWHERE else found


def _outside_of_waits(frame: FrameType | None) -> FrameType | None:
    """Return the frame that waits in our `Work.wait`, if the innermost one does; itself if not."""
    inner = frame
    for _ in range(WAITS_DEPTH):
        if inner is None:
            break
        if inner.f_code in WAITS:
            inner = inner.f_back
            # What stands in torch's place is a function of the seam's.
            return inner.f_back if inner is not None else None
        inner = inner.f_back
    return frame


def _elsewhere(frame: FrameType | None) -> Stance:
    """Return what a thread does from here outwards that waits in no collective."""
    while frame is not None:
        if frame.f_code.co_filename.removeprefix(TORCH) in COMPILING:
            return Stance.COMPILING
        frame = frame.f_back
    return Stance.ELSEWHERE


def _stance(frame: FrameType | None) -> Stance:
    """Go outwards from the innermost frame, for as long as that is torch's own way down."""
    found = Stance.ELSEWHERE
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH):
            return found
        part = file[len(TORCH) :]
        if part.startswith(DISTRIBUTED):
            part = part[len(DISTRIBUTED) :]
            if part.startswith(SHARDING):
                return Stance.SHARDING
            if not part.startswith(CALLED):
                return found
            found = Stance.CALLED
        elif part == OPERATORS and _is_collective(frame.f_locals.get("self")):
            return Stance.SHARDING
        elif not part.startswith(PLUMBING):
            return found
        frame = frame.f_back
    return found


def _is_collective(operator: object) -> bool:
    """Return whether this is one of torch's operators for collectives."""
    name = getattr(operator, "_qualified_op_name", "") or getattr(operator, "_name", "")
    return str(name).partition("::")[0] in COLLECTIVES

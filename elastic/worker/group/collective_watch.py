"""Finds out whether the main thread works, waits for peers, or makes no progress.

Code that does not know of us may take long for good reasons: an evaluation, a compiler, a
checkpoint written by hand. A thread that works is never reported as hung. Work is recognised by the
interpreter (the main thread executes bytecode) or by where it is: in a sleep with a limit, or in a
compiler.

Waiting for peers is recognised in three ways, because neither `fully_shard` nor
DistributedDataParallel nor collectives of the script's own report anything: torch counts the
collectives that each group has begun, the stack of a thread that waits in one ends inside
torch.distributed, and where torch computes or waits in C++, a thread that waits uses no processor.

Rule: nothing here blocks the main thread or interrupts its system calls. What cannot be classified
counts as work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sysconfig
import threading
import time
from enum import Enum
from types import FrameType
from typing import ClassVar

import torch

from elastic.core.facts import CollectiveCount
from elastic.worker.base.thread_frames import thread_frames
from elastic.worker.group import abortable_wait, c10d
from elastic.worker.group.group import ProcessGroups

LATE_NS = 300_000_000
"""Time between samples further apart does not count: it is not known what was then."""
BUSY = 0.1
"""Of a processor: what a thread that waits stays below, and one that computes does not."""

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
DISTRIBUTED = "distributed/"
INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    os.path.join(PACKAGE, ""),
    "<frozen",
)
"""Where code is that is not the script's."""
PLUMBING = ("_ops.py", "_library/", "_dynamo/", "utils/")
"""Files of torch through which a call passes on its way down."""
COMPILING = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")
OPERATORS = "_ops.py"
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators; compiled models call them without torch.distributed's files."""
SHARDING = ("fsdp/", "tensor/", "_composable/", "_functional_collectives.py")
"""Under `DISTRIBUTED`: what a sharded model and its optimizer call collectives through."""
CALLED = ("distributed_c10d.py", "c10d_logger.py", "utils.py")
"""Under `DISTRIBUTED`: what everyone calls collectives through."""
NATIVE = tuple(
    os.path.join(TORCH, *path.split("/"))
    for path in ("autograd/graph.py", "nn/parallel/distributed.py", "futures/__init__.py")
)
"""Whose C++ computes, and waits for other ranks: DistributedDataParallel's backward and forward."""

OURS = os.path.join(PACKAGE, "worker", "")
WAITS = (
    abortable_wait.AbortableWait.wait.__code__,
    ProcessGroups.wait_aside.__code__,
)
"""Where we wait in torch's place: for a collective, a message, or a subgroup's other members."""
WAITS_DEPTH = 8
"""Frames of that, and of `threading` below it."""


class BlockedKind(Enum):
    """Where a thread is.

    `CALLED` is a collective that the script calls by itself. With a sharded model it may be in one
    of many groups, of which we know nothing: it counts as work. While torch is `COMPILING`, which
    may take minutes, and while it is `ASLEEP` for a given time, it works. In `NATIVE` code of
    torch's it may do either: the processor that it uses shows which.
    """

    ELSEWHERE = "elsewhere"
    SHARDING = "sharding"
    CALLED = "called"
    COMPILING = "compiling"
    ASLEEP = "asleep"
    NATIVE = "native"


SLEEP_CALLS = {
    "x86_64": ("35", "230"),
    "aarch64": ("101", "115"),
}.get(platform.machine(), ())
"""Numbers of the system calls nanosleep and clock_nanosleep, in which `time.sleep` waits."""
SELECT_CALLS = {"x86_64": ("23", "270"), "aarch64": ("72",)}.get(platform.machine(), ())
"""Those of select and pselect6, in which it waits for no descriptor in Python 3.10."""


class BytecodeProbe:
    """Finds out whether the main thread runs bytecode, by a call that the interpreter does there.

    Its stack alone does not show it: a loop around one long call is seen in that call each time.
    A pending call runs between two instructions of the main thread, and interrupts nothing.
    """

    _calls: ClassVar[list[object]] = []
    """Of all probes, for ever: a call may be pending still when its probe is gone."""

    def __init__(self) -> None:
        self._has_run = True
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._run)
        self._calls.append(self._call)

    def has_run(self) -> bool:
        """Return whether the main thread has run bytecode since the last time, and ask again."""
        if not self._has_run:
            return False
        self._has_run = False  # Before: the main thread may run the call at once.
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
            self._has_run = True
        return True

    def _run(self, _: object) -> int:
        self._has_run = True
        return 0


class CollectiveWatch:
    """Samples the main thread of a worker."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._probe = BytecodeProbe()
        self._idle = IdleDetector()
        self._moves = 0
        self._place: tuple[int, ...] = ()
        self._where = ""
        self._checked_ns = 0
        self._since_ns = 0
        self._has_moved = True

    def sample(
        self, beats: int, now_ns: int, is_sharded: bool = False, work: str = ""
    ) -> tuple[int, int]:
        """Take one sample, while the loop itself does not report that it waits.

        Args:
            beats: how far the training loop reports to be; 0 for a script that has none of ours.
            now_ns: monotonic.
            is_sharded: the model is.
            work: what it reports to do, however still it may seem.

        Returns:
            A number that differs from the last one's if the main thread has moved, and since when
            it has been seen in a collective, in nanoseconds until now; 0 if it is not in one.
        """
        try:
            return self._check(beats, now_ns, is_sharded, bool(work))
        except Exception:
            # A thread that cannot be sampled counts as moving.
            self._move()
            return beats + self._moves, 0

    def begun(self) -> tuple[CollectiveCount, ...]:
        """Return what this process has begun in groups within its group.

        Nothing if it has moved at the last sample: then only that is reported of it.
        """
        try:
            return (
                ()
                if self._has_moved
                else tuple(CollectiveCount(*one) for one in c10d.begun_in_parts())
            )
        except Exception:
            return ()  # It cannot be determined which ranks it waits for.

    def place(self) -> str:
        """Return the innermost function of the script that the main thread is in, for people."""
        return self._where

    def _check(self, beats: int, now_ns: int, is_sharded: bool, works: bool) -> tuple[int, int]:
        stack, self._where = seen_stack(threading.main_thread())
        is_idle = self._idle.sample()
        place = (beats, *c10d.issued(), *stack)
        self._has_moved = False
        late_ns, self._checked_ns = now_ns - self._checked_ns, now_ns
        if late_ns > LATE_NS and self._since_ns:
            self._since_ns += late_ns
        if place != self._place or works:
            self._place = place
            self._move()
            return beats + self._moves, 0
        stance = blocked_in_of(threading.main_thread())
        in_our_wait = is_in_our_wait(threading.main_thread())
        runs = self._probe.has_run() and not in_our_wait
        waits = (
            stance is BlockedKind.SHARDING
            or ((stance is BlockedKind.CALLED or in_our_wait) and not is_sharded)
            or (stance is BlockedKind.NATIVE and is_idle and c10d.all_by_gloo())
        )
        if waits:
            self._since_ns = self._since_ns or now_ns
            return beats + self._moves, max(1, now_ns - self._since_ns)
        stands = stance in (BlockedKind.ELSEWHERE, BlockedKind.NATIVE)
        if runs or not stands or self._since_ns:
            self._move()
        return beats + self._moves, 0

    def _move(self) -> None:
        self._moves += 1
        self._since_ns = 0
        self._has_moved = True


def blocked_in_of(thread: threading.Thread) -> BlockedKind:
    # Nothing may keep the frame: it would keep the tensors in it.
    frame = _outside_of_waits(thread_frames().get(thread.ident or 0))
    found = _blocked_in(frame)
    if found is BlockedKind.ELSEWHERE and is_asleep():
        return BlockedKind.ASLEEP
    if found is BlockedKind.ELSEWHERE and frame is not None and frame.f_code.co_filename in NATIVE:
        return BlockedKind.NATIVE
    return _elsewhere(frame) if found is BlockedKind.ELSEWHERE else found


def is_in_our_wait(thread: threading.Thread) -> bool:
    """Return whether a thread waits in torch's place, and runs bytecode for each slice of it."""
    frame = thread_frames().get(thread.ident or 0)
    return _outside_of_waits(frame) is not frame


class IdleDetector:
    """Detects that the process has hardly used a processor for a while.

    Of all its threads: the main thread may wait for one of torch's that computes.
    """

    def __init__(self) -> None:
        self._now = self._spent = 0.0

    def sample(self) -> bool:
        """Return whether it is so since the last sample."""
        last, spent = self._now, self._spent
        self._now, self._spent = time.monotonic(), time.process_time()
        return self._spent - spent <= BUSY * (self._now - last)


def seen_stack(thread: threading.Thread) -> tuple[tuple[int, ...], str]:
    """Return a print of a thread's stack, which differs once it has moved, and where it is.

    Returns:
        Which code runs and at which instruction, from the innermost frame outwards; and the
        innermost function that is of no installed package, as "evaluate (train.py:12)".
    """
    found: list[int] = []
    where = ""
    # Our own waits go round in slices, which is no movement.
    frame = _outside_of_waits(thread_frames().get(thread.ident or 0))
    while frame is not None:
        code = frame.f_code
        found += (id(code), frame.f_lasti)
        if not where and not code.co_filename.startswith(INSTALLED):
            name = os.path.basename(code.co_filename)
            where = f"{code.co_name} ({name}:{frame.f_lineno})"
        frame = frame.f_back
    return tuple(found), where


def is_asleep() -> bool:
    """Return whether the main thread sleeps for a time that it has given itself."""
    try:
        # Not `native_id`: after a fork it is still that of the process before.
        with open(f"/proc/self/task/{os.getpid()}/syscall") as file:
            number, *arguments = file.read().split()
    except OSError:
        return False  # Some containers do not show it.
    return number in SLEEP_CALLS or (number in SELECT_CALLS and arguments[0] == "0x0")


def _outside_of_waits(frame: FrameType | None) -> FrameType | None:
    """Return the frame that waits in our `Work.wait`, if the innermost one does; itself if not."""
    inner = frame
    for _ in range(WAITS_DEPTH):
        if inner is None:
            break
        if inner.f_code in WAITS:
            # Between it and torch's function stands what we have put in the place of torch's own.
            while inner is not None and inner.f_code.co_filename.startswith(OURS):
                inner = inner.f_back
            return inner
        inner = inner.f_back
    return frame


def _elsewhere(frame: FrameType | None) -> BlockedKind:
    """Return what a thread does from here outwards that waits in no collective."""
    while frame is not None:
        if frame.f_code.co_filename.removeprefix(TORCH) in COMPILING:
            return BlockedKind.COMPILING
        frame = frame.f_back
    return BlockedKind.ELSEWHERE


def _blocked_in(frame: FrameType | None) -> BlockedKind:
    """Go outwards from the innermost frame, for as long as that is torch's own way down."""
    found = BlockedKind.ELSEWHERE
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH):
            return found
        part = file[len(TORCH) :]
        if part.startswith(DISTRIBUTED):
            part = part[len(DISTRIBUTED) :]
            if part.startswith(SHARDING):
                return BlockedKind.SHARDING
            if not part.startswith(CALLED):
                return found
            found = BlockedKind.CALLED
        elif part == OPERATORS and _is_collective(frame.f_locals.get("self")):
            return BlockedKind.SHARDING
        elif not part.startswith(PLUMBING):
            return found
        frame = frame.f_back
    return found


def _is_collective(operator: object) -> bool:
    """Return whether this is one of torch's operators for collectives."""
    name = getattr(operator, "_qualified_op_name", "") or getattr(operator, "_name", "")
    return str(name).partition("::")[0] in COLLECTIVES

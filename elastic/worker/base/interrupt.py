"""Making user code leave: `GroupChanged`, and the `Interrupter` that raises it on the main thread.

Rule: the exception is raised by a signal handler, that is, by the main thread itself between two
bytecodes, and only while `Interrupter.run` is open for the generation that is over. So there is
no lock to hold, and nothing can be on its way once `run` has returned.

Why a signal and not `PyThreadState_SetAsyncExc`: a signal also ends `time.sleep`, `queue.get`,
`Event.wait` and every other wait that Python lets signals end, and it leaves no exception
pending that could come out anywhere later.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from elastic.errors import UsageError

log = logging.getLogger(__name__)

Returned = TypeVar("Returned")

SIGNAL = signal.SIGURG
"""Ignored by default, hence harmless should user code reset its handler."""
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.1
UNWIND_S = 5.0
"""How long `finally` blocks may take before the exception is raised in them once more."""
FRAGILE_S = 1.0
"""How long a place where the exception would do harm is given to be over."""
NEVER = 0
BLOCKING = ("wait", "join", "_wait_for_tstate_lock")
"""Functions of `threading` that block, and stand being left."""


class GroupChanged(BaseException):
    """The group that this call trained in is over; raised out of the train function.

    Not an `Exception`, so that user code that catches those cannot swallow it.

    Attributes:
        generation: the group that is over, 0 if it was raised without one.
    """

    def __init__(self, reason: str = "", generation: int = NEVER) -> None:
        self.reason = reason
        self.generation = generation
        super().__init__(reason)


class Interrupter:
    """Raises `GroupChanged` in the main thread, from any other thread, until it has left.

    If user code swallows the exception (a bare `except`, a `__del__`, a callback), it is raised
    again: at once when nothing refers to it any more, and after `UNWIND_S` while it is still on its
    way through `finally` blocks.
    """

    def __init__(self, overdue: Callable[[], None] | None = None) -> None:
        """Touch nothing yet; the handler is installed by `run`.

        Args:
            overdue: called again and again, on a thread of ours, while the main thread has not left
                for long what it was to leave.
        """
        self._overdue = overdue
        # Each is written by one thread only, or by the main thread between two bytecodes.
        self._running = NEVER
        self._shields = 0
        self._deferred = False
        self._final = False
        self._over = NEVER
        self._reason = ""
        self._raised: weakref.ref[GroupChanged] | None = None
        self._raised_at = 0.0
        self._patient_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._wake = threading.Condition()
        self._sender: threading.Thread | None = None
        self._main = threading.main_thread()

    # ------------------------------------------------------------------------------ main thread

    def run(self, generation: int, call: Callable[[], Returned]) -> Returned:
        """Call user code; only in here can `GroupChanged` be raised, and not after.

        Returns:
            What the call returns.

        Raises:
            GroupChanged: `interrupt` was called for this generation or a later one, before or
                during the call; also if the call returned in the same instant.
            UsageError: not called on the main thread.
        """
        if threading.current_thread() is not self._main:
            raise UsageError("Interrupter.run must be called on the main thread of the process")
        # The last call's exception may still be alive in its caller; it does not concern this call.
        self._raised = None
        self._deferred = False
        with self._hooked():
            # Twice, because the exception may be raised inside the inner `finally` itself. There
            # is no third: it is not raised again while the first one is on its way.
            try:
                try:
                    self._running = generation
                    self.check()
                    return call()
                finally:
                    self._running = NEVER
            finally:
                self._running = NEVER

    def defer(self, on: bool) -> None:
        """While on, raise only a final `GroupChanged`: the call checks `is_over` itself."""
        self._deferred = on
        if not on:
            with self._wake:
                self._wake.notify()

    def move(self, generation: int) -> None:
        """The call that runs continues in another group."""
        self._running = generation

    def is_over(self, generation: int) -> bool:
        return generation <= self._over

    def check(self) -> None:
        """Raise `GroupChanged` here if it is due; cheap enough for every step."""
        if self._is_due():
            self._raise()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Keep `GroupChanged` out of a section that must not be torn (a commit, a file written).

        It is raised when the outermost section ends, unless that ends with another exception.
        On other threads it is never raised, and this does nothing.
        """
        if threading.current_thread() is not self._main:
            yield
            return
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self.check()

    # ------------------------------------------------------------------------------- any thread

    def interrupt(self, generation: int, reason: str, *, final: bool = False) -> None:
        """Make the call that trains in this generation, or an earlier one, end soon; do not wait.

        Without such a call nothing happens, now or later. If it is `final`, the process is to end,
        so that nothing defers it.
        """
        with self._wake:
            self._final = self._final or final
            if generation > self._over:
                # The reason first: the main thread reads them without the lock.
                self._reason = reason
                self._over = generation
                self._patient_until = time.monotonic() + FRAGILE_S
            if self._sender is None:
                self._sender = threading.Thread(
                    target=self._send, name="elastic-interrupt", daemon=True
                )
                self._sender.start()
            self._wake.notify()

    # ------------------------------------------------------------------------------------ inside

    def _is_due(self) -> bool:
        is_deferred = self._deferred and not self._final
        return NEVER < self._running <= self._over and not self._shields and not is_deferred

    def _raise(self) -> None:
        error = GroupChanged(self._reason, self._running)
        self._raised = weakref.ref(error)
        self._raised_at = time.monotonic()
        try:
            raise error
        finally:
            # Its traceback refers to this frame: it would live on after user code dropped it.
            del error

    def _is_on_its_way(self) -> bool:
        """Return whether the last one raised still unwinds the stack, and may take its time."""
        alive = self._raised is not None and self._raised() is not None
        return alive and time.monotonic() - self._raised_at < UNWIND_S

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._is_due() or self._is_on_its_way():
            return
        now = time.monotonic()
        if _is_fragile(frame) and now < self._patient_until:
            self._pause_s = FIRST_PAUSE_S
            return
        self._patient_until = now + FRAGILE_S
        self._raise()

    def _send(self) -> None:
        """Signal the main thread whenever there is a reason to, at growing intervals."""
        while True:
            with self._wake:
                # While nothing runs, the next `interrupt` is what wakes us. `run` checks by
                # itself when it opens, so a group that was over before is not missed.
                if not NEVER < self._running <= self._over:
                    self._pause_s = FIRST_PAUSE_S
                    self._wake.wait()
                    continue
            if self._overdue is not None and self._pause_s == LONGEST_PAUSE_S:
                try:
                    self._overdue()
                except Exception:  # The main thread must still be interrupted.
                    log.exception("overdue_failed")
            if self._is_due() and not self._is_on_its_way():
                try:
                    signal.pthread_kill(self._main.ident or 0, SIGNAL)
                except ProcessLookupError:
                    return  # the main thread has ended
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Have the handler in place, and no report of an exception lost in a `__del__`."""
        handler = signal.signal(SIGNAL, self._on_signal)
        hook = sys.unraisablehook
        sys.unraisablehook = _QuietHook(hook, self._on_lost)
        try:
            yield
        finally:
            sys.unraisablehook = hook
            signal.signal(SIGNAL, handler if handler is not None else signal.SIG_DFL)

    def _on_lost(self) -> None:
        """The exception landed where it ends without effect: try again soon."""
        self._raised = None
        self._pause_s = FIRST_PAUSE_S
        log.debug("interrupt_lost: raised in a __del__ or callback, raised again")


def _is_fragile(frame: FrameType | None) -> bool:
    """Return whether an exception raised here would be lost, or leave a shared lock held.

    Lost: in a `__del__`. Held: `logging` and `threading.Condition` take their locks one statement
    before the `try` or `with` that gives them back, and the control thread logs as well.
    """
    if frame is not None and frame.f_globals.get("__name__") == "threading":
        return frame.f_code.co_name not in BLOCKING
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


class _QuietHook:
    """A `sys.unraisablehook` that lets `GroupChanged` pass in silence."""

    def __init__(self, before: Callable[[Any], Any], on_lost: Callable[[], None]) -> None:
        self._before = before
        self._on_lost = on_lost

    def __call__(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, GroupChanged):
            self._on_lost()
        else:
            self._before(unraisable)

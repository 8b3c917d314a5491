"""Ctrl-C while a job is followed: recorded at once, handled where it can do no harm.

Rule: the first one raises nothing by itself. Python would raise `KeyboardInterrupt` between any
two bytecodes, also inside of gRPC's callbacks, which swallow it, and in the middle of taking a
lock. A second Ctrl-C has Python's own behaviour.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class InterruptHandler:
    """Handles SIGINT during a `with` block; on other threads it does nothing."""

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def take(self) -> bool:
        """Return whether Ctrl-C was pressed since the last time."""
        came, self._came = self._came, False
        return came

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True

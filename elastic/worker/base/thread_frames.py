"""Where all threads of this process are; for watchdogs and the profiler."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()
"""Of two callers at once, one would find collection off, and leave it so."""


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by `Thread.ident`.

    Before Python 3.11.9, `sys._current_frames` allocates under a lock of the interpreter. A garbage
    collection that begins there may run destructors, which wait for that lock, or let other threads
    run that do: the process stands still for ever (python/cpython#106883). So none may begin.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()

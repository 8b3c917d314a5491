"""A main thread that gloo has forgotten in torch's own C++, where no exception reaches it.

`waits` gives up what Python waits for. DistributedDataParallel, and operators of torch's, wait by
themselves for what gloo may never end (see there), and nothing but the end of the process, or of
the group's timeout, ends that. The process ends itself then, as if it had been killed: the
coordinator would do so too, a minute later.

Rule: whoever might still come back is left alone. So the group must be over and gloo have let go
of it; a thread of gloo's must wait with a timeout, which an idle one does not; and the main thread
must have stood for a while in one place where torch waits for other ranks, and have used no more
processor time than our signals take.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.worker.collective_watch import TORCH, Stance, stance_of
from elastic.worker.gloo_threads import gloo_threads
from elastic.worker.group import ProcessGroups

log = logging.getLogger(__name__)

STOOD_S = 2.0
BUSY = 0.02
"""Of its time, which a main thread uses that only gets signals; it is a hundredth of that."""
PLACES = (
    os.path.join(TORCH, "autograd", "graph.py"),
    os.path.join(TORCH, "nn", "parallel", "distributed.py"),
    os.path.join(TORCH, "futures", "__init__.py"),
)
"""Where DistributedDataParallel and futures wait, beside what the watch for collectives knows."""

Place = tuple[int, int]
"""Innermost frame of the main thread, and where in it."""


class Forgotten:
    """Looks at a main thread that has been told to leave its group, and has not."""

    def __init__(self, groups: ProcessGroups, end: Callable[[], None] | None = None) -> None:
        """See nothing yet.

        Args:
            groups: of this process.
            end: ends the process; by SIGKILL if None.
        """
        self._groups = groups
        self._end = end if end is not None else _end
        self._seen: Place | None = None
        self._since = self._spent = 0.0

    def look(self) -> None:
        """Take one look, some times a second; end the process if nothing else can help."""
        place = _place_of_main() if self._groups.has_been_left() else None
        now, spent = time.monotonic(), _spent_by_main()
        is_still = spent - self._spent <= BUSY * (now - self._since)
        if place is None or place != self._seen or not is_still:
            self._seen, self._since, self._spent = place, now, spent
            return
        if now - self._since < STOOD_S or not is_forgotten_by_gloo():
            return
        log.error(
            "forgotten_by_gloo: a message was cut in its middle, and torch waits for its end, in "
            "C++; this process ends, and is replaced"
        )
        with contextlib.suppress(Exception):  # A script may have closed it.
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        self._end()


def _spent_by_main() -> float:
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return time.clock_gettime(clock)


def _place_of_main() -> Place | None:
    """Return where the main thread stands, None if it is not where torch waits for others."""
    main = threading.main_thread()
    frame: Any = sys._current_frames().get(main.ident or 0)
    if frame is None:
        return None
    is_known = frame.f_code.co_filename in PLACES
    if not is_known and stance_of(main) not in (Stance.SHARDING, Stance.CALLED):
        return None
    return id(frame), frame.f_lasti


def is_forgotten_by_gloo() -> bool:
    """Return whether a thread in which gloo carries out collectives waits for a peer."""
    return any(thread.waits_for_peer for thread in gloo_threads())


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

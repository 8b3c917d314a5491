"""Ends a process whose main thread is blocked for good inside torch's C++.

`abortable_wait` makes Python's waits end with their group. DistributedDataParallel and some
operators wait in C++, where no exception can be raised; if gloo never completes such a wait, only
the end of the process or the group's timeout (half an hour) ends it. The process then kills itself,
a minute before the coordinator would.

Rule: kill only if for `STOOD_S` all of these hold. The group was aborted, and gloo carries all of
it: it reports the end of its connections within milliseconds, or never. The main thread is at one
place, where torch waits for other ranks, and the process uses hardly any processor. Then gloo is
tried: if its threads are free and its connections closed, the main thread waits for something else.
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
from typing import Any

from elastic.worker.base.thread_frames import thread_frames
from elastic.worker.group import c10d
from elastic.worker.group.collective_watch import BlockedKind, IdleDetector, blocked_in_of
from elastic.worker.group.group import ProcessGroups

log = logging.getLogger(__name__)

STOOD_S = 2.0
LATE_S = 0.5
"""Samples further apart are not compared: it is not known what was between them."""
PLACES = (BlockedKind.SHARDING, BlockedKind.CALLED, BlockedKind.NATIVE)

Place = tuple[int, int, int]
"""Generation, innermost frame of the main thread, and where in it."""


class StuckWaitWatchdog:
    """Watches a main thread that has been asked to leave its group, and has not."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._idle = IdleDetector()
        self._seen: Place | None = None
        self._since = self._checked = 0.0

    def check(self) -> None:
        """Take one sample, some times a second; end the process if nothing else can help."""
        place, now = self._place(), time.monotonic()
        is_late, self._checked = now - self._checked > LATE_S, now
        if not self._idle.sample() or place is None or place != self._seen or is_late:
            self._seen, self._since = place, now
            return
        if now - self._since < STOOD_S:
            return
        resources = self._groups.over()
        if resources is None or resources.join_gloo():
            self._since = now
            return
        log.error(
            "forgotten_by_gloo: a message was cut in its middle, and torch waits for its end, in "
            "C++; this process ends, and is replaced"
        )
        with contextlib.suppress(Exception):  # A script may have closed it.
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    def _place(self) -> Place | None:
        """Return where the main thread stands, None if it is not where torch waits for others."""
        resources, main = self._groups.over(), threading.main_thread()
        frame: Any = thread_frames().get(main.ident or 0)
        if resources is None or frame is None or not c10d.all_by_gloo():
            return None
        if blocked_in_of(main) not in PLACES:
            return None
        return resources.spec.generation, id(frame), frame.f_lasti

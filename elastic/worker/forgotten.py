"""A main thread that gloo has forgotten in torch's own C++, where no exception reaches it.

`waits` gives up what Python waits for. DistributedDataParallel, and operators of torch's, wait by
themselves for what gloo may never end (see there), and nothing but the end of the process, or of
the group's timeout, ends that. The process ends itself then, as if it had been killed: the
coordinator would do so too, a minute later.

Rule: whoever might still come back is left alone. So the group must be over, with all of its
connections closed; none of gloo's threads may be at work for it, and one must wait with a timeout,
which an idle one does not; the main thread must wait without one where torch waits for other ranks,
and the process have used no more of the processor than our own threads take.
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
from elastic.worker.gloo_threads import sleeps_for_ever, wait_for_peers
from elastic.worker.group import ProcessGroups
from elastic.worker.life import Life

log = logging.getLogger(__name__)

STOOD_S = 2.0
LATE_S = 0.5
"""Looks further apart are not one sight: nobody knows what was between them."""
BUSY = 0.1
"""Of a processor: more than our own threads use, and less than anybody who trains."""
PLACES = (
    os.path.join(TORCH, "autograd", "graph.py"),
    os.path.join(TORCH, "nn", "parallel", "distributed.py"),
    os.path.join(TORCH, "futures", "__init__.py"),
)
"""Where DistributedDataParallel and futures wait, beside what the watch for collectives knows."""

Place = tuple[int, int, int]
"""Generation, innermost frame of the main thread, and where in it."""


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
        self._since = self._spent = self._looked = 0.0

    def look(self) -> None:
        """Take one look, some times a second; end the process if nothing else can help."""
        life = self._groups.over()
        place = _place_of_main(life.generation) if life is not None else None
        now, spent = time.monotonic(), time.process_time()
        is_late, self._looked = now - self._looked > LATE_S, now
        is_still = spent - self._spent <= BUSY * (now - self._since)
        if life is None or place is None or place != self._seen or is_late:
            self._seen, self._since, self._spent = place, now, spent
            return
        if now - self._since < STOOD_S:
            return
        if not is_still or not is_forgotten(life):
            self._since, self._spent = now, spent
            return
        log.error(
            "forgotten_by_gloo: a message was cut in its middle, and torch waits for its end, in "
            "C++; this process ends, and is replaced"
        )
        with contextlib.suppress(Exception):  # A script may have closed it.
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        self._end()


def is_forgotten(life: Life) -> bool:
    """Return whether the main thread waits for good, and gloo for a peer of this life."""
    main = threading.main_thread().native_id or 0
    return sleeps_for_ever(main) and wait_for_peers(life.threads)


def _place_of_main(generation: int) -> Place | None:
    """Return where the main thread stands, None if it is not where torch waits for others."""
    main = threading.main_thread()
    frame: Any = sys._current_frames().get(main.ident or 0)
    if frame is None:
        return None
    is_known = frame.f_code.co_filename in PLACES
    if not is_known and stance_of(main) not in (Stance.SHARDING, Stance.CALLED):
        return None
    return generation, id(frame), frame.f_lasti


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

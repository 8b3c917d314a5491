"""Ends a coordinator whose event loop hangs, if another one can take over.

Rule: only coordinators with a shared store are watched. The lease expires while the loop hangs, and
another coordinator leads. But gRPC's own threads still answer pings here, so the agents would stay
attached and receive nothing. The thread counts its turns, not time: a process that was stopped
(SIGSTOP) and continues does not count as hanging.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import anyio

log = logging.getLogger(__name__)

BEAT_S = 0.5
TURNS_MAX = 20
"""So many turns of the thread without a beat of the loop: ten seconds. The longest known work,
sending to ten thousand agents, takes one."""
LAST_WORDS_S = 0.5
EXIT_HUNG = 75
"""A temporary failure: the supervisor should restart the process."""


class Watchdog:
    """Counts the thread's turns since the last beat of the event loop."""

    def __init__(
        self,
        *,
        end: Callable[[], None] | None = None,
        beat_s: float = BEAT_S,
        turns_max: int = TURNS_MAX,
    ) -> None:
        """Watch nothing before `keep`.

        Args:
            end: called by the thread, once, when the loop hangs; ends the process by default.
            beat_s: seconds between two beats of the loop, and between two checks by the thread.
            turns_max: how many successive checks may see no beat.
        """
        self._end = end or end_process
        self._beat_s = beat_s
        self._turns_max = turns_max
        self._beats = 0
        self._over = threading.Event()

    async def keep(self) -> None:
        """Start the thread and beat; never returns."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        try:
            while True:
                self._beats += 1
                await anyio.sleep(self._beat_s)
        finally:
            self._over.set()

    def _watch(self) -> None:
        seen = turns = 0
        while not self._over.wait(self._beat_s):
            turns = turns + 1 if self._beats == seen else 0
            seen = self._beats
            if turns >= self._turns_max:
                log.critical("loop_hangs seconds=%.1f advice=%r", turns * self._beat_s, ADVICE)
                self._end()
                return


ADVICE = "this process ends: another coordinator leads by now; agents here would not be notified"


def end_process() -> None:
    """Exit from any thread, whatever the loop does, after a short time for log output."""
    threading.Event().wait(LAST_WORDS_S)
    os._exit(EXIT_HUNG)

"""Ends a coordinator whose event loop does not get on, where another one can take over.

Rule: only who shares its store is watched. Its lease ends while it hangs, and another one leads;
but gRPC's own threads go on answering pings here, so that its agents would stay, and hear nothing.
Turns of a thread are counted, not time: a process that was stopped and goes on is no hanging one.
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
"""So many turns of the thread without a beat of the loop: ten seconds. The longest work that is
known, telling ten thousand agents, takes one."""
LAST_WORDS_S = 0.5
EXIT_HUNG = 75
"""A temporary failure: to be started again."""


class Watchdog:
    """Counts the turns that a loop has not moved for."""

    def __init__(
        self,
        *,
        end: Callable[[], None] | None = None,
        beat_s: float = BEAT_S,
        turns_max: int = TURNS_MAX,
    ) -> None:
        """Begin with nothing seen.

        Args:
            end: called by the thread, once, when the loop hangs; ends the process by default.
            beat_s: how often the loop says that it gets on, and the thread looks.
            turns_max: how many looks may see nothing new.
        """
        self._end = end or end_process
        self._beat_s = beat_s
        self._turns_max = turns_max
        self._beats = 0
        self._over = threading.Event()

    async def keep(self) -> None:
        """Be watched; never returns."""
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


ADVICE = "this process ends: another coordinator leads by now, and agents here would not hear of it"


def end_process() -> None:
    """End this process from any thread, whatever its loop does; no one waits for its last words."""
    threading.Event().wait(LAST_WORDS_S)
    os._exit(EXIT_HUNG)

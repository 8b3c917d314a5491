"""Python's garbage collector, run by the clock and not in the middle of work.

Rule: what the coordinator throws away is freed at once by reference counts; only cycles wait for
this. By itself Python looks for them each few hundred new values, again and again at all that is
known of ten thousand nodes, just when it makes a value for each of them: half of the time it took
to tell them of a group.
"""

from __future__ import annotations

import gc
import logging
import time

import anyio

log = logging.getLogger(__name__)

LOOK_S = 1.0
YOUNG_MAX = 50_000
"""New values that have not gone, which are looked at within a second."""
YOUNG_S_MAX = 60.0
"""Fewer than that, too, are looked at after this."""
ALL_S = 600.0
"""Everything is: streams that ended leave cycles, some ten kilobytes each."""
SLOW_S = 0.1


def stop_collector() -> None:
    """Let Python look for garbage only when asked; what was imported, never."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect_for_ever() -> None:
    """Look for garbage now and then, unless Python does; never returns."""
    if gc.isenabled():
        await anyio.sleep_forever()
    young_s = all_s = time.monotonic()
    while True:
        await anyio.sleep(LOOK_S)
        now_s = time.monotonic()
        if now_s - all_s >= ALL_S:
            _collect(2)
            young_s = all_s = now_s
        elif gc.get_count()[0] >= YOUNG_MAX or now_s - young_s >= YOUNG_S_MAX:
            _collect(1)
            young_s = now_s


def _collect(generation: int) -> None:
    began_s = time.perf_counter()
    found = gc.collect(generation)
    took_s = time.perf_counter() - began_s
    if took_s >= SLOW_S:
        log.info("garbage_collected generation=%d found=%d took_s=%.2f", generation, found, took_s)

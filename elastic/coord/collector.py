"""Python's garbage collector, run by the clock and not in the middle of work.

Rule: what the coordinator throws away is freed at once by reference counts; only cycles wait for
this, until a second comes in which there is little to do. By itself Python looks for them each few
hundred new values, again and again at all that is known of ten thousand nodes, just when it makes a
value for each of them: half of the time it took to tell them of a group.
"""

from __future__ import annotations

import gc
import logging
import time

import anyio

log = logging.getLogger(__name__)

YOUNG, ALL = 1, 2
"""Python's generations."""
POLL_S = 1.0
YOUNG_MAX = 50_000
"""New values that have not gone, which are looked at within a second."""
YOUNG_S_MAX = 60.0
"""Fewer than that, too, are looked at after this."""
BUSY = 0.2
"""Whoever works so much of a second has no time for this."""
BUSY_S_MAX = 30.0
"""It is done all the same after so long."""
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
    waits_since_s = 0.0
    while True:
        worked_s = time.thread_time()
        await anyio.sleep(POLL_S)
        now_s, worked_s = time.monotonic(), time.thread_time() - worked_s
        due = generation_due(now_s, young_s, all_s)
        if due is None:
            continue
        waits_since_s = waits_since_s or now_s
        if worked_s >= BUSY * POLL_S and now_s - waits_since_s < BUSY_S_MAX:
            continue
        _collect(due)
        waits_since_s, young_s = 0.0, now_s
        all_s = now_s if due == ALL else all_s


def generation_due(now_s: float, young_s: float, all_s: float) -> int | None:
    """Return which generation to look at, None for none yet.

    Args:
        now_s: monotonic.
        young_s: when new values were looked at last.
        all_s: when everything was.
    """
    if now_s - all_s >= ALL_S:
        return ALL
    is_due = gc.get_count()[0] >= YOUNG_MAX or now_s - young_s >= YOUNG_S_MAX
    return YOUNG if is_due else None


def _collect(generation: int) -> None:
    began_s = time.perf_counter()
    found = gc.collect(generation)
    took_s = time.perf_counter() - began_s
    if took_s >= SLOW_S:
        log.info("garbage_collected generation=%d found=%d took_s=%.2f", generation, found, took_s)

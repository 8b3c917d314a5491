"""Runs Python's garbage collector by the clock, not in the middle of work.

Rule: reference counts free most objects at once. Only cycles wait for this, until a second with
little to do. Python's own schedule runs it every few hundred new objects, so it scans the state of
ten thousand nodes again and again while an object for each of them is made: that was half of the
time for sending them a group.
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
"""With so many new objects that are still alive, a collection is due at the next poll."""
YOUNG_S_MAX = 60.0
"""With fewer, a collection is due after this."""
BUSY = 0.2
"""If work takes this share of a second, a due collection is postponed."""
BUSY_S_MAX = 30.0
"""It is postponed for so long at most."""
ALL_S = 600.0
"""Time between full collections: ended streams leave cycles, some ten kilobytes each."""
SLOW_S = 0.1


def stop_collector() -> None:
    """Disable automatic collection, and exempt imported objects from all collections."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect_for_ever() -> None:
    """Collect when due, unless automatic collection is enabled; never returns."""
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
    """Return which generation to collect, None for none yet.

    Args:
        now_s: monotonic.
        young_s: time of the last collection of any kind.
        all_s: time of the last full collection.
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

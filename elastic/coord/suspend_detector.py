"""Detects that this process did not run: it was stopped, frozen, or the machine was suspended.

Rule: only time in which this process was not scheduled counts. If the loop is late because this
process was busy, it used CPU time meanwhile, and gRPC's own threads kept answering the agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from elastic.runtime.clock import BOOTTIME

POLL_S = 0.25
SUSPEND_S = 1.0
"""Agents give up a coordinator that is silent for somewhat longer."""
BUSY = 0.5
"""With this share of the time on a CPU, the process was busy and not suspended."""


async def watch_suspends(on_woke: Callable[[int], None]) -> None:
    """Call `on_woke` with the length in ns after each suspend; never returns."""
    while True:
        began_ns, worked_ns = time.clock_gettime_ns(BOOTTIME), time.process_time_ns()
        await anyio.sleep(POLL_S)
        slept_ns = suspended_ns(
            time.clock_gettime_ns(BOOTTIME) - began_ns, time.process_time_ns() - worked_ns
        )
        if slept_ns:
            on_woke(slept_ns)


def suspended_ns(took_ns: int, worked_ns: int) -> int:
    """Return how long this process did not run, 0 if it did.

    Args:
        took_ns: from one check to the next.
        worked_ns: CPU time of this process meanwhile.
    """
    late_ns = took_ns - round(POLL_S * 1e9)
    is_suspend = late_ns >= SUSPEND_S * 1e9 and worked_ns < BUSY * late_ns
    return late_ns if is_suspend else 0

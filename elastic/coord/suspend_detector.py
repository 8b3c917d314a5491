"""Notices that this process did not run: stopped, frozen with its container, or out of a suspend.

Rule: only what nobody here could do anything about counts. A loop that is late because this process
itself was busy has used its processor meanwhile; and gRPC, which has threads of its own, has
answered the agents all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

POLL_S = 0.25
SUSPEND_S = 1.0
"""Agents take a coordinator for dead that is silent for somewhat longer."""
BUSY = 0.5
"""Of the time, on a processor: whoever worked so much was not asleep."""

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, too, where there is such a clock."""


async def watch_suspends(on_woke: Callable[[int], None]) -> None:
    """Call `on_woke` with the nanoseconds of each nap, right after it; never returns."""
    while True:
        began_ns, worked_ns = time.clock_gettime_ns(CLOCK), time.process_time_ns()
        await anyio.sleep(POLL_S)
        slept_ns = suspended_ns(
            time.clock_gettime_ns(CLOCK) - began_ns, time.process_time_ns() - worked_ns
        )
        if slept_ns:
            on_woke(slept_ns)


def suspended_ns(took_ns: int, worked_ns: int) -> int:
    """Return how long this process did not run, 0 if it did.

    Args:
        took_ns: from one look to the next.
        worked_ns: on a processor meanwhile.
    """
    late_ns = took_ns - round(POLL_S * 1e9)
    is_suspend = late_ns >= SUSPEND_S * 1e9 and worked_ns < BUSY * late_ns
    return late_ns if is_suspend else 0

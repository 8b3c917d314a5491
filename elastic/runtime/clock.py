"""The clocks of a process, behind one interface.

Rule: intervals and deadlines use `monotonic_ns`, which cannot be set back; those that another
machine counts too, and that must end while this one is suspended, use `boottime_ns`; `unix_ns` is
only for output and files. Code that needs time receives a `Clock`; state machines receive plain
integers.
"""

from __future__ import annotations

import time
from typing import Protocol

BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that also runs while the machine is suspended, where there is one."""


class Clock(Protocol):
    """Interface of a clock; all readings are integer nanoseconds."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment; never decreases."""
        ...

    def boottime_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment, with those of the machine's suspends."""
        ...

    def unix_ns(self) -> int:
        """Return nanoseconds since 1970 UTC; may jump when the host's clock is set."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC, which is also the clock of the asyncio loop."""
        return time.monotonic_ns()

    def boottime_ns(self) -> int:
        return time.clock_gettime_ns(BOOTTIME)

    def unix_ns(self) -> int:
        return time.time_ns()

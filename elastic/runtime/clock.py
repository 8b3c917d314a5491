"""The two clocks of a process, behind one seam.

Rule: intervals and deadlines use `monotonic_ns`, which no one can set back; `unix_ns` is only
for people and files. Whoever needs time receives a `Clock`; machines receive plain integers.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that knows what time it is; both readings are integer nanoseconds."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment; never falls."""
        ...

    def unix_ns(self) -> int:
        """Return nanoseconds since 1970 UTC; may jump when the host's clock is set."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC, the clock of the asyncio loop as well."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """Return CLOCK_REALTIME."""
        return time.time_ns()

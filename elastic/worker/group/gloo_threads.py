"""The threads in which gloo carries out collectives, as the kernel sees them.

torch names them, and neither it nor gloo says what they do. A thread that waits for a peer waits
with the group's timeout, an idle one without; and whoever copies or adds up uses the processor.
One that waits for a lock of another thread's for a moment looks idle, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass

NAME = "pt_gloo_runloop"
FUTEX = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}
"""Numbers of futex, and of what the kernel calls it that goes on after a stop (restart_syscall)."""
TIMEOUT_ARGUMENT = 4
"""Of futex(address, operation, value, timeout, ...), counted with the call's number as 0."""
BLIND_S = 1.0
"""How long whoever cannot see waits instead."""


@dataclass(frozen=True)
class ThreadSample:
    """A thread at one moment.

    Attributes:
        number: of the thread.
        cpu_ns: what it has had of the processor.
        sleeps: it waits for something in a futex.
        has_timeout: not for ever.
    """

    number: int
    cpu_ns: int
    sleeps: bool
    has_timeout: bool


def numbers_of_gloo() -> frozenset[int]:
    """Return the numbers of the threads in which gloo carries out collectives, of all groups."""
    found = set()
    for name in os.listdir("/proc/self/task"):
        try:
            if _read(int(name), "comm") == NAME:
                found.add(int(name))
        except OSError:
            continue  # It has ended meanwhile.
    return frozenset(found)


def check_at(numbers: Set[int]) -> tuple[ThreadSample, ...] | None:
    """Return what these threads do, without those that have ended; None if it cannot be told."""
    futex = FUTEX.get(os.uname().machine)
    if futex is None:
        return None
    found = []
    for number in sorted(numbers):
        try:
            call = _read(number, "syscall").split()
            spent = int(_read(number, "schedstat").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            if os.path.exists(f"/proc/self/task/{number}/comm"):
                return None  # This kernel does not tell.
            continue
        except (OSError, ValueError, IndexError):
            return None
        sleeps = call[0] in futex
        has_timeout = sleeps and int(call[TIMEOUT_ARGUMENT], 16) != 0
        found.append(ThreadSample(number, spent, sleeps, has_timeout))
    return tuple(found)


def wait_for_peers(numbers: Set[int]) -> bool:
    """Return whether none of these threads does anything, and one waits for a peer."""
    seen = check_at(numbers) or ()
    return all(one.sleeps for one in seen) and any(one.has_timeout for one in seen)


def sleeps_for_ever(number: int) -> bool:
    """Return whether a thread waits in a futex without a timeout."""
    seen = check_at({number}) or ()
    return any(one.sleeps and not one.has_timeout for one in seen)


class IdleDetector:
    """Whether threads have done nothing for a while: none copies, adds up or begins."""

    def __init__(self, numbers: Set[int], *, are_all: bool = False) -> None:
        """Nothing has been seen.

        Args:
            numbers: of the threads. Where none is found there may be some all the same, which
                cannot be told from others: torch 2.9 names none.
            are_all: there are no others, also if these are none.
        """
        self._numbers = numbers
        self._is_blind = not (numbers or are_all)
        self._seen: tuple[ThreadSample, ...] | None = None
        self._since = 0.0

    def lasts(self, seconds: float) -> bool:
        """Take a look; return whether all looks of so many seconds have shown the same."""
        now, seen = time.monotonic(), check_at(self._numbers)
        if seen is None or self._is_blind:
            self._since = self._since or now
            return now - self._since >= max(seconds, BLIND_S)
        if seen != self._seen or not all(one.sleeps for one in seen):
            self._seen, self._since = seen, now
            return not seen
        return now - self._since >= seconds


def _read(thread: int, name: str) -> str:
    with open(f"/proc/self/task/{thread}/{name}", encoding="utf-8") as text:
        return text.read().strip()

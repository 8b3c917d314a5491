"""The threads in which gloo carries out collectives, as seen in /proc.

torch gives them a name, but neither it nor gloo reports what they do. A thread that waits for a
peer sleeps in futex with the group's timeout, an idle one without; one that copies or adds up uses
CPU time. A thread that waits briefly for a lock seems idle, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass

NAME = "pt_gloo_runloop"
FUTEX = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}
"""System call numbers of futex and restart_syscall (a futex wait continued after a stop)."""
TIMEOUT_ARGUMENT = 4
"""Index in /proc's `syscall` line: 0 is the call's number, then futex(address, operation, ...)."""
BLIND_S = 1.0
"""How long to wait where the threads cannot be observed."""


@dataclass(frozen=True)
class ThreadSample:
    """A thread at one moment.

    Attributes:
        number: thread id.
        cpu_ns: CPU time used so far.
        sleeps: waits in a futex.
        has_timeout: that wait has a timeout.
    """

    number: int
    cpu_ns: int
    sleeps: bool
    has_timeout: bool


def numbers_of_gloo() -> frozenset[int]:
    """Return the ids of the threads in which gloo carries out collectives, of all groups."""
    found = set()
    for name in os.listdir("/proc/self/task"):
        try:
            if _read(int(name), "comm") == NAME:
                found.add(int(name))
        except OSError:
            continue  # It has ended meanwhile.
    return frozenset(found)


def check_at(numbers: Set[int]) -> tuple[ThreadSample, ...] | None:
    """Sample these threads, without those that have ended; None where /proc does not show them."""
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
                return None  # This kernel hides it.
            continue
        except (OSError, ValueError, IndexError):
            return None
        sleeps = call[0] in futex
        has_timeout = sleeps and int(call[TIMEOUT_ARGUMENT], 16) != 0
        found.append(ThreadSample(number, spent, sleeps, has_timeout))
    return tuple(found)


def wait_for_peers(numbers: Set[int]) -> bool:
    """Return whether all of these threads sleep, and at least one waits for a peer."""
    seen = check_at(numbers) or ()
    return all(one.sleeps for one in seen) and any(one.has_timeout for one in seen)


def sleeps_for_ever(number: int) -> bool:
    """Return whether a thread waits in a futex without a timeout."""
    seen = check_at({number}) or ()
    return any(one.sleeps and not one.has_timeout for one in seen)


class IdleDetector:
    """Detects that threads have done nothing for a while: none copies, adds up or begins."""

    def __init__(self, numbers: Set[int], *, are_all: bool = False) -> None:
        """Begin without a sample.

        Args:
            numbers: thread ids. If empty, there may still be threads that cannot be distinguished
                from others, because torch 2.9 names none.
            are_all: there are no others, even if `numbers` is empty.
        """
        self._numbers = numbers
        self._is_blind = not (numbers or are_all)
        self._seen: tuple[ThreadSample, ...] | None = None
        self._since = 0.0

    def lasts(self, seconds: float) -> bool:
        """Take a sample; return whether all samples of so many seconds were equal and asleep."""
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

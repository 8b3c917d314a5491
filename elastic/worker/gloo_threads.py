"""The threads in which gloo carries out collectives, as the kernel sees them.

torch names them, and neither it nor gloo says what they do. A thread that waits for a peer waits
with the group's timeout, an idle one without; and whoever copies or adds up uses the processor.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

NAME = "pt_gloo_runloop"
FUTEX = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}
"""Numbers of futex, and of what the kernel calls it that goes on after a stop (restart_syscall)."""
TIMEOUT_ARGUMENT = 4
"""Of futex(address, operation, value, timeout, ...), counted with the call's number as 0."""


@dataclass(frozen=True)
class GlooThread:
    """One of them, at one moment.

    Attributes:
        number: of the thread.
        cpu_ns: what it has had of the processor.
        sleeps: it waits for something, idle or not.
        waits_for_peer: it waits with a timeout.
    """

    number: int
    cpu_ns: int
    sleeps: bool
    waits_for_peer: bool


class Quiet:
    """Whether gloo's threads have done nothing for a while: none copies, adds up or begins."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self._seen: tuple[GlooThread, ...] | None = None
        self._since = 0.0

    def lasts(self, seconds: float) -> bool:
        """Take a look; return whether all looks of so many seconds have shown the same."""
        now, threads = time.monotonic(), gloo_threads()
        if threads != self._seen or not all(thread.sleeps for thread in threads):
            self._seen, self._since = threads, now
            return False
        return now - self._since >= seconds


def gloo_threads() -> tuple[GlooThread, ...]:
    """Return all of this process; those of whom the kernel does not tell are left out."""
    futex = FUTEX.get(os.uname().machine, ())
    found = []
    for number in _numbers():
        try:
            if _read(number, "comm") != NAME:
                continue
            call = _read(number, "syscall").split()
            spent = int(_read(number, "schedstat").split()[0])
        except (OSError, ValueError, IndexError):
            continue  # It has ended meanwhile, or this kernel does not tell.
        sleeps = call[0] in futex
        waits = sleeps and int(call[TIMEOUT_ARGUMENT], 16) != 0
        found.append(GlooThread(number, spent, sleeps, waits))
    return tuple(found)


def _numbers() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc/self/task"))
    except OSError:
        return []


def _read(thread: int, name: str) -> str:
    with open(f"/proc/self/task/{thread}/{name}", encoding="utf-8") as text:
        return text.read().strip()

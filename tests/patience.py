"""Waiting in tests: one deadline for everything, scaled by the speed of this machine.

Rule: tests wait for events through this module, have no timeouts of their own and measure no time.
A slow machine is the normal case: a late event is no failure; only an event that has not happened
after DEADLINE_S is. tests/tidy/test_patience.py enforces this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import psutil

T = TypeVar("T")

# Measured once by the first process of a test session; its children inherit the value.
SLOWNESS_VARIABLE = "ELASTIC_TEST_SLOWNESS"
# The seconds of `_work_s` on an idle machine with two cores.
QUIET_WORK_S = 0.35
SLOWNESS_MAX = 20.0
POLL_S = 0.01
POLL_S_MAX = 0.2
# A process of Python's that frees leaked shared memory, and ends with its parent.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def _work_s() -> float:
    """Return the seconds for two concurrent interpreters to start and import numpy and grpc."""
    began = time.perf_counter()
    commands = [[sys.executable, "-c", "import grpc, numpy"]] * 2
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
    return time.perf_counter() - began


def measured_slowness() -> float:
    """Return how much slower this machine is than an idle one with two cores, 1 to 20."""
    inherited = os.environ.get(SLOWNESS_VARIABLE)
    if inherited is None:
        slowness = min(SLOWNESS_MAX, max(1.0, _work_s() / QUIET_WORK_S))
        inherited = os.environ[SLOWNESS_VARIABLE] = f"{slowness:.1f}"
    return float(inherited)


SLOWNESS = measured_slowness()
DEADLINE_S = 90.0 * SLOWNESS
"""An event that has not happened by then never will; no test takes so long when it passes."""
HANG_S = 4 * DEADLINE_S
"""A test that runs for longer is ended, with all of its processes (tests/conftest.py)."""
BUSY_SHARE = 0.05
"""Share of one core: idle clusters use less; on a machine with ten times our load we get more."""
LONGEST_TIMES = 4
"""Busy processes get at most so many times the deadline: they may be in an endless loop."""

# Inherited by every process that a test starts, even if its parent has ended.
SESSION_MARK = "ELASTIC_TEST_SESSION"


class Deadline:
    """Distinguishes a hang from a slow test, as when other programs load the machine.

    Time alone is not enough: once it is over, the CPU use of the tests' processes decides.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = DEADLINE_S if seconds is None else seconds
        self._since = time.monotonic()
        self._last = self._since + LONGEST_TIMES * self._seconds
        self._used_s = 0.0
        self._is_first = True

    def passed(self) -> bool:
        """Return whether the time is over and the processes are idle, or the last limit is over."""
        now = time.monotonic()
        if now - self._since < self._seconds:
            return False
        used_s = cpu_s()
        # On the first call only the total use is known, no difference.
        is_busy = self._is_first or used_s - self._used_s > BUSY_SHARE * (now - self._since)
        self._is_first, self._used_s, self._since = False, used_s, now
        return now > self._last or not is_busy


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all processes that tests have started."""
    total = 0.0
    for process in [psutil.Process(), *started_here(os.environ.get(SESSION_MARK, ""))]:
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue  # It has ended.
    return total


def started_here(mark: str) -> list[psutil.Process]:
    """Find running processes that have our mark in their environment, or are descendants."""
    ours = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION_MARK) == mark:
                ours[process.pid] = process
        except psutil.Error:
            continue  # It has ended, or is another user's.
    return [process for _, process in sorted(ours.items()) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs: not a zombie, and not the resource tracker."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and RESOURCE_TRACKER not in " ".join(
            process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def wait_for(holds: Callable[[], T], what: str | Callable[[], str] = "") -> T:
    """Poll until `holds` returns something true, and return that.

    Args:
        holds: called every 10 ms, less often if it takes long itself.
        what: description for the error; a function if it includes the current state.
    """
    deadline = Deadline()
    while True:
        asked = time.monotonic()
        if found := holds():
            return found
        pause_s = _pause_s(asked)
        assert not deadline.passed(), _never(holds, what)
        time.sleep(pause_s)


async def wait_for_async(holds: Callable[[], T], what: str | Callable[[], str] = "") -> T:
    """Do the same on an event loop, without blocking it."""
    deadline = Deadline()
    while True:
        asked = time.monotonic()
        if found := holds():
            return found
        pause_s = _pause_s(asked)
        assert not deadline.passed(), _never(holds, what)
        await anyio.sleep(pause_s)


def _pause_s(asked: float) -> float:
    """Return the pause after a check that began then: checks get at most a tenth of the time.

    What is waited for needs the cores more than its observer.
    """
    return max(POLL_S, min(POLL_S_MAX, 9 * (time.monotonic() - asked)))


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Raise TimeoutError in a block that awaits something for longer than the deadline."""
    with anyio.fail_after(DEADLINE_S):
        yield


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread; fail if it does not end."""
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"{thread.name} did not end"


def is_set(event: threading.Event) -> bool:
    """Wait for an event; return whether it was set."""
    return event.wait(DEADLINE_S)


def _never(holds: object, what: str | Callable[[], str]) -> str:
    name = getattr(holds, "__qualname__", repr(holds))
    return f"waited in vain for {what() if callable(what) else what or name}"

"""How long tests wait: one deadline for everything, scaled by the speed of this machine.

Rule: tests wait for events through this module and know no seconds of their own; none measures
time. A slow machine is the normal case: what arrives late is no failure, and only what never
arrives is, after DEADLINE_S. tests/tidy/test_patience.py enforces it.
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

T = TypeVar("T")

# Measured once by the first process of a test session; its children inherit the answer.
SLOWNESS_VARIABLE = "ELASTIC_TEST_SLOWNESS"
# What `_work_s` takes on a quiet machine of two cores.
QUIET_WORK_S = 0.35
SLOWNESS_MAX = 20.0
POLL_S = 0.01


def _work_s() -> float:
    """Return the seconds that two interpreters take, started at once, to import numpy and grpc."""
    began = time.perf_counter()
    commands = [[sys.executable, "-c", "import grpc, numpy"]] * 2
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
    return time.perf_counter() - began


def measured_slowness() -> float:
    """Return how much slower this machine is than a quiet one of two cores, 1 to 20."""
    inherited = os.environ.get(SLOWNESS_VARIABLE)
    if inherited is None:
        slowness = min(SLOWNESS_MAX, max(1.0, _work_s() / QUIET_WORK_S))
        inherited = os.environ[SLOWNESS_VARIABLE] = f"{slowness:.1f}"
    return float(inherited)


SLOWNESS = measured_slowness()
DEADLINE_S = 90.0 * SLOWNESS
"""What has not happened by then never will; no test takes so long when it passes."""
HANG_S = 4 * DEADLINE_S
"""A test that is older is ended, with all of its processes (tests/conftest.py)."""


def wait_for(holds: Callable[[], T], what: str | Callable[[], str] = "") -> T:
    """Poll until `holds` returns something true, and return that.

    Args:
        holds: asked every 10 ms.
        what: is waited for, for the error; a function if it also tells how things stand.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, _never(holds, what)
        time.sleep(POLL_S)
    return found


async def wait_for_async(holds: Callable[[], T], what: str | Callable[[], str] = "") -> T:
    """Do the same on an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, _never(holds, what)
        await anyio.sleep(POLL_S)
    return found


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Raise TimeoutError in a block that awaits something for longer than the deadline."""
    with anyio.fail_after(DEADLINE_S):
        yield


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread."""
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"{thread.name} did not end"


def is_set(event: threading.Event) -> bool:
    """Wait for an event; return whether it came."""
    return event.wait(DEADLINE_S)


def _never(holds: object, what: str | Callable[[], str]) -> str:
    name = getattr(holds, "__qualname__", repr(holds))
    return f"waited in vain for {what() if callable(what) else what or name}"

"""Memory for snapshots: there for whoever comes back, and given back when nobody will."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from elastic.agent.arenas import Arenas
from elastic.core.world import ExitCause, ExitKind, JobId

pytestmark = pytest.mark.anyio
KILLED = ExitCause(ExitKind.SIGNAL, 9, "SIGKILL")
DONE = ExitCause(ExitKind.CODE, 0)
JOB = JobId("j1")


def descriptors() -> set[str]:
    """The memory that this process has."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "elastic-j" in target:
            found.add(name)
    return found


def keeps(path: str) -> bool:
    """Return whether what one process writes there is what another one reads."""
    Path(path).write_bytes(b"state")
    return Path(path).read_bytes() == b"state"


async def wait_for_none() -> None:
    with anyio.fail_after(10):
        while descriptors():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_workers_of_a_job_share_its_memory() -> None:
    arenas = Arenas()
    paths = arenas.give(JOB, 1)
    assert arenas.give(JOB, 2) == paths
    assert arenas.give(JobId("j2"), 3) != paths
    assert keeps(paths[0])
    arenas.close()
    assert not descriptors()


async def test_a_job_whose_workers_were_killed_finds_it_again() -> None:
    arenas = Arenas(kept_s=60)
    paths = arenas.give(JOB, 1)
    arenas.exited(1, KILLED)
    assert arenas.give(JOB, 2) == paths
    arenas.exited(7, KILLED)  # A spare that had no job.
    arenas.exited(2, DONE)
    assert not descriptors()


async def test_it_is_given_back_when_nobody_comes() -> None:
    arenas = Arenas(kept_s=0.01)
    arenas.give(JOB, 1)
    arenas.give(JOB, 2)
    arenas.exited(1, DONE)
    assert descriptors()
    arenas.exited(2, KILLED)
    await wait_for_none()

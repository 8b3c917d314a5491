"""Memory for snapshots: there for whoever comes back, and given back when nobody will."""

from __future__ import annotations

import os
import random
from pathlib import Path

import anyio
import pytest

from elastic.agent.arenas import Arenas
from elastic.agent.driver import AgentDriver, AgentSettings
from elastic.agent.processes import SpareCommand
from elastic.core.config import AgentConfig, JobSpec
from elastic.core.events.agent import ProcessExited, SendProcess
from elastic.core.facts import Entry, EntryKind, ExitCause, ExitKind, JobId, Node, NodeId, WorkerId
from elastic.core.messages import Assign
from elastic.runtime.access import Access
from elastic.runtime.clock import SystemClock
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
KILLED = ExitCause(ExitKind.SIGNAL, 9)
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
    with anyio.fail_after(DEADLINE_S):
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


async def test_a_process_that_is_gone_before_its_job_reaches_it_keeps_nothing(
    tmp_path: Path,
) -> None:
    """Its exit is in the queue already, when the machine still gives it the job."""
    node = Node(NodeId("n1"), 1, "localhost", 1)
    settings = AgentSettings(
        endpoints=("localhost:1",), access=Access(), node=node, devices=(), config=AgentConfig(),
        launch=SpareCommand(env={}), log_dir=tmp_path, event_log=None,
    )  # fmt: skip
    driver = AgentDriver(settings, clock=SystemClock(), draws=random.Random(0))
    entry = Entry(EntryKind.FUNCTION, "pickled")
    spec = JobSpec(job_id=JOB, name="r", entry=entry, min_workers=1, max_workers=1)
    try:
        driver.post(ProcessExited(7, DONE))
        driver._perform(SendProcess(7, Assign(WorkerId("n1/1"), spec, "localhost")))
        assert descriptors()
        driver._step(driver._events.popleft())
        assert not descriptors()
    finally:
        await driver._end()

"""What the chaos tests share: one cluster with warm processes, and driver scripts that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos.scripts import Script

NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="session")
def _shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One for all tests of this process: warm processes are what costs time."""
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(nodes=len(NODES), spares=2, directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(_shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Give three nodes of one slot each, as if new; jobs that a test has left are stopped."""
    running = _shared_cluster
    if running.coordinator is None or running.coordinator.poll() is not None:
        running.start_coordinator()
    for name in NODES:
        if running.agents[name].poll() is not None:
            running.start_node(name)
    running.wait_nodes(len(NODES))
    yield running
    running.stop_jobs()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """End what a failed test left."""
    started: list[Script] = []
    yield started
    for script in started:
        for process in script.processes():
            process.kill()
        script.process.wait()


@pytest.fixture
def start(scripts: list[Script], tmp_path: Path) -> Callable[..., Script]:
    def start_one(case: str, *launcher: str, **more: Path) -> Script:
        scripts.append(Script(case, tmp_path, *launcher, **more))
        return scripts[-1]

    return start_one

"""Three nodes with a slot each, for the tests of copies of a run's state on other nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster

NODES = ("n1", "n2", "n3")
NEVER = 1_000_000
STOPPED_S = 0.5
"""Long enough for a push to fill the sockets, shorter than what takes a node for lost."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give three nodes with a slot each, whose workers say what they go on from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_LOG_LEVEL", "info")
        with LocalCluster(nodes=3, directory=tmp_path_factory.mktemp("nodes")) as cluster:
            yield cluster


@pytest.fixture
def cluster(running: LocalCluster) -> Iterator[LocalCluster]:
    """Give it with all of its nodes, and end what a test leaves."""
    yield running
    running.stop_jobs()
    running.wait_nodes(3, restart=True)


def members(view: JobView) -> list[str]:
    """Return the nodes of the newest group, by rank."""
    return [str(m.node_id) for m in view.record.group.members] if view.record.group else []

"""A node that has a lost worker's rows dies at the moment when they are fetched from it.

The rows lie in two places then: with the node to which they were brought, and with the agent of the
node on which the worker died. Whichever is asked first is killed by a fault of its own, before it
gives a byte; the other one has to be asked. The oracle: the run ends with the bits of a calm one,
and storage has nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos import dying_holder
from tests.chaos.scripts import until
from tests.chaos.test_sharded_copies import COPY_EVERY, OPTIONS, Story, assert_same_bits

pytestmark = pytest.mark.timeout(500)

FIRST, SECOND, HOLDER, NEXT = "n1", "n2", "n3", "n4"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Give two nodes that train, and a third that holds their rows; two of them may die."""
    monkeypatch.setenv("ELASTIC_LOG_LEVEL", "info")
    monkeypatch.setenv(dying_holder.DEAD, str(tmp_path / "dead"))
    with LocalCluster(nodes=1, directory=tmp_path / "nodes") as found:
        for name in (SECOND, HOLDER):
            found.start_node(name, module=dying_holder.__name__)
        found.wait_nodes(3)
        found.client.cordon(HOLDER, reason="it holds copies")
        yield found


@pytest.mark.slow
def test_rows_come_from_another_node_when_the_first_dies_as_it_is_asked(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    calm = Story.of(cluster, "calm", tmp_path / "runs")
    calm.begin()
    expected = calm.end()
    story = Story.of(cluster, "killed", tmp_path / "runs", *OPTIONS)
    assert {*story.begin()[:2]} == {FIRST, SECOND}
    steps = story.wait_copies([FIRST, SECOND], after=COPY_EVERY)
    assert story.holder(SECOND) == HOLDER
    cluster.start_node(NEXT)
    cluster.wait_nodes(3)
    cluster.client.cordon(SECOND, reason="no worker is to come back here")
    pids = cluster.worker_pids(story.job_id)
    (victim,) = [pid for worker, pid in pids.items() if worker.startswith(f"{SECOND}/")]
    os.kill(victim, signal.SIGKILL)
    dead = tmp_path / "dead"
    until(dead.exists, "somebody to be asked for the rows")
    assert_same_bits(story.end(), expected)
    gone = [name for name in (SECOND, HOLDER) if cluster.agents[name].poll() is not None]
    assert [str(cluster.agents[name].pid) for name in gone] == [dead.read_text()]
    (left,) = {SECOND, HOLDER} - {*gone}
    assert f"_given job={story.job_id} source='{SECOND}'" in cluster.log_of(left)
    came = story.came_from()
    assert {(where, copies) for where, copies, _ in came} == {("memory", 1)}, came
    assert min(at for _, _, at in came) >= steps

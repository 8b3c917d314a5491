"""A cloud takes a machine away: it is left in time, nothing is done twice, the bits stay the same.

The cloud is a metadata server on loopback that speaks AWS's protocol; all else is real.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.core.facts import ENDED, NodePhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.shared import assert_nothing_done_twice, diaries, with_diary
from tests.harness.chaos_jobs import ChaosJob, chaos_job
from tests.metadata_server import Cloud, serving
from tests.patience import DEADLINE_S, wait_for


def take(cloud: Cloud, within_s: float) -> None:
    """Let AWS say when the machine is gone."""
    moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=within_s)
    cloud.action = json.dumps({"action": "terminate", "time": moment.isoformat()})


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Give the cloud that agents find in their environment."""
    cloud = Cloud()
    with serving(cloud) as endpoint:
        address = f"http://{endpoint.host}:{endpoint.port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
        yield cloud


@pytest.fixture
def cluster(cloud: Cloud, tmp_path: Path) -> Iterator[LocalCluster]:
    """Give two nodes, of which the second is a machine of the cloud."""
    with LocalCluster(nodes=0, directory=tmp_path / "cluster") as running:
        running.start_node("n1")
        running.start_node("n2", "--notices", "aws")
        running.wait_nodes(2)
        yield running


def job_of(directory: Path, *, low: int, save_every: int = 0) -> ChaosJob:
    directory.mkdir()
    job = chaos_job("steps", directory.name, workers=2, directory=directory, save_every=save_every)
    job = with_diary(job)
    # Slow steps: the run that it is compared with has as many, and does not pause.
    args = tuple("0.05" if arg == "0.01" else arg for arg in job.spec.entry.args)
    entry = replace(job.spec.entry, args=args)
    return replace(job, spec=replace(job.spec, entry=entry, min_workers=low))


def trains_on(*nodes: str) -> Any:
    """Return a condition: a group on these nodes has done a few steps."""

    def holds(view: JobView) -> bool:
        group = view.record.group
        return (
            group is not None
            and {m.node_id for m in group.members} == set(nodes)
            and sum(w.steps >= 3 and w.rank >= 0 for w in view.workers) == len(nodes)
        )

    return holds


def wait_gone(cluster: LocalCluster, name: str) -> None:
    """Wait until the node's agent has ended."""
    assert cluster.agents[name].wait(DEADLINE_S) == 75, cluster.log_of(name)[-2000:]


def wait_draining(cluster: LocalCluster) -> None:
    """Wait until the coordinator has heard of the notice."""
    wait_for(lambda: any(node.phase is NodePhase.DRAINING for node in cluster.view().nodes))


@pytest.mark.slow
def test_a_machine_that_the_cloud_takes_is_left_in_time_and_replaced(
    cloud: Cloud, cluster: LocalCluster, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "job", low=1)
    job_id = cluster.submit(job.spec)
    cluster.wait(job_id, trains_on("n1", "n2"), "two workers")
    cluster.start_node("n3")
    cluster.wait_nodes(3)
    take(cloud, within_s=60)
    cluster.wait(job_id, trains_on("n1", "n3"), "another node in its place")
    wait_gone(cluster, "n2")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    assert_nothing_done_twice(job)
    record = view.record
    assert (record.preemptions, record.failures, record.losses) == (1, 0, 0)
    seen = [line for line in diaries(job) if "nodes" in line]
    assert seen, "get_preemption_info said nothing"
    assert {line["reason"] for line in seen} == {"AWS spot instance-action terminate"}
    assert {tuple(line["nodes"]) for line in seen} == {("n2",)}
    assert all(0 < line["deadline_s"] <= 60 for line in seen)


@pytest.mark.slow
def test_where_no_other_node_is_there_a_checkpoint_comes_before_the_deadline(
    cloud: Cloud, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Both ranks see the notice, and training goes on to the end; what lived on has the state."""
    job = job_of(tmp_path / "job", low=2, save_every=1_000_000)
    job_id = cluster.submit(job.spec)
    cluster.wait(job_id, trains_on("n1", "n2"), "two workers")
    take(cloud, within_s=8)
    view = cluster.wait(job_id, lambda v: bool(v.record.checkpoints), "a checkpoint")
    assert view.record.phase.value == "running", "it came before the deadline"
    wait_gone(cluster, "n2")
    cluster.start_node("n3")
    cluster.wait(job_id, trains_on("n1", "n3"), "another node")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    assert (view.record.preemptions, view.record.failures, view.record.losses) == (1, 0, 0)
    assert {line["rank"] for line in diaries(job) if "nodes" in line} == {0, 1}


@pytest.mark.slow
def test_a_machine_that_dies_before_its_time_is_charged_to_nobody(
    cloud: Cloud, cluster: LocalCluster, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "job", low=2)
    job_id = cluster.submit(job.spec)
    cluster.wait(job_id, trains_on("n1", "n2"), "two workers")
    take(cloud, within_s=60)
    wait_draining(cluster)
    cluster.kill_node("n2")
    cluster.start_node("n3")
    cluster.wait(job_id, trains_on("n1", "n3"), "another node")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    assert (view.record.preemptions, view.record.failures, view.record.losses) == (1, 0, 0)

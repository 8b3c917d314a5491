"""Real processes that stand still: a main thread, or a whole machine.

What is asserted about time is generous, because the machine may be busy; bench/hangs.py measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.view import JobView
from elastic.core.world import Entry, EntryKind, JobId, JobPhase
from elastic.testing.local_cluster import LocalCluster

SCRIPT = Path(__file__).with_name("waiting.py")
HANG_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes with one worker each."""
    with LocalCluster(nodes=3, directory=tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The directory in which the script finds its orders."""
    directory = tmp_path / "orders"
    directory.mkdir()
    return directory


def begin(cluster: LocalCluster, orders: Path, **changes: object) -> tuple[str, JobView]:
    """Run the script on three nodes; return when all of them have made a step."""
    cluster.wait_nodes(3)
    entry = Entry(EntryKind.SCRIPT, str(SCRIPT), args=("--orders", str(orders)))
    spec = JobSpec(
        job_id=JobId(""), name=orders.parent.name, entry=entry, min_workers=1, max_workers=3,
        run_path=str(orders.parent / "run"), hang_timeout_s=HANG_TIMEOUT_S, **changes,
    )  # fmt: skip
    job_id = cluster.submit(spec)
    view = cluster.wait(job_id, lambda view: size_of(view) == 3, "three workers")
    cluster.wait_note("first_step", job_id, generation=view.record.generation)
    return job_id, view


def size_of(view: JobView) -> int:
    """Return how many train."""
    is_running = view.record.phase is JobPhase.RUNNING and view.record.group is not None
    return len(view.record.group.members) if is_running and view.record.group else 0


def finish(cluster: LocalCluster, job_id: str, orders: Path) -> None:
    """Let the job end well."""
    (orders / "finish").touch()
    view = cluster.wait(job_id, lambda view: view.record.phase is not JobPhase.RUNNING, "the end")
    assert view.record.phase in (JobPhase.SUCCEEDED, JobPhase.STOPPING), view.reason
    cluster.wait(job_id, lambda view: not view.workers, "the end of all workers")
    assert cluster.job(job_id).record.phase is JobPhase.SUCCEEDED
    assert cluster.job(job_id).record.failures == 0


def test_a_rank_that_hangs_is_named_and_killed_and_the_others_go_on(
    cluster: LocalCluster, orders: Path
) -> None:
    job_id, before = begin(cluster, orders)
    culprit = next(w for w in before.workers if w.rank == 1)
    began = time.monotonic()
    (orders / "hang-1").touch()
    hung = cluster.wait_note("worker_hung", job_id, worker=culprit.report.worker_id, rank=1)
    assert float(dict(hung.note.fields)["seconds"]) >= HANG_TIMEOUT_S
    cluster.wait_note("first_step", job_id, generation=before.record.generation + 1)
    assert time.monotonic() - began < HANG_TIMEOUT_S + 60
    after = cluster.worker_pids(job_id)
    for worker in before.workers:
        if worker is not culprit:
            assert after[str(worker.report.worker_id)] == worker.report.pid
            assert "all_reduce" in log_of(cluster, orders.parent.name, str(worker.report.worker_id))
    assert "hang_for_ever" in log_of(cluster, orders.parent.name, str(culprit.report.worker_id))
    finish(cluster, job_id, orders)


def log_of(cluster: LocalCluster, job: str, worker_id: str) -> str:
    """Return what a worker printed, also one that is gone."""
    node, _, serial = worker_id.partition("/")
    files = (cluster.directory / "logs").rglob("*")
    mine = [
        file for file in files if file.parent.name == job and file.name == f"{node}-{serial}.log"
    ]
    return "".join(file.read_text() for file in mine)


def test_a_rank_that_is_slow_is_left_alone(cluster: LocalCluster, orders: Path) -> None:
    job_id, before = begin(cluster, orders)
    order = orders / "slow-1"
    order.touch()
    finish(cluster, job_id, orders)
    assert not order.exists()
    assert cluster.job(job_id).record.generation == before.record.generation


def test_a_machine_that_stands_still_is_left_behind_and_comes_back(
    cluster: LocalCluster, orders: Path
) -> None:
    job_id, before = begin(cluster, orders)
    victim = str(next(w for w in before.workers if w.rank == 2).node_id)
    cluster.stop_node(victim)
    try:
        generation = before.record.generation + 1
        cluster.wait_note("first_step", job_id, generation=generation)
        assert size_of(cluster.job(job_id)) == 2
    finally:
        cluster.stop_node(victim, stopped=False)
    cluster.wait_nodes(3)
    finish(cluster, job_id, orders)

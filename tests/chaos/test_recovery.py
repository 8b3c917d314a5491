"""Real processes, real signals: whatever is killed, the job ends with the right epochs.

Every test checks the same three things: the job succeeds, its last report has counted every
epoch exactly once, and processes that nobody touched keep their pids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.view import JobView
from elastic.core.world import Entry, EntryKind, JobId, JobPhase, NodePhase
from elastic.testing.chaos_jobs import JOBS
from elastic.testing.local_cluster import LocalCluster

SCRIPT = JOBS / "epochs_job.py"
EPOCHS = 5
"""At least so many; a job goes on until the test has seen what it came for."""


def job(tmp_path: Path, *, low: int = 1, high: int = 3) -> JobSpec:
    """Return the job that counts epochs until `assert_counted` lets it end."""
    args = ("--epochs", str(EPOCHS), "--finish", str(tmp_path / "finish"))
    return JobSpec(
        job_id=JobId(""),
        name=tmp_path.name,
        entry=Entry(EntryKind.SCRIPT, str(SCRIPT), args=args),
        min_workers=low,
        max_workers=high,
        run_path=str(tmp_path / "run"),
        num_to_keep=2,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One cluster for all tests: warm processes are what costs time."""
    with LocalCluster(nodes=3, directory=tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(shared: LocalCluster) -> Iterator[LocalCluster]:
    """Give the cluster with its three nodes up, SQLite, one worker each; end what a test left."""
    for name, agent in shared.agents.items():
        if agent.poll() is not None and name in ("n1", "n2", "n3"):
            shared.start_node(name)
    shared.wait_nodes(3)
    yield shared
    shared.stop_jobs()


def trains_with(size: int, generation: int = 1) -> object:
    """Return a condition: a group of this size trains, in this generation or a later one."""

    def holds(view: JobView) -> bool:
        group = view.record.group
        return (
            view.record.phase is JobPhase.RUNNING
            and group is not None
            and len(group.members) == size
            and group.generation >= generation
            and bool(view.record.metrics)
        )

    return holds


def pids_of(view: JobView) -> dict[str, int]:
    """Return the pid of every worker."""
    return {str(w.report.worker_id): w.report.pid for w in view.workers}


def assert_counted(cluster: LocalCluster, job_id: str, tmp_path: Path) -> JobView:
    """The job may end now: it succeeds, and counted every epoch exactly once."""
    (tmp_path / "finish").touch()
    view = cluster.wait(
        job_id, lambda v: v.record.phase.value in ("succeeded", "failed", "stopped"), "the end"
    )
    failure = view.record.failure
    assert view.record.phase is JobPhase.SUCCEEDED, failure.traceback if failure else view.reason
    last = json.loads(view.record.metrics)
    assert last["epoch"] + 1 >= EPOCHS
    assert last["count"] == last["epoch"] + 1
    # Two are kept; one more may lie there from a member that was killed before it could tidy up.
    kept = [Path(c.path) for c in view.record.checkpoints]
    assert all((path / "_COMMITTED").is_file() for path in kept)
    assert len(kept) == 2
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) <= 4
    return view


def recovery_s(cluster: LocalCluster, before: JobView, began_ns: int) -> float:
    """Return the seconds from the kill to the end of the next group's first step."""
    job_id, generation = before.record.spec.job_id, before.record.generation + 1
    note = cluster.wait_note("first_step", job_id, generation=generation)
    return (int(dict(note.note.fields)["unix_ns"]) - began_ns) / 1e9


def assert_survivors_kept(before: dict[str, int], view: JobView, lost: set[str]) -> None:
    """Processes that nobody touched are the same ones as before."""
    after = pids_of(view)
    for worker_id, pid in before.items():
        if worker_id not in lost:
            assert after.get(worker_id) == pid, f"{worker_id} had pid {pid}, now {after}"


def test_a_killed_worker_is_survived_by_the_others(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    victim = sorted(before)[1]
    began_ns = time.time_ns()
    os.kill(before[victim], signal.SIGKILL)
    print(f"worker kill to next step: {recovery_s(cluster, view, began_ns):.3f} s")
    assert_survivors_kept(before, cluster.job(job_id), {victim})
    # The spare takes the slot and joins at a boundary.
    cluster.wait(job_id, trains_with(3, generation=view.record.generation + 2))
    assert_counted(cluster, job_id, tmp_path)


def test_a_dead_node_is_survived_by_the_others(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    began_ns = time.time_ns()
    cluster.kill_node("n2")
    print(f"node kill to next step: {recovery_s(cluster, view, began_ns):.3f} s")
    view = cluster.wait(job_id, trains_with(2, generation=view.record.generation + 1))
    lost = {w for w in before if w.startswith("n2/")}
    assert_survivors_kept(before, view, lost)
    assert_counted(cluster, job_id, tmp_path)


def test_workers_die_with_their_agent(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    orphan = next(pid for worker, pid in before.items() if worker.startswith("n3/"))
    began_ns = time.time_ns()
    cluster.signal_node("n3", signal.SIGKILL)
    cluster.agents["n3"].wait()
    print(f"agent kill to next step: {recovery_s(cluster, view, began_ns):.3f} s")
    assert not is_running(orphan)
    assert_counted(cluster, job_id, tmp_path)


def test_a_stopped_worker_is_replaced(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    victim = sorted(before)[2]
    began_ns = time.time_ns()
    os.kill(before[victim], signal.SIGSTOP)
    print(f"worker stop to next step: {recovery_s(cluster, view, began_ns):.3f} s")
    assert_survivors_kept(before, cluster.job(job_id), {victim})
    assert_counted(cluster, job_id, tmp_path)


def test_a_stopped_agent_is_given_up_and_its_worker_fenced(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    began_ns = time.time_ns()
    cluster.signal_node("n2", signal.SIGSTOP)
    print(f"agent stop to next step: {recovery_s(cluster, view, began_ns):.3f} s")
    cluster.signal_node("n2", signal.SIGCONT)
    assert_counted(cluster, job_id, tmp_path)


def test_a_coordinator_that_is_killed_and_restarted_disturbs_nobody(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    check_coordinator_restart(cluster, tmp_path)


def test_a_coordinator_on_etcd_that_is_killed_and_restarted_disturbs_nobody(
    tmp_path: Path,
) -> None:
    etcd_server = pytest.importorskip("tests.etcd_server")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(etcd_server.EtcdServer())
        running = stack.enter_context(
            LocalCluster(nodes=3, directory=tmp_path / "cluster", store=f"etcd://{server.endpoint}")
        )
        check_coordinator_restart(running, tmp_path)


def check_coordinator_restart(cluster: LocalCluster, tmp_path: Path) -> None:
    """Kill the coordinator under a running job; the restarted one adopts the job."""
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before, generation = pids_of(view), view.record.generation
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.wait_nodes(3)
    view = cluster.wait(job_id, lambda v: len(v.workers) == 3 and all(pids_of(v).values()))
    assert view.record.generation == generation
    assert pids_of(view) == before
    view = assert_counted(cluster, job_id, tmp_path)
    assert view.record.generation == generation


def test_a_node_that_joins_takes_part(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path, high=4))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    cluster.start_node("n4")
    view = cluster.wait(job_id, trains_with(4, generation=view.record.generation + 1))
    assert_survivors_kept(before, view, set())
    assert_counted(cluster, job_id, tmp_path)
    cluster.kill_node("n4")


def test_a_drained_node_leaves_at_a_boundary_and_ends(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = cluster.submit(job(tmp_path))
    view = cluster.wait(job_id, trains_with(3))
    before = pids_of(view)
    cluster.signal_node("n1", signal.SIGTERM)
    assert cluster.agents["n1"].wait(60) == 75
    view = cluster.wait(job_id, trains_with(2, generation=view.record.generation + 1))
    assert_survivors_kept(before, view, {w for w in before if w.startswith("n1/")})
    nodes = {str(n.node.node_id): n.phase for n in cluster.view().nodes}
    assert nodes["n1"] is NodePhase.LEFT
    # Nothing was done twice: the second generation begins after what the first one reported.
    epochs = epochs_of(tmp_path)
    assert epochs == sorted(set(epochs))
    assert_counted(cluster, job_id, tmp_path)


def test_nothing_is_left_running_after_a_job(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit(job(tmp_path))
    pids = pids_of(cluster.wait(job_id, trains_with(3)))
    assert_counted(cluster, job_id, tmp_path)
    assert not [pid for pid in pids.values() if is_running(pid)]


def epochs_of(tmp_path: Path) -> list[int]:
    """Return the epochs that rank 0 reported, in order."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["epoch"] for line in lines]


def is_running(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

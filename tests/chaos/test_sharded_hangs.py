"""Sharded models of which one rank stands still: it is named, replaced, and the bits are the same.

The others wait inside `fully_shard`, in code of torch's that knows nothing of us. The oracle is
that of `test_sharded_runs`. Patience is generous, because the machine may be busy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.core.facts import JobId
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.test_sharded_runs import WORKERS, Job, end_of, saved, trains

HANG_TIMEOUT_S = 3.0
EPOCHS = 3
SAME = ("epochs", "world_size", "weights", "optimizer", "scheduler")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give one node with room for three workers, whose memory survives them."""
    directory = tmp_path_factory.mktemp("hangs")
    with LocalCluster(nodes=1, workers_per_node=3, spares=3, directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give the last report of a run that nobody disturbs."""
    job = Job.of("calm", tmp_path_factory.mktemp("calm"), "--epochs", str(EPOCHS))
    return end_of(cluster, cluster.submit(job.spec))


def logs_of(cluster: LocalCluster, job: str) -> dict[str, str]:
    """Return what each worker of a job printed, by worker; also of those that are gone."""
    files = (cluster.directory / "logs").rglob(f"{job}/*.log")
    return {file.stem.replace("-", "/"): file.read_text() for file in files}


def notes_of(cluster: LocalCluster, job_id: JobId, name: str) -> list[dict[str, str]]:
    """Return the fields of all events of this name."""
    notes = [timed.note for timed in list(cluster.notes)]
    return [dict(note.fields) for note in notes if (note.job_id, note.name) == (job_id, name)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [("forward-1", "backward-2"), pytest.param(("loop-1",), marks=pytest.mark.slow)],
    ids=["inside", "between"],
)
def test_a_rank_that_hangs_is_named_and_the_others_go_on(
    cluster: LocalCluster, undisturbed: dict[str, Any], tmp_path: Path, places: tuple[str, ...]
) -> None:
    orders, name = tmp_path / "orders", f"hangs-{places[0]}"
    orders.mkdir()
    for place in places:
        (orders / place).touch()
    job = Job.of(name, tmp_path, "--epochs", str(EPOCHS), "--orders", str(orders))
    job_id = cluster.submit(replace(job.spec, hang_timeout_s=HANG_TIMEOUT_S))
    disturbed = end_of(cluster, job_id)
    assert [disturbed[key] for key in SAME] == [undisturbed[key] for key in SAME]
    assert not list(orders.iterdir())
    hung = notes_of(cluster, job_id, "worker_hung")
    assert [note["epoch"] for note in hung] == [place[-1] for place in places]
    assert all(float(note["seconds"]) >= HANG_TIMEOUT_S for note in hung)
    logs, culprits = logs_of(cluster, name), [note["worker"] for note in hung]
    assert all("in hang_for_ever" in logs[worker] for worker in culprits)
    waited = [text for worker, text in logs.items() if worker not in culprits]
    assert any("torch/distributed/fsdp" in text for text in waited)
    assert cluster.job(job_id).record.failures == 0


@pytest.mark.slow
def test_of_two_replicas_only_the_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """Its partner seems to stand too, and is waited for by the other replica, as the one it is."""
    orders = tmp_path / "orders"
    with LocalCluster(nodes=1, workers_per_node=4, spares=4, directory=tmp_path) as cluster:
        ends = []
        for name in ("calm", "hung"):
            job = Job.of(name, tmp_path / name, "--epochs", "2", "--strategy", "hsdp",
                         "--orders", str(orders))  # fmt: skip
            spec = replace(job.spec, min_workers=4, max_workers=4, hang_timeout_s=HANG_TIMEOUT_S)
            ends.append((end_of(cluster, job_id := cluster.submit(spec)), job_id))
            orders.mkdir(exist_ok=True)
            (orders / "loop-1").touch()
        (calm, _), (hung, job_id) = ends
        assert [hung[key] for key in SAME] == [calm[key] for key in SAME]
        named = [note["worker"] for note in notes_of(cluster, job_id, "worker_hung")]
        logs = logs_of(cluster, "hung")
        assert [worker for worker, text in logs.items() if "in hang_for_ever" in text] == named
        assert len(named) == 1


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_replaced(
    cluster: LocalCluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = Job.of("stopped", tmp_path, "--epochs", str(EPOCHS), "--pace", "0.05")
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, trains(WORKERS, 0), "three workers")
    view = cluster.wait(job_id, lambda v: bool(saved(v)), "a checkpoint")
    survivors = {w.report.worker_id: w.report.pid for w in view.workers}
    victim = sorted(survivors)[1]
    os.kill(survivors.pop(victim), signal.SIGSTOP)
    generation = view.record.generation
    later = cluster.wait(job_id, lambda v: v.record.generation > generation, "the next group")
    assert survivors.items() <= {w.report.worker_id: w.report.pid for w in later.workers}.items()
    disturbed = end_of(cluster, job_id)
    assert [disturbed[key] for key in SAME] == [undisturbed[key] for key in SAME]
    gone = notes_of(cluster, job_id, "worker_gone")[0]  # The rest are those that it ended with.
    assert (gone["worker"], "SIGSTOP" in gone["cause"]) == (victim, True)

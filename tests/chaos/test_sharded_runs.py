"""Sharded models (`fully_shard`) on real processes: killed, resumed, and ending with the weights.

The oracle is a run of the same model that is not sharded, in one process: weights are close to its
own, every sample was trained with exactly once in each epoch (the script checks that), and two runs
at the same world size end with the same bits, however often one of them was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.core.config import JobSpec
from elastic.core.facts import ENDED, Entry, EntryKind, JobId, JobPhase, WorkerPhase
from elastic.core.view import JobView
from elastic.storage.run_directory import RunDirectory
from elastic.storage.verify import verify
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import ENDLESS, JOBS
from tests.patience import DEADLINE_S

SCRIPT = JOBS / "sharded_job.py"
EPOCHS = 4
STEPS_MIN = 3
WORKERS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give one node with room for three workers, whose memory survives them."""
    directory = tmp_path_factory.mktemp("sharded")
    with LocalCluster(nodes=1, workers_per_node=3, spares=3, directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, torch.Tensor]]:
    """Give a function that trains so many epochs without shards, in one process."""
    folder = tmp_path_factory.mktemp("plain")

    def weights(epochs: int) -> dict[str, torch.Tensor]:
        file = folder / f"{epochs}.pt"
        if not file.exists():
            command = [sys.executable, str(SCRIPT), "--strategy", "ddp", "--epochs", str(epochs)]
            subprocess.run(
                ["env", "OMP_NUM_THREADS=1", *command, "--weights", str(file)],
                check=True,
                capture_output=True,
                timeout=DEADLINE_S,
            )
        found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
        return found

    return weights


@dataclass
class Job:
    """A job that trains a sharded model."""

    spec: JobSpec
    finish: Path
    weights: Path

    @staticmethod
    def of(name: str, folder: Path, *options: str, workers: int = WORKERS) -> Job:
        """Describe a job that takes a checkpoint every three steps."""
        folder.mkdir(exist_ok=True)
        finish, weights = folder / "finish", folder / "weights.pt"
        args = ("--save-every", "3", "--weights", str(weights), "--finish", str(finish), *options)
        spec = JobSpec(
            job_id=JobId(""),
            name=name,
            entry=Entry(EntryKind.SCRIPT, str(SCRIPT), args=args),
            min_workers=workers,
            max_workers=WORKERS,
            run_path=str(folder / "run"),
            num_to_keep=2,
        )
        return Job(spec, finish, weights)


def end_of(cluster: LocalCluster, job_id: JobId) -> dict[str, Any]:
    """Wait until a job has succeeded and its processes are gone; return its last report."""
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    trace = view.record.failure.traceback if view.record.failure else ""
    assert view.record.phase is JobPhase.SUCCEEDED, (view.reason, trace)
    cluster.wait(job_id, lambda v: not v.workers, "its processes' end")
    found: dict[str, Any] = json.loads(view.record.metrics)
    return found


def trains(size: int, after: int) -> Callable[[JobView], bool]:
    """Return whether a group of this size, later than this one, has done a few steps."""

    def holds(view: JobView) -> bool:
        group = view.record.group
        if group is None or view.record.generation <= after or len(group.members) != size:
            return False
        in_it = [w for w in view.workers if w.report.generation == group.generation]
        training = [w for w in in_it if w.report.phase is WorkerPhase.TRAINING]
        return len(training) == size and all(w.steps >= STEPS_MIN for w in training)

    return holds


def assert_close(job: Job, expected: dict[str, torch.Tensor]) -> None:
    """Compare the weights that a job has left with others."""
    found = torch.load(job.weights, weights_only=True)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5), name


def saved(view: JobView) -> list[str]:
    """Return the paths of recorded automatic checkpoints, oldest first."""
    return [record.path for record in view.record.checkpoints if record.automatic]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("own", marks=pytest.mark.slow)])
def test_a_shard_that_is_lost_comes_back_from_the_nodes_memory(
    cluster: LocalCluster, plain: Any, tmp_path: Path, strategy: str
) -> None:
    """A worker dies with its rows; the others go on, and a spare joins at a boundary."""
    options = ("--epochs", str(ENDLESS), "--pace", "0.01", "--strategy", strategy)
    job = Job.of(f"lost-{strategy}", tmp_path, *options)
    job_id = cluster.submit(replace(job.spec, min_workers=1))
    view = cluster.wait(job_id, trains(WORKERS, 0), "three workers")
    cluster.wait(job_id, lambda v: bool(saved(v)), "a checkpoint")
    survivors = {w.report.worker_id: w.report.pid for w in view.workers}
    victim = sorted(survivors)[1]
    os.kill(survivors.pop(victim), signal.SIGKILL)
    view = cluster.wait(job_id, trains(WORKERS, view.record.generation), "three workers again")
    pids = {w.report.worker_id: w.report.pid for w in view.workers}
    assert survivors.items() <= pids.items()
    # Until a view is as new as the folder: two later ones take the place of what it names.
    cluster.wait(job_id, lambda v: verify(saved(v)[-1]).is_whole, "a whole checkpoint")
    job.finish.touch()
    report = end_of(cluster, job_id)
    assert_close(job, plain(report["epochs"]))


@pytest.mark.slow
def test_the_same_bits_after_everything_was_killed(
    cluster: LocalCluster, plain: Any, tmp_path: Path
) -> None:
    """At the same world size; then storage is read by groups of other sizes."""
    calm = Job.of("calm", tmp_path / "calm", "--epochs", str(EPOCHS))
    undisturbed = end_of(cluster, cluster.submit(calm.spec))
    assert_close(calm, plain(EPOCHS))
    job = Job.of("killed", tmp_path / "killed", "--epochs", str(EPOCHS), "--pace", "0.02")
    job_id = cluster.submit(job.spec)
    known: set[str] = set()
    for _ in range(2):
        view = cluster.wait(job_id, lambda v, k=known: not set(saved(v)) <= k, "a checkpoint")  # type: ignore[misc]
        known = known | set(saved(view))
        generation = view.record.generation
        for worker in view.workers:
            os.kill(worker.report.pid, signal.SIGKILL)
        cluster.wait(job_id, lambda v, g=generation: v.record.generation > g, "the next group")  # type: ignore[misc]
    disturbed = end_of(cluster, job_id)
    for name in ("epochs", "world_size", "weights", "optimizer", "scheduler"):
        assert disturbed[name] == undisturbed[name], name


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        pytest.param("fsdp", "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("ddp", "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("own", "ddp", 1, marks=pytest.mark.slow),
    ],
)
def test_another_world_goes_on_from_storage(
    cluster: LocalCluster, plain: Any, tmp_path: Path, before: str, after: str, workers: int
) -> None:
    """The nodes' memory knows nothing of the second job, which may have other shards, or none."""
    options = ("--epochs", str(ENDLESS), "--pace", "0.01", "--strategy", before)
    first = Job.of("first", tmp_path, *options)
    job_id = cluster.submit(first.spec)
    cluster.wait(job_id, lambda v: len(saved(v)) > 1, "two checkpoints")
    cluster.client.stop(job_id, "its checkpoints are all that is wanted")
    cluster.wait(job_id, lambda v: not v.workers, "its processes' end")
    run = RunDirectory(str(tmp_path / "run"))
    begun = int(run.committed()[-1][1].about("steps", 0))
    job = Job.of("second", tmp_path, "--epochs", str(EPOCHS), "--strategy", after, workers=workers)
    report = end_of(cluster, cluster.submit(replace(job.spec, max_workers=workers)))
    assert report["world_size"] == workers
    assert_close(job, plain(report["epochs"]))
    # It has gone on, and not begun anew: its first own checkpoint is of a later step.
    assert min(int(one.about("steps")) for _, one in run.committed()) > begun

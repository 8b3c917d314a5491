"""One hash for every world size and every history: the step engine on real processes.

The oracle is a run of the same script in one process. Its weights and optimizer state must be
met bit by bit by every run on a cluster; the script itself checks that every sample was trained
with exactly once in each epoch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.core.facts import ENDED, WorkerPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos import Chaos, draw_faults
from tests.harness.chaos_jobs import ChaosJob, chaos_job, with_arguments

KILLS = 6
STEPS_MIN = 3
"""A group counts as training once each of its members has done so many steps in it."""
SIZES = {"n1": 3, "n2": 2, "n3": 2, "n4": 1, "n5": 4}
"""Workers of each node: 8 with the first four, and 7 with the last three."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give a cluster of three nodes with one worker each.

    The kills below hit each node twice, one a second. A replacement that must import torch first
    may come later than that, and a kill that would leave nobody is left out: hence two spares.
    """
    with LocalCluster(nodes=3, spares=2, directory=tmp_path_factory.mktemp("three")) as running:
        yield running


def job_of(model: str, workers: int, directory: Path, save_every: int = 0) -> ChaosJob:
    """Return a job that trains this model until its finish file is there."""
    directory.mkdir()
    job = chaos_job(
        "steps", directory.name, workers=workers, directory=directory, save_every=save_every
    )
    # 1,000 samples in steps of 32: the last step of an epoch has 8, one for each micro-batch.
    return with_arguments(job, "--model", model, "--width", "32")


def train_with(size: int, view: JobView) -> bool:
    """Return whether a group of this size has done a few steps."""
    group = view.record.group
    return (
        group is not None
        and len(group.members) == size
        and all(
            w.steps >= STEPS_MIN
            for w in view.workers
            if w.report.phase is WorkerPhase.TRAINING and w.report.generation == group.generation
        )
        and sum(w.report.phase is WorkerPhase.TRAINING for w in view.workers) == size
    )


def start(cluster: LocalCluster, name: str) -> None:
    """Start a node with its slots, all of them warm."""
    number = str(SIZES[name])
    cluster.start_node(name, "--workers", number, "--spares", number)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param("mlp", marks=SLOW), "cnn", pytest.param("gpt", marks=SLOW)]
)
def test_a_history_of_8_5_3_7_workers_ends_with_the_same_bits(tmp_path: Path, model: str) -> None:
    """Nodes die and join; a group that loses three of eight members goes on with five."""
    with LocalCluster(nodes=0, directory=tmp_path / "cluster") as cluster:
        for name in ("n1", "n2", "n3", "n4"):
            start(cluster, name)
        cluster.wait_nodes(4)
        job = job_of(model, 8, tmp_path / model)
        job_id = cluster.submit(job.spec)
        cluster.wait(job_id, lambda v: train_with(8, v), "8 workers")
        cluster.kill_node("n1")
        view = cluster.wait(job_id, lambda v: train_with(5, v), "5 workers")
        survivors = {w.report.worker_id: w.report.pid for w in view.workers}
        cluster.kill_node("n2")
        cluster.wait(job_id, lambda v: train_with(3, v), "3 workers")
        start(cluster, "n5")
        view = cluster.wait(job_id, lambda v: train_with(7, v), "7 workers")
        pids = {w.report.worker_id: w.report.pid for w in view.workers}
        kept = {w: pid for w, pid in survivors.items() if not w.startswith("n2/")}
        assert kept.items() <= pids.items()
        job.finish.touch()
        view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
        assert job.check(view)


@pytest.mark.slow
def test_kills_amid_large_messages_replace_nobody_else(three: LocalCluster, tmp_path: Path) -> None:
    """Members pass on 30 MB in a step; gloo forgets who has got a part of it."""
    job = job_of("mlp", 3, tmp_path / "large")
    job = with_arguments(job, "--width", "100000", "--samples", "256", "--pace", "0")
    job_id = three.submit(job.spec)
    view = three.wait(job_id, lambda v: train_with(3, v), "three workers")
    for number in range(KILLS):
        before = three.worker_pids(job_id)
        victim = sorted(before)[number % 3]
        os.kill(before.pop(victim), signal.SIGKILL)
        generation = view.record.generation
        # Mostly one without the victim, and one with whoever replaces it.
        view = three.wait(
            job_id, lambda v, g=generation: v.record.generation > g and train_with(3, v), "all"
        )
        assert before.items() <= three.worker_pids(job_id).items()
    job.finish.touch()
    view = three.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)


@pytest.mark.slow
def test_whatever_a_seed_draws_changes_nothing(
    three: LocalCluster, tmp_path: Path, fresh_seed: int
) -> None:
    job = job_of("cnn", 3, tmp_path / "faults")
    outcome = Chaos(three, job).run(draw_faults(seed=fresh_seed, events=10, every_s=1.0))
    assert outcome.faults

"""Datasets that can only be iterated over: one hash for every world size and every history.

The oracle is a run of the same script in one process; the script itself checks that every sample
was trained with exactly once in each epoch.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.core.facts import ENDED, WorkerPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos import Chaos, draw_kills
from tests.harness.chaos_jobs import ChaosJob, chaos_job, with_arguments, with_script

SCRIPT = Path(__file__).with_name("streams_job.py")
STEPS = 40
"""An epoch has 32 of them, or more where the shards are uneven: the next kill is in the middle."""


def job_of(
    kind: str, loader_workers: int, workers: int, directory: Path, save_every: int = 0
) -> ChaosJob:
    """Return a job over such a dataset that trains until its finish file is there."""
    directory.mkdir()
    job = chaos_job(
        "steps", directory.name, workers=workers, directory=directory, save_every=save_every
    )
    job = with_script(job, SCRIPT)
    return with_arguments(job, "--data", kind, "--loader-workers", str(loader_workers))


def trains_in(generation: int, view: JobView) -> bool:
    """Return whether three workers have done some steps in this generation, or a later one."""
    group = view.record.group
    if view.record.phase in ENDED:
        return True
    return (
        group is not None
        and group.generation >= generation
        and len(group.members) == 3
        and sum(w.report.phase is WorkerPhase.TRAINING for w in view.workers) == 3
        and all(w.steps >= STEPS for w in view.workers)
    )


def slow(*values: Any) -> Any:
    """Return a case that takes its time."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "loader_workers", "size"),
    [
        slow("plain", 0, 2), slow("torchdata", 2, 3), slow("worker", 2, 3), slow("stateful", 0, 3),
        slow("hf", 2, 3), slow("hf-shuffled", 0, 2), slow("hf-odd", 0, 3), slow("hf-map", 2, 2),
    ],
)  # fmt: skip
def test_every_world_size_ends_with_the_same_bits(
    cluster: LocalCluster, tmp_path: Path, kind: str, loader_workers: int, size: int
) -> None:
    job = job_of(kind, loader_workers, size, tmp_path / f"{kind}-{size}")
    job_id = cluster.submit(replace(job.spec, min_workers=size))
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    cluster.wait(job_id, lambda v: not v.workers, "its processes' end")
    assert job.check(view)


@pytest.mark.parametrize(
    ("kind", "loader_workers", "kills"),
    [
        ("stateful", 2, 1), slow("stateful", 2, 2), slow("plain", 0, 2), slow("worker", 2, 2),
        slow("torchdata", 0, 2), slow("hf", 0, 2), slow("hf", 2, 2), slow("hf-shuffled", 2, 2),
    ],
)  # fmt: skip
def test_a_killed_worker_in_the_middle_of_an_epoch_changes_nothing(
    cluster: LocalCluster, tmp_path: Path, kind: str, loader_workers: int, kills: int
) -> None:
    kill_workers(cluster, job_of(kind, loader_workers, 3, tmp_path / kind), kills)


@pytest.mark.slow
def test_a_loop_that_is_called_again_goes_on_in_its_streams(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job = job_of("stateful", 2, 3, tmp_path / "reenter")
    kill_workers(cluster, with_arguments(job, "--recovery", "reenter"), 2)


def kill_workers(cluster: LocalCluster, job: ChaosJob, kills: int) -> None:
    """Kill a worker in the middle of an epoch, perhaps another one later, and check the end."""
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, lambda v: trains_in(1, v), "three workers")
    for _ in range(kills):
        victim = sorted(cluster.worker_pids(job_id).values())[0]
        generation = view.record.generation
        os.kill(victim, signal.SIGKILL)
        # One without the victim, and one with whoever replaces it.
        view = cluster.wait(job_id, lambda v, g=generation: trains_in(g + 2, v), "three again")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    cluster.wait(job_id, lambda v: not v.workers, "its processes' end")
    assert view.record.generation >= 1 + 2 * kills
    assert job.check(view)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(
    cluster: LocalCluster, tmp_path: Path, fresh_seed: int
) -> None:
    job = job_of("stateful", 2, 3, tmp_path / "kills")
    outcome = Chaos(cluster, job).run(draw_kills(seed=fresh_seed, kills=6, every_s=1.0))
    assert outcome.faults


def num_saved(view: JobView) -> int:
    """Return the steps of the newest automatic checkpoint, 0 for none."""
    saved = [json.loads(c.metrics)["steps"] for c in view.record.checkpoints if c.automatic]
    return max(saved, default=0)


@pytest.mark.parametrize(("kind", "loader_workers"), [slow("stateful", 2), slow("plain", 0)])
def test_streams_go_on_from_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path, kind: str, loader_workers: int
) -> None:
    """When all agents die, nobody knows where a stream was read to: the checkpoint does."""
    job = job_of(kind, loader_workers, 3, tmp_path / f"saved-{kind}", save_every=3)
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, lambda v: num_saved(v) > STEPS, "checkpoints in the second epoch")
    for name in ("n1", "n2", "n3"):
        cluster.kill_node(name)
    for name in ("n1", "n2", "n3"):
        cluster.start_node(name)
    so_far = num_saved(view)
    cluster.wait(job_id, lambda v: num_saved(v) > so_far + STEPS, "checkpoints of those who came")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)

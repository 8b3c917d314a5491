"""Checkpoints of one world size, read at others; and asked for while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.core.facts import ENDED
from elastic.core.view import JobView
from elastic.storage.run_directory import RunDirectory
from elastic.storage.verify import verify
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import ChaosJob, chaos_job, with_arguments

SAVED_AT = 4


def slow(*values: Any) -> Any:
    """Return a case that takes its time."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give eight slots on one node."""
    directory = tmp_path_factory.mktemp("saved")
    with LocalCluster(nodes=1, workers_per_node=8, spares=8, directory=directory) as running:
        yield running


def job_of(name: str, directory: Path, *, workers: int, run_path: Path) -> ChaosJob:
    """Return a job of so many workers whose run directory is this one."""
    directory.mkdir()
    job = chaos_job("steps", name, workers=workers, directory=directory, save_every=5)
    job = with_arguments(job, "--model", "gpt", "--width", "32")
    return replace(job, spec=replace(job.spec, min_workers=workers, run_path=str(run_path)))


def automatic(view: JobView) -> list[str]:
    """Return the paths of recorded automatic checkpoints."""
    return [record.path for record in view.record.checkpoints if record.automatic]


@pytest.fixture(scope="module")
def saved(eight: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the directory of a run of four workers that was stopped in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("four")
    job = job_of("four", folder / "job", workers=SAVED_AT, run_path=folder / "run")
    job_id = eight.submit(job.spec)
    eight.wait(job_id, lambda view: len(automatic(view)) > 1, "two checkpoints")
    eight.client.stop(job_id, "its checkpoints are all that is wanted")
    eight.wait(job_id, lambda view: not view.workers, "its processes' end")
    return folder / "run"


@pytest.mark.parametrize(("model", "size"), [slow("mlp", 2), slow("cnn", 8), slow("gpt", 5)])
def test_every_world_size_ends_with_the_same_bits(
    eight: LocalCluster, tmp_path: Path, model: str, size: int
) -> None:
    # 1,000 samples in steps of 32: the last step of an epoch has 8, fewer than it has workers.
    job = chaos_job("steps", f"{model}-{size}", workers=size, directory=tmp_path)
    job = with_arguments(job, "--model", model, "--width", "32")
    job_id = eight.submit(replace(job.spec, min_workers=size))
    job.finish.touch()
    view = eight.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    eight.wait(job_id, lambda v: not v.workers, "its processes' end")
    assert job.check(view)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_another_world_goes_on_to_the_same_bits(
    eight: LocalCluster, saved: Path, tmp_path: Path, workers: int
) -> None:
    run_path = tmp_path / "run"
    shutil.copytree(saved, run_path)
    name, marker = RunDirectory(str(run_path)).committed()[-1]
    assert marker.world_size == SAVED_AT
    assert verify(str(run_path / "checkpoints" / name)).is_whole
    job = job_of(f"on-{workers}", tmp_path / "job", workers=workers, run_path=run_path)
    shutil.copytree(saved.parent / "job" / "trace", job.trace)
    job.finish.touch()
    job_id = eight.submit(job.spec)
    view = eight.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    eight.wait(job_id, lambda v: not v.workers, "its processes' end")
    # It has gone on, and not begun anew: its first own checkpoint is of a later step.
    steps = [int(one.about("steps")) for _, one in RunDirectory(str(run_path)).committed()]
    assert min(steps) > marker.about("steps") - 5


@pytest.mark.slow
def test_a_checkpoint_is_taken_when_somebody_asks(cluster: LocalCluster, tmp_path: Path) -> None:
    job = chaos_job("steps", "asked", workers=3, directory=tmp_path)
    job_id = cluster.submit(job.spec)
    cluster.wait(job_id, lambda view: bool(view.record.metrics), "its first report")
    for count in (1, 2):
        cluster.client.checkpoint(job_id)
        view = cluster.wait(job_id, lambda v, n=count: len(automatic(v)) >= n, "a checkpoint")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    assert all(verify(path).is_whole for path in automatic(view))

"""A loop over whole steps is struck: it goes on to the bits of a plain loop that nobody disturbs.

The script counts its iterations by itself, without asking whether they count: on a rank that falls
behind, and on one that comes later, it must have counted each step once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.world import ENDED
from elastic.testing.chaos_jobs import chaos_job, with_arguments
from elastic.testing.local_cluster import LocalCluster
from elastic.testing.traces import Reference
from tests.chaos.struck import PLACES, WORKERS, Run, assert_kept


@pytest.mark.parametrize("model", ["cnn", pytest.param("gpt", marks=pytest.mark.slow)])
def test_workers_are_killed_at_every_place(
    cluster: LocalCluster, tmp_path: Path, model: str
) -> None:
    (tmp_path / "orders").mkdir()
    job = chaos_job("steps", f"whole-{model}", workers=WORKERS, directory=tmp_path)
    plain = ("--model", model, "--samples", "1000")
    entry = job.spec.entry
    job = replace(
        with_arguments(job, "--model", model),
        spec=replace(
            job.spec,
            entry=replace(
                entry,
                args=(
                    *entry.args, *plain, "--whole-steps", "--orders", str(tmp_path / "orders"),
                ),
            ),
        ),
    )  # fmt: skip
    with Reference(Path(entry.target), plain, tmp_path / "reference") as reference:
        run = Run(cluster, job, reference, cluster.submit(job.spec))
        view = run.full()
        for place in PLACES:
            before, generation = run.pids(), view.record.generation
            run.order(f"kill-{place}")
            view = run.full(after=generation)
            assert_kept(before, run.pids(), lost=1)
            run.check()
        job.finish.touch()
        view = cluster.wait(run.job_id, lambda v: v.record.phase in ENDED, "the end")
        assert job.check(view)

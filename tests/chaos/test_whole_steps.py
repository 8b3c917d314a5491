"""A loop over whole steps is struck: it goes on to the bits of a plain loop that nobody disturbs.

The script counts its iterations by itself, without asking whether they count: on a rank that falls
behind, and on one that comes later, it must have counted each step once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos.struck import PLACES, WORKERS, Run
from tests.harness.chaos_jobs import chaos_job, with_arguments
from tests.harness.traces import Reference


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("cnn", ("backward", "commit")),
        pytest.param("gpt", PLACES, marks=pytest.mark.slow),
    ],
)
def test_workers_are_killed(
    cluster: LocalCluster, tmp_path: Path, model: str, places: tuple[str, ...]
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
        run.kill_at_every_place(places)
        assert job.check(run.end())

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
from tests.harness.chaos_jobs import chaos_job
from tests.harness.traces import reference_of


@pytest.mark.parametrize(
    ("model", "places", "sizes"),
    [
        ("cnn", ("backward", "commit"), (1, WORKERS)),
        # Two cannot tell which of them is right, and both wait within a step for who is new.
        ("cnn", ("backward", "step"), (2, 2)),
        pytest.param("gpt", PLACES, (1, WORKERS), marks=pytest.mark.slow),
    ],
)
def test_workers_are_killed(
    cluster: LocalCluster,
    tmp_path: Path,
    model: str,
    places: tuple[str, ...],
    sizes: tuple[int, int],
) -> None:
    (tmp_path / "orders").mkdir()
    least, most = sizes
    job = chaos_job("steps", f"whole-{model}-{most}", workers=most, directory=tmp_path)
    plain = ("--model", model, "--samples", "1000")
    entry = job.spec.entry
    more = ("--whole-steps", "--orders", str(tmp_path / "orders"), "--pace", "0.03")
    entry = replace(entry, args=(*entry.args, *plain, *more))
    job = replace(job, spec=replace(job.spec, entry=entry, min_workers=least))
    run = Run(cluster, job, reference_of(entry.target, plain), cluster.submit(job.spec))
    run.kill_at_every_place(places, size=most)
    run.end()

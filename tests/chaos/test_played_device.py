"""Whole jobs on a device that works behind the host's back, with aborts that leave partial sums.

The state after every step of every rank must be that of a run on the CPU alone. Where steps are
committed before the device has done their exchange it is not, which shows that the device plays
what it is to play.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos.struck import PLACES, WORKERS, Run
from tests.harness.chaos_jobs import JOBS, chaos_job, with_script
from tests.harness.traces import TraceDiffers, reference_of
from tests.patience import wait_for

SCRIPT = JOBS / "device_job.py"
ON_DEVICE = ("send", "sent", "arrived", "confirm", "confirmed", "commit")
"""What `played_device` calls its places, and the optimizer's step."""


def running(cluster: LocalCluster, directory: Path, name: str, *orders: str) -> Run:
    """Give a run with three workers that train, each on a device of its own."""
    (directory / "orders").mkdir()
    for order in orders:
        (directory / "orders" / order).touch()
    job = with_script(chaos_job("steps", name, workers=WORKERS, directory=directory), SCRIPT)
    args = (
        *("--epochs", "1000000", "--trace", str(job.trace), "--finish", str(job.finish)),
        *("--orders", str(directory / "orders")),
    )
    job = replace(job, spec=replace(job.spec, entry=replace(job.spec.entry, args=args)))
    run = Run(cluster, job, reference_of(SCRIPT, ()), cluster.submit(job.spec))
    run.full()
    return run


@pytest.mark.parametrize(
    "places", [ON_DEVICE, pytest.param((ON_DEVICE + PLACES) * 19, marks=pytest.mark.slow)]
)
def test_kills_at_any_place_leave_the_bits_of_an_undisturbed_run(
    cluster: LocalCluster, tmp_path: Path, places: tuple[str, ...]
) -> None:
    run = running(cluster, tmp_path, "played")
    run.kill_at_every_place(places)
    run.end()


def test_a_commit_before_the_device_has_done_the_exchange_is_found_out(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def differs(run: Run) -> bool:
        try:
            run.check()
        except TraceDiffers:
            return True
        return False

    run = running(cluster, tmp_path, "too-early", "open-gate")
    run.check()  # Without a fault it would never show.
    run.order("kill-commit")
    wait_for(lambda: differs(run), "a step with another state than the undisturbed run's")

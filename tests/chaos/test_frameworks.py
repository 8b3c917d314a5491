"""Loops that are not ours are struck: other libraries' trainers end as if nobody had died.

After each strike every step of every rank must have left the state, the counters and the log
history of the same script in one process, which goes through the library's loop undisturbed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos.scripts import Script
from tests.chaos.struck import WORKERS, Run
from tests.harness.chaos_jobs import chaos_job, with_script
from tests.harness.traces import reference_of

JOBS = {
    "accelerate": "accelerate_job.py",
    "lightning": "lightning_job.py",
    "transformers": "hf_job.py",
}
PLACES = {
    "accelerate": ("forward", "step", "commit"),
    "lightning": ("forward", "step", "commit"),
    "transformers": ("forward", "commit", "epoch", "save"),
}
"""`test_whole_steps.py` has the others; here each replacement imports a large library first."""


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("transformers", ("commit", "save")),
        *(pytest.param(one, found, marks=pytest.mark.slow) for one, found in PLACES.items()),
    ],
)
def test_workers_are_killed_at_every_place(
    cluster: LocalCluster, tmp_path: Path, library: str, places: tuple[str, ...]
) -> None:
    (tmp_path / "orders").mkdir()
    script = Path(__file__).with_name(JOBS[library])
    job = with_script(chaos_job("steps", library, workers=WORKERS, directory=tmp_path), script)
    args = (
        *("--epochs", "1000000", "--trace", str(job.trace), "--pace", "0.1"),
        *("--orders", str(tmp_path / "orders"), "--finish", str(job.finish)),
        *("--output", str(tmp_path / "output")),
    )
    entry = replace(job.spec.entry, args=args)
    job = replace(job, spec=replace(job.spec, entry=entry))
    run = Run(cluster, job, reference_of(script, ()), cluster.submit(job.spec))
    run.kill_at_every_place(places)
    run.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"),
    # Under torchrun, too, test_script fails with three and test_sync with one.
    [("test_script", 1), ("test_script", 2), ("test_sync", 2), ("test_sync", 3)],
)
def test_the_scripts_that_accelerate_is_tested_with_pass_as_under_torchrun(
    scripts: list[Script], tmp_path: Path, name: str, workers: int
) -> None:
    path = Path(find_spec("accelerate.test_utils").origin).parent / "scripts" / f"{name}.py"  # type: ignore[union-attr, arg-type]
    run = ("run", "--storage", str(tmp_path / "runs"), f"--nproc-per-node={workers}")
    scripts.append(Script("", tmp_path, "-m", "elastic.client.cli", *run, script=path))
    assert scripts[-1].wait() == 0, scripts[-1].said()

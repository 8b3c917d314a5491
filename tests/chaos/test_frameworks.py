"""Loops that are not ours are struck: other libraries' trainers end as if nobody had died.

After each strike every step of every rank must have left the state, the counters and the log
history of the same script in one process, which goes through the library's loop undisturbed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.world import ENDED, JobPhase
from elastic.testing.chaos_jobs import chaos_job, with_script
from elastic.testing.local_cluster import LocalCluster
from elastic.testing.traces import Reference
from tests.chaos.struck import WORKERS, Run, assert_kept

JOBS = {
    "accelerate": "accelerate_job.py",
    "lightning": "lightning_job.py",
    "transformers": "hf_job.py",
}
PLACES = ("forward", "step", "commit")
"""`test_whole_steps.py` has the others; here each replacement imports a large library first."""


@pytest.mark.parametrize(
    "library",
    [pytest.param("accelerate", marks=pytest.mark.slow), "lightning", "transformers"],
)
def test_workers_are_killed_at_every_place(
    cluster: LocalCluster, tmp_path: Path, library: str
) -> None:
    (tmp_path / "orders").mkdir()
    script = Path(__file__).with_name(JOBS[library])
    job = with_script(chaos_job("steps", library, workers=WORKERS, directory=tmp_path), script)
    args = (
        *("--epochs", "1000000", "--trace", str(job.trace), "--pace", "0.1"),
        *("--orders", str(tmp_path / "orders"), "--finish", str(job.finish)),
    )
    entry = replace(job.spec.entry, args=args)
    job = replace(job, spec=replace(job.spec, entry=entry))
    with Reference(script, (), tmp_path / "reference") as reference:
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
        assert view.record.phase is JobPhase.SUCCEEDED, view.record.failure
        run.check()

"""A job that pauses, and storage that takes its time where the members leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.core.facts import JobPhase
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.shared import assert_nothing_done_twice, end, job_of, train_with, with_diary
from tests.harness.faulty_storage import Faults


@pytest.mark.slow
def test_a_pause_that_is_taken_back_does_not_wait_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(tmp_path)
    monkeypatch.setenv("PYTHONPATH", faults.python_path())
    # The first one is that which lets the members leave; the second is taken where they do.
    hangs = faults.add("hang", on="write", match="*-000002/part-00001*")
    job = job_of(
        "job", tmp_path / "job", min_workers=2, max_workers=2,
        run_path=f"faulty://{tmp_path}/job/run",
    )  # fmt: skip
    job = with_diary(job)
    cluster = LocalCluster(
        nodes=1, workers_per_node=2, spares=0, directory=tmp_path / "cluster",
    )  # fmt: skip
    with cluster as two:
        job_id = two.submit(job.spec)
        two.wait(job_id, lambda v: train_with(2, v), "two workers")
        two.client.pause(job_id)
        faults.wait_hit(hangs)
        record = two.job(job_id).record
        assert (record.phase, record.generation) == (JobPhase.RUNNING, 1)
        two.client.resume(job_id)
        view = two.wait(
            job_id, lambda v: v.record.generation == 2 and train_with(2, v), "its going on"
        )
        assert view.record.losses == view.record.failures == 0
        faults.remove()
        end(two, job, job_id)
    assert_nothing_done_twice(job)

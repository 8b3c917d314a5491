"""A job of higher priority comes, and storage does not take the other one's first checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.core.facts import JobPhase
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.shared import assert_nothing_done_twice, end, job_of, train_with, with_diary
from tests.harness.faulty_storage import Faults

TIMES = ("--preemption-deadline", "2")


@pytest.mark.slow
def test_a_job_that_cannot_be_saved_trains_on_and_gives_way_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(tmp_path)
    monkeypatch.setenv("PYTHONPATH", faults.python_path())
    away = faults.add("denied", on="write", match="*/auto-*")
    low = job_of(
        "low", tmp_path / "low", pace_s=0.01, min_workers=2, max_workers=2,
        run_path=f"faulty://{tmp_path}/low/run",
    )  # fmt: skip
    low = with_diary(low)
    high = job_of(
        "high", tmp_path / "high", pace_s=0.005, min_workers=1, max_workers=1, priority=10
    )  # fmt: skip
    cluster = LocalCluster(
        nodes=1, workers_per_node=2, spares=1, directory=tmp_path / "cluster",
        coordinator_args=TIMES,
    )  # fmt: skip
    with cluster as full:
        low_id = full.submit(low.spec)
        full.wait(low_id, lambda v: train_with(2, v), "two workers")
        high_id = full.submit(high.spec)
        full.wait(high_id, lambda v: "wrote no checkpoint within 2 s" in v.reason, "the reason")
        record = full.job(low_id).record
        assert (record.phase, record.generation) == (JobPhase.RUNNING, 1), "it trains on"
        assert faults.hits(away)
        faults.remove(away)
        full.wait(low_id, lambda v: bool(v.record.preempted_by) and not v.workers, "its going")
        full.wait(high_id, lambda v: train_with(1, v), "the urgent one")
        end(full, high, high_id)
        full.wait(low_id, lambda v: train_with(2, v), "its coming back")
        end(full, low, low_id)
    assert_nothing_done_twice(low)

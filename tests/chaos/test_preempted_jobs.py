"""A job of higher priority comes to a full cluster: the other one makes room, and loses no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.core.facts import JobPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.shared import assert_nothing_done_twice, end, job_of, train_with, with_diary


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give two nodes of two slots."""
    with LocalCluster(
        nodes=2,
        workers_per_node=2,
        spares=1,
        directory=tmp_path_factory.mktemp("full"),
    ) as running:
        yield running


def was_preempted(view: JobView, by: str) -> bool:
    """Return whether a job waits without workers, because of this one."""
    return (
        view.record.phase is JobPhase.PENDING
        and not view.workers
        and view.record.preempted_by == f"{by} (priority 10 over 0)"
    )


@pytest.mark.slow
def test_a_preempted_job_comes_back_and_ends_with_the_same_bits(
    full: LocalCluster, tmp_path: Path
) -> None:
    low = with_diary(job_of("low", tmp_path / "low", pace_s=0.02, min_workers=4))
    high = job_of(
        "high", tmp_path / "high", pace_s=0.02, min_workers=1, max_workers=1, priority=10
    )  # fmt: skip
    low_id = full.submit(low.spec)
    full.wait(low_id, lambda v: train_with(4, v), "four workers")
    high_id = full.submit(high.spec)
    view = full.wait(low_id, lambda v: was_preempted(v, high_id), "its giving way")
    saved = [record for record in view.record.checkpoints if record.automatic]
    assert saved[-1].generation == view.record.generation, "it was saved before it went"
    full.wait(high_id, lambda v: train_with(1, v), "the first one's turn")
    # More than it was submitted with: its steps are shared out in eight micro-batches.
    full.client.scale(high_id, max_workers=2)
    full.wait(high_id, lambda v: train_with(2, v), "one more")
    full.kill_coordinator()
    full.start_coordinator()
    full.wait_nodes(2)
    full.wait(low_id, lambda v: was_preempted(v, high_id) and "3 can be had" in v.reason, "why")
    end(full, high, high_id)
    full.wait(low_id, lambda v: train_with(4, v), "four workers again")
    view = end(full, low, low_id)
    assert view.record.failures == view.record.losses == view.record.preemptions == 0
    assert view.record.preempted_by == ""
    assert_nothing_done_twice(low)

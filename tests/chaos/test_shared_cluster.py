"""Two elastic jobs share four slots; what one gives to the other changes no bit of either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.facts import JobPhase
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.shared import assert_nothing_done_twice, end, job_of, train_with, with_diary


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give two nodes of two slots."""
    directory = tmp_path_factory.mktemp("four")
    with LocalCluster(nodes=2, workers_per_node=2, spares=1, directory=directory) as running:
        yield running


@pytest.mark.slow
def test_a_job_gives_slots_to_the_next_and_takes_them_back(
    four: LocalCluster, tmp_path: Path
) -> None:
    first, second = job_of("first", tmp_path / "first"), job_of("second", tmp_path / "second")
    first_id = four.submit(first.spec)
    view = four.wait(first_id, lambda v: train_with(4, v), "four workers")
    pids = {w.report.worker_id: w.report.pid for w in view.workers}
    second_id = four.submit(second.spec)
    four.wait(second_id, lambda v: train_with(2, v), "its half")
    view = four.wait(first_id, lambda v: train_with(2, v), "the other half")
    assert {w.report.worker_id: w.report.pid for w in view.workers if w.rank >= 0}.items() <= (
        pids.items()
    )
    end(four, second, second_id)
    view = four.wait(first_id, lambda v: train_with(4, v), "all four again")
    assert view.record.losses == view.record.failures == 0
    end(four, first, first_id)
    four.wait(first_id, lambda v: not v.workers, "its processes' end")


@pytest.mark.slow
def test_a_paused_job_holds_nothing_and_goes_on_to_the_same_bits(
    four: LocalCluster, tmp_path: Path
) -> None:
    job = with_diary(job_of("paused", tmp_path / "paused"))
    other = job_of("other", tmp_path / "other")
    job_id = four.submit(job.spec)
    four.wait(job_id, lambda v: train_with(4, v), "four workers")
    four.client.pause(job_id)
    view = four.wait(
        job_id, lambda v: v.record.phase is JobPhase.PAUSED and not v.workers, "its rest"
    )
    saved = [record for record in view.record.checkpoints if record.automatic]
    assert saved
    assert saved[-1].generation == view.record.generation
    other_id = four.submit(replace(other.spec, min_workers=4))
    four.wait(other_id, lambda v: train_with(4, v), "all slots")
    four.kill_coordinator()
    four.start_coordinator()
    four.wait_nodes(2)
    assert four.job(job_id).record.phase is JobPhase.PAUSED
    four.client.resume(job_id)
    four.wait(job_id, lambda v: "other" in v.reason or other_id in v.reason, "its turn")
    end(four, other, other_id)
    four.wait(job_id, lambda v: train_with(4, v), "four workers again")
    four.client.scale(job_id, max_workers=2)
    four.wait(job_id, lambda v: train_with(2, v), "two workers")
    end(four, job, job_id)
    assert_nothing_done_twice(job)

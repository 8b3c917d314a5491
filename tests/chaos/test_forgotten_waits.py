"""The last holder of a run's state must end, because gloo has forgotten a wait of its."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.testing.local_cluster import LocalCluster
from tests.chaos.struck import Run
from tests.harness.chaos_jobs import JOBS, chaos_job, with_script
from tests.harness.traces import lines_of, place_of, reference_of

WORKERS = 2


@pytest.fixture(name="one_node")
def _one_node(tmp_path: Path) -> Iterator[LocalCluster]:
    directory = tmp_path / "cluster"
    with LocalCluster(
        nodes=1, workers_per_node=WORKERS, spares=WORKERS, directory=directory
    ) as running:
        yield running


def test_no_step_is_done_again_for_it(one_node: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    job = chaos_job("steps", "forgotten", workers=WORKERS, directory=tmp_path)
    job = with_script(job, JOBS / "forgotten_job.py")
    entry = job.spec.entry
    entry = replace(entry, args=(*entry.args, "--orders", str(tmp_path / "orders")))
    job = replace(job, spec=replace(job.spec, entry=entry))
    run = Run(one_node, job, reference_of(entry.target, job.options), one_node.submit(job.spec))
    view = run.full(size=WORKERS)
    before = set(run.pids().values())
    (run.orders / "forget").touch()
    run.order("kill-step")
    run.full(after=view.record.generation, size=WORKERS)
    assert before.isdisjoint(run.pids().values())
    run.end()
    done = Counter(place_of(line) for _, line in lines_of(job.trace))
    assert max(done.values()) <= WORKERS

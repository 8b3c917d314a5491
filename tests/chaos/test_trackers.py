"""Trackers of a job that loses the rank beside which they are told."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.config import TRACKERS_VARIABLE
from elastic.core.facts import ENDED
from elastic.storage.metrics import Numbering
from elastic.storage.run_directory import RunDirectory
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import chaos_job
from tests.patience import wait_for


@pytest.mark.slow
def test_each_report_is_shown_once_though_rank_zero_dies(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job = chaos_job("steps", "tracked", workers=3, directory=tmp_path)
    entry = replace(job.spec.entry, env=((TRACKERS_VARIABLE, "json"),))
    job = replace(job, spec=replace(job.spec, entry=entry))
    run = tmp_path / "run"

    def shown() -> list[int]:
        path = run / "tracked.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    job_id = cluster.submit(job.spec)
    wait_for(lambda: len(shown()) >= 2, lambda: f"two reports, {shown()}")
    view = cluster.client.get(job_id)
    [first] = [worker.report for worker in view.workers if worker.rank == 0]
    os.kill(first.pid, signal.SIGKILL)
    before = len(shown())
    wait_for(lambda: len(shown()) > before + 1, lambda: f"more reports, {shown()}")
    job.finish.touch()
    cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    numbering = Numbering()
    numbers = {numbering.take(row) for row in RunDirectory(str(run)).read_metrics()}
    assert shown() == sorted(numbers) == list(range(1, len(numbers) + 1))

"""Jobs that share a real cluster: slow there, so that others come while they train."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.core.facts import ENDED, JobPhase, WorkerPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import ChaosJob, chaos_job, with_script

DIARY = Path(__file__).with_name("preempted_job.py")
"""The script of jobs that keep a diary."""
MICRO_BATCHES = 8
"""Of a step of these jobs."""


def job_of(name: str, directory: Path, *, pace_s: float = 0.1, **changes: Any) -> ChaosJob:
    """Return a job of 1 to 4 workers, changed in its specification; a step takes 8 paces of one."""
    directory.mkdir()
    job = chaos_job("steps", name, workers=4, directory=directory, save_every=50)
    # Slow on the cluster only: the undisturbed run has all of it to do alone.
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, "--pace", str(pace_s)))
    return replace(job, spec=replace(job.spec, entry=entry, **changes))


def with_diary(job: ChaosJob) -> ChaosJob:
    """Return the same job, which writes down what it trains with; see `diaries`."""
    return with_script(job, DIARY)


def diaries(job: ChaosJob) -> list[dict[str, Any]]:
    """Return what the workers of a job have written down, one line for each micro-batch."""
    lines = []
    for path in sorted((job.finish.parent / "diaries").iterdir()):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines


def assert_nothing_done_twice(job: ChaosJob) -> None:
    """Every micro-batch of every step was trained with once, by one rank of one group."""
    done = Counter((line["epoch"], line["step"]) for line in diaries(job))
    assert {step: n for step, n in done.items() if n != MICRO_BATCHES} == {}


def train_with(size: int, view: JobView) -> bool:
    """Return whether a group of so many has made a step."""
    group = view.record.group
    if group is None or len(group.members) != size or view.record.phase is not JobPhase.RUNNING:
        return False
    members = [w for w in view.workers if w.rank >= 0]
    return len(members) == size and all(
        w.report.phase is WorkerPhase.TRAINING
        and w.report.generation == group.generation
        and w.steps > 0
        for w in members
    )


def end(cluster: LocalCluster, job: ChaosJob, job_id: str) -> JobView:
    """Let a job end, and hold its result against that of an undisturbed run."""
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    return view

"""Charges a job for failures: an attempt fails once, however many of its workers are lost.

Rule: a wrong batch raises in every rank, and a step that needs too much memory kills all workers of
a node. So only the first failure and the first loss of a generation's members count; before the
first group every worker is an attempt of its own.
"""

from __future__ import annotations

from elastic.core.machine.jobs import JobState, WorkerState
from elastic.core.policy.failure import FailureDecision
from elastic.core.world import NO_GENERATION


def is_charged_already(job: JobState, worker: WorkerState, judgement: FailureDecision) -> bool:
    """Return whether the job was charged for this attempt; if not, it is now."""
    before, after = job.outcome.history, judgement.history
    generation = worker.report.generation
    if after.failures > before.failures:
        newest = job.outcome.failure_generation
        job.outcome.failure_generation = max(newest, generation)
    elif after.losses > before.losses:
        newest = job.outcome.loss_generation
        job.outcome.loss_generation = max(newest, generation)
    else:
        return False
    return NO_GENERATION < generation <= newest

"""What a job is charged for: one attempt fails once, however many of its workers are lost.

Rule: a wrong batch raises in every rank, and a step that wants too much memory takes all workers
of a node. So of what members of one generation end with, the first failure and the first loss
count; before its first group every worker is an attempt of its own.
"""

from __future__ import annotations

from elastic.core.machine.jobs import JobState, WorkerState
from elastic.core.policy.failure import FailureDecision
from elastic.core.world import NO_GENERATION


def is_charged_already(job: JobState, worker: WorkerState, judgement: FailureDecision) -> bool:
    """Return whether the job was charged for this attempt; if not, it is now.

    Args:
        job: which has lost the worker.
        worker: that is gone, with its last report.
        judgement: what its exit would cost.
    """
    before, after = job.history, judgement.history
    generation = worker.report.generation
    if after.failures > before.failures:
        newest = job.failure_generation
        job.failure_generation = max(newest, generation)
    elif after.losses > before.losses:
        newest = job.loss_generation
        job.loss_generation = max(newest, generation)
    else:
        return False
    return NO_GENERATION < generation <= newest

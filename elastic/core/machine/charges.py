"""What a job is charged for: one attempt fails once, however many of its workers are lost.

Rule: a wrong batch raises in every rank, and a rack without power takes many nodes. So of what
members of one generation end with, the first failure and the first loss count; before its first
group every worker is an attempt of its own. A member that has not answered its newest group yet may
have been lost with those of the one before: that it was not is known when an outage would be over.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S
from elastic.core.machine.jobs import JobState, WorkerState
from elastic.core.policy.failure import Judgement
from elastic.core.world import NO_GENERATION, Generation

OUTAGE_NS = 15 * NS_PER_S
"""What is lost at one moment is noticed within this: the longest silence that is allowed (10 s),
and the grace of nodes. In a group of thousands members answer for seconds: who loses one within a
second of each group would never be charged without it."""


def is_charged_already(
    job: JobState, worker: WorkerState, judgement: Judgement, now_ns: int
) -> bool:
    """Return whether the job was charged for this attempt; if not, it is now.

    Args:
        job: which has lost the worker.
        worker: that is gone, with its last report.
        judgement: what its exit would cost.
        now_ns: monotonic.
    """
    before, after = job.history, judgement.history
    generation = worker.report.generation
    if after.failures > before.failures:
        newest = job.failure_generation
        job.failure_generation = max(newest, generation)
    elif after.losses > before.losses:
        generation = _attempt_of(job, worker, now_ns)
        newest = job.loss_generation
        job.loss_generation = max(newest, generation)
    else:
        return False
    if NO_GENERATION < generation <= newest:
        return True
    if after.losses > before.losses:
        job.charged_ns = now_ns
    return False


def _attempt_of(job: JobState, worker: WorkerState, now_ns: int) -> Generation:
    """Return in which generation a worker was lost."""
    report = worker.report
    has_answered = report.generation in (NO_GENERATION, job.generation)
    if has_answered or not job.is_open or not job.is_member(report.worker_id):
        return report.generation
    is_outage = job.charged_ns is not None and now_ns - job.charged_ns < OUTAGE_NS
    return report.generation if is_outage else job.generation

"""Members that leave the train function for good while others still wait for them.

A rank that returns or calls `sys.exit(0)` has finished, and looks like the first of all members to
do so. It closes its group shortly later (`machine.worker.CLOSE_GROUP_NS`). Members that need
nothing from it continue and finish; those that wait for it see their group break.

Rule: if a group breaks without a loss while one of its members has finished, that member is the
cause. This counts as a failure of user code.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from elastic.core.config import NS_PER_S
from elastic.core.facts import Failure, WorkerPhase
from elastic.core.machine import draining, timeouts
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.policy import failure as failure_policy
from elastic.core.policy.decision import Decision

LOSS_NS = 2 * NS_PER_S
"""The loss of a silently dead node is detected within this: until then it may be the cause that
broke the group."""
RANKS_MAX = 8
"""Maximum number of ranks listed."""


class EarlyFinishOutcome(Enum):
    """The decision on a broken group that members had left before."""

    WAIT = "wait"
    """A member may be lost."""
    AGAIN = "again"
    """It is formed again, and the finished members run again."""
    FAIL = "fail"


def has_finished(job: JobState) -> bool:
    """Return whether a member of the newest group has finished."""
    return job.is_open and any(w.has_finished(job.generation) for w in job.present_members())


def charge_early_finish(cluster: ClusterState, job: JobState) -> Decision[EarlyFinishOutcome]:
    """Decide whether finished members have broken a group, and charge the job for it."""
    if draining.nodes_of(cluster, job) or timeouts.is_somebody_behind(job):
        return Decision(EarlyFinishOutcome.AGAIN, "the group changes")
    members = [(job.rank_of(w.report.worker_id), w) for w in job.present_members()]
    left = [(rank, worker) for rank, worker in members if worker.has_finished(job.generation)]
    others = [rank for rank, worker in members if not worker.has_finished(job.generation)]
    hows = {rank: worker.report.left or "has finished" for rank, worker in left}
    first = left[0][0]
    same = [rank for rank, how in hows.items() if how == hows[first]]
    verb = "trains" if len(others) == 1 else "train"
    what = f"{_ranks(same)} {hows[first]}; {_ranks(others)} still {verb}"
    broken = [w.since_ns for _, w in members if w.report.phase is WorkerPhase.BROKEN]
    until_ns = min(broken, default=cluster.now_ns) + LOSS_NS
    if cluster.now_ns < until_ns:
        return Decision(EarlyFinishOutcome.WAIT, what, until_ns)
    where = ", ".join(f"rank {rank} {how}" for rank, how in hows.items())
    failure = Failure("LeftEarly", what, position=where)
    decision = failure_policy.judge_left(job.spec, job.outcome.history, failure, cluster.config)
    job.outcome.history = decision.value.history
    job.outcome.failure = failure
    job.outcome.failed_worker = f"{left[0][1].report.worker_id} (rank {first})"
    job.outcome.note_failure(job.generation, first, failure)
    if decision.value.job_fails:
        return Decision(EarlyFinishOutcome.FAIL, decision.reason)
    cluster.note("left_early", job.job_id, generation=job.generation, reason=what)
    return Decision(EarlyFinishOutcome.AGAIN, decision.reason)


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2 and 3", "ranks 0, 1, ... and 92 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > RANKS_MAX:
        named = ", ".join(map(str, ranks[:RANKS_MAX]))
        return f"ranks {named} and {len(ranks) - RANKS_MAX} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

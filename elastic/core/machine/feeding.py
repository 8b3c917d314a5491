"""Jobs that feed another one with data: they end with it, and grow while it waits for data."""

from __future__ import annotations

from elastic.core.events.coordinator import Persist
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.policy import feeding


def has_nobody(cluster: ClusterState, job: JobState) -> bool:
    """Return whether the job that this one feeds is over, so that this one ends."""
    fed = cluster.jobs.get(job.spec.feeds)
    return bool(job.spec.feeds) and (fed is None or fed.has_ended())


def settle(cluster: ClusterState, job: JobState) -> int | None:
    """Let a job that feeds another one grow if that waits for data; return when to look again."""
    fed = cluster.jobs.get(job.spec.feeds)
    if fed is None or not job.is_open:
        return None
    members = [fed.workers[one] for one in fed.member_ids() if one in fed.workers]
    decision = feeding.decide(
        job.limits,
        highest=job.spec.max_workers,
        running=len(job.member_ids()),
        since_ns=job.newest.training_since_ns,
        data_wait_ns=sum(one.telemetry.data_wait_ns for one in members),
        wall_ns=sum(one.telemetry.wall_ns for one in members),
        now_ns=cluster.now_ns,
    )
    if decision.value != job.limits.max_workers:
        job.bounds = (job.limits.min_workers, decision.value)
        cluster.do(Persist((job.record(),)))
        low, high = job.bounds
        cluster.note(
            "job_scaled", job.job_id, min_workers=low, max_workers=high, reason=decision.reason
        )
        cluster.touch_active()
    return decision.wake_ns

"""Jobs that feed another one with data: they end with it, and grow while it waits for data."""

from __future__ import annotations

from elastic.core.machine.job_parts import Growth
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
    trains = fed.is_open and fed.newest.training_since_ns is not None
    members = fed.present_members() if trains else []
    before, limits = job.size.growth, job.limits
    decision = feeding.decide(
        limits,
        highest=job.permitted[1],
        running=len(job.member_ids()),
        since_ns=job.newest.training_since_ns,
        measured_ns=min((one.measured_ns for one in members), default=0),
        data_wait_ns=sum(one.telemetry.data_wait_ns for one in members),
        wall_ns=sum(one.telemetry.wall_ns for one in members),
        share_before=before.share if before.fed == fed.generation else None,
        now_ns=cluster.now_ns,
    )
    if decision.value is not None:
        job.size.growth = Growth(limits.max_workers + 1, fed.generation, decision.value)
        cluster.note(
            "job_scaled",
            job.job_id,
            min_workers=limits.min_workers,
            max_workers=job.size.growth.workers,
            reason=decision.reason,
        )
        cluster.touch_active()
    return decision.wake_ns

"""Users' requests to running jobs and nodes: stop, pause, resume, scale, cordon.

Rule: a granted request is durable before it is answered, and requests are idempotent.
"""

from __future__ import annotations

from elastic.core.events.coordinator import (
    NodeCordonRequested,
    PauseRequested,
    PersistNodes,
    Reply,
    ResumeRequested,
    ScaleRequested,
    StopRequested,
)
from elastic.core.facts import JobPhase
from elastic.core.machine import health, reconcile
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.policy import scaling
from elastic.core.policy.scaling import JobBounds, StepShares

CORDONS_BYTES_MAX = 512 * 1024
"""They are one record, and a store takes no more than 1 MiB in a commit."""


def too_many_jobs(cluster: ClusterState) -> str:
    """Return why no further job is accepted, "" if one is."""
    most, active = cluster.config.jobs_max, sum(1 for _ in cluster.active())
    if active < most:
        return ""
    return (
        f"{active} jobs have not ended, at most {most} are taken (elastic-coord serve "
        f"--max-jobs): wait for one to end, or stop one"
    )


def on_stop(cluster: ClusterState, event: StopRequested) -> None:
    """End a job: at once, or after a checkpoint and after its workers left at a boundary.

    Only a loop that can be saved at any step is waited for, or what follows it: its last checkpoint
    may still be being written.
    """
    job, reason = cluster.jobs.get(event.job_id), event.reason or "stopped"
    if job is not None and job.has_ended() and job.workers and event.now:
        if not job.release.hurries:
            reconcile.hurry(cluster, job)
        cluster.do(Reply(event.request_id, "", job.job_id))
        return
    job = _active(cluster, event)
    if job is None:
        return
    job.release.hurries = event.now
    is_behind_loop = (
        job.is_open and job.newest.has_looped and job.newest.training_since_ns is not None
    )
    is_waited_for = is_behind_loop or _may_be_in_place(cluster, job)
    if not event.now and job.spec.run_path and is_waited_for:
        if not job.release.stopping:
            job.release.reset()
            job.release.paused, job.release.stopping = True, reason
            cluster.persist(job)
            cluster.note("stop_requested", job.job_id, generation=job.generation, reason=reason)
            cluster.touch_active()
    else:
        reconcile.end_job(cluster, job, JobPhase.STOPPED, reason)
    cluster.do(Reply(event.request_id, "", job.job_id))


def _may_be_in_place(cluster: ClusterState, job: JobState) -> bool:
    """Return whether it trains in a loop, or that is not known yet after a restart of ours."""
    members = (job.workers.get(worker_id) for worker_id in job.member_ids() if job.is_open)
    return job.is_in_place() or any(
        worker is not None and cluster.node_of(worker).absence.is_unconfirmed for worker in members
    )


def on_pause(cluster: ClusterState, event: PauseRequested) -> None:
    job = _active(cluster, event)
    if job is None:
        return
    if job.generation and not job.spec.run_path:
        text = (
            f"job {job.job_id} has no run directory to continue from, and would start over: stop "
            f"it instead, or submit it with one (RunConfig(storage_path=...), or --storage-path)"
        )
        cluster.do(Reply(event.request_id, "failed_precondition", text))
        return
    if not job.release.paused:
        job.release.reset()
        job.release.paused = True
        cluster.persist(job)
        cluster.note("pause_requested", job.job_id, generation=job.generation)
        cluster.touch_active()
    cluster.do(Reply(event.request_id, "", job.job_id))


def on_resume(cluster: ClusterState, event: ResumeRequested) -> None:
    """Resume a job, also one whose pause is not complete yet."""
    job = _active(cluster, event)
    if job is None:
        return
    if job.release.paused:
        job.release.reset()
        job.release.paused, job.release.stopping = False, ""
        if job.phase is JobPhase.PAUSED:
            job.move(JobPhase.PENDING, cluster.now_ns)
            job.reason = "resumed"
        cluster.persist(job)
        cluster.note("job_resumed", job.job_id, generation=job.generation)
        cluster.touch_active()
    cluster.do(Reply(event.request_id, "", job.job_id))


def on_scale(cluster: ClusterState, event: ScaleRequested) -> None:
    """Set other bounds; the group follows at a boundary."""
    job = _active(cluster, event)
    if job is None:
        return
    low, high = event.min_workers or job.permitted[0], event.max_workers or job.permitted[1]
    refusal = _refuse_bounds(job, low, high)
    if refusal:
        cluster.do(Reply(event.request_id, "invalid", refusal))
        return
    if (low, high) != job.permitted:
        job.size.bounds = (low, high)
        cluster.persist(job)
        cluster.note("job_scaled", job.job_id, min_workers=low, max_workers=high)
        cluster.touch_active()
    cluster.do(Reply(event.request_id, "", job.job_id))


def _refuse_bounds(job: JobState, low: int, high: int) -> str:
    """Return why a job cannot have these bounds, "" if it can."""
    decision = scaling.judge_bounds(_shape(job), low, high)
    return "" if decision.value else decision.reason


def _shape(job: JobState) -> JobBounds:
    if job.reports.micro_batches:
        steps = StepShares.CUT
    elif _has_own_steps(job):
        steps = StepShares.ITS_OWN
    else:
        steps = StepShares.IDLE if job.newest.training_since_ns is None else StepShares.UNKNOWN
    return JobBounds(job.spec, job.limits.max_workers, job.reports.micro_batches, steps)


def _has_own_steps(job: JobState) -> bool:
    """Return whether its code divides its steps among workers itself, for any group size.

    Scripts for torchrun do. Other code does if its newest group has reported a checkpoint outside a
    loop of ours. A job that was ever in such a loop may enter it again.
    """
    if job.is_in_place() or any(checkpoint.automatic for checkpoint in job.reports.checkpoints):
        return False
    trains = job.is_open and job.newest.training_since_ns is not None
    is_reported = any(c.generation == job.generation for c in job.reports.checkpoints)
    return job.spec.own_steps or (trains and is_reported)


def on_cut(cluster: ClusterState, job: JobState, micro_batches: int) -> None:
    """Record the number of micro-batches of a step: the bounds may not exceed it.

    A bound set before may exceed it, if a torchrun script turns out to train in our loop.
    """
    if job.reports.micro_batches == micro_batches:
        return
    job.reports.micro_batches = micro_batches
    if job.size.bounds is None:
        return
    bounds = scaling.within(_shape(job), *job.size.bounds)
    if bounds != job.size.bounds:
        job.size.bounds = bounds
        cluster.persist(job)
        cluster.note("job_scaled", job.job_id, min_workers=bounds[0], max_workers=bounds[1])
        cluster.touch_active()


def on_cordon(cluster: ClusterState, event: NodeCordonRequested) -> None:
    book, node_id = cluster.book, event.node_id
    if node_id not in book.nodes and node_id not in book.cordons:
        known = ", ".join(sorted(book.nodes)) or "none"
        text = f"no node {node_id} is known here; known: {known}"
        cluster.do(Reply(event.request_id, "not_found", text))
        return
    before = book.cordons.get(node_id)
    kept = {**book.cordons, node_id: event.reason}
    size = sum(len(name.encode()) + len(reason.encode()) for name, reason in kept.items())
    if event.cordoned and size > CORDONS_BYTES_MAX:
        text = (
            f"the names and reasons of cordoned nodes would take {size} bytes, more than the "
            f"{CORDONS_BYTES_MAX} that are kept: give a shorter reason, or uncordon others"
        )
        cluster.do(Reply(event.request_id, "exhausted", text))
        return
    if event.cordoned and before != event.reason:
        book.cordons[node_id] = event.reason
    elif not event.cordoned and before is not None:
        del book.cordons[node_id]
    if not event.cordoned and node_id in book.nodes:
        health.forgive(cluster, book.nodes[node_id])
    if book.cordons.get(node_id) != before:
        cluster.do(PersistNodes(book.record()))
        name = "node_cordoned" if event.cordoned else "node_uncordoned"
        cluster.note(name, node=node_id, reason=event.reason)
        cluster.touch_active()
    cluster.do(Reply(event.request_id, "", node_id))


def _active(
    cluster: ClusterState, event: StopRequested | PauseRequested | ResumeRequested | ScaleRequested
) -> JobState | None:
    """Return the job, or reply why it cannot be changed and return None."""
    job = cluster.jobs.get(event.job_id)
    if job is None:
        text = f"no job {event.job_id} is known here"
        cluster.do(Reply(event.request_id, "not_found", text))
        return None
    if job.has_ended():
        text = f"job {job.job_id} has ended already: {job.phase.value}"
        cluster.do(Reply(event.request_id, "failed_precondition", text))
        return None
    return job

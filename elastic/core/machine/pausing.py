"""Jobs that release all their workers: a checkpoint, then they leave at a boundary and end.

A user pauses or stops a job, or the queue preempts it for one of higher priority.

Rule: the request for a pause and the order to leave are durable; the progress before is not: after
a restart of the coordinator it starts again with a checkpoint. A group that is about to finish may
finish, and one that loses members meanwhile pauses with the newest existing checkpoint. A pause has
no time limit. A preempted job has a deadline for the checkpoint and another for the boundary. If it
has no checkpoint by then it continues to train, and the queue chooses others; nor does the queue
count on the slots of a pause that takes longer. Jobs preempted for the same job leave when all of
them can, so that none leaves for nothing.
"""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.facts import ExitCause, ExitKind, JobPhase, WorkerPhase
from elastic.core.machine import reconcile, saves, timeouts
from elastic.core.machine.announcing import stop_worker
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.transitions import ReleasePhase
from elastic.core.policy import eviction
from elastic.core.policy.decision import Decision
from elastic.core.policy.eviction import EvictionSave
from elastic.core.policy.membership import GroupAction, GroupPlan


def advance(cluster: ClusterState, job: JobState) -> None:
    """Do the next step of releasing the workers of a job that should hold none."""
    if not job.must_release_workers() or job.has_ended():
        return
    if not job.is_open:
        _release_workers(cluster, job)
        _touch_co_preempted(cluster, job)
        return
    if job.release.stopping and job.newest.training_since_ns is not None and not job.is_in_place():
        # Its loop has ended: there is no next boundary. It ends by itself, once its last
        # checkpoint is written and its code is through, or is ended at the deadline.
        if _has_time(cluster, job):
            job.reason = f"{job.release.stopping}: ends with its train function"
            return
        reconcile.end_job(cluster, job, JobPhase.STOPPED, job.release.stopping)
        return
    _mind_time(cluster, job)
    saving = _saving(cluster, job).value
    if saving is EvictionSave.IN_VAIN and not job.release.is_leaving:
        _train_on(cluster, job)
    elif not _can_leave(job):
        return
    elif job.release.is_leaving:
        job.reason = _leaves(job)
    elif saving is EvictionSave.AWAITED:
        _save(cluster, job)
    elif late := [other for other in _co_preempted(cluster, job) if not _may_leave(cluster, other)]:
        job.reason = f"{_yields(job)} as soon as {late[0].job_id} can, too"
    else:
        _leave(cluster, job)


def _saving(cluster: ClusterState, job: JobState) -> Decision[EvictionSave]:
    """Decide whether its members continue until a checkpoint is written."""
    is_saving = job.release.phase is ReleasePhase.SAVING
    return eviction.judge_saving(
        in_place=bool(job.spec.run_path) and job.is_in_place(),
        is_saved=job.release.phase is ReleasePhase.SAVED,
        num_checkpoints=len(job.reports.checkpoints),
        # Only a preemption has a deadline; it counts from the checkpoint request.
        save_by_ns=job.release.deadline_ns if job.release.yields_to and is_saving else None,
        now_ns=cluster.now_ns,
    )


def _has_time(cluster: ClusterState, job: JobState) -> bool:
    """Return whether the deadline is not over, which a pause gets here; the job wakes at it."""
    if (job.release.paused or job.release.is_leaving) and job.release.deadline_ns is None:
        job.release.deadline_ns = cluster.now_ns + ns(cluster.config.preemption_deadline_s)
    if job.release.deadline_ns is None or cluster.now_ns < job.release.deadline_ns:
        timeouts.wake(job, job.release.deadline_ns)
        return True
    return False


def _mind_time(cluster: ClusterState, job: JobState) -> None:
    """Replan the queue once a pause takes longer than a preemption may.

    Time counts from its beginning: its leader may evaluate for hours before it can save at all.
    A job ordered to leave by an earlier coordinator gets the whole time again. Its members give up
    a checkpoint that storage does not accept, so it is requested again.
    """
    if _has_time(cluster, job) or not job.release.paused:
        return
    now_ns = cluster.now_ns
    if _is_counted_on(cluster, job):
        cluster.queue.is_outdated = True
    if job.release.phase is ReleasePhase.SAVING:
        if now_ns >= job.release.request_again_ns:
            saves.request_checkpoint(cluster, job)
            job.release.request_again_ns = now_ns + eviction.retry_ns(cluster.config)
        timeouts.wake(job, job.release.request_again_ns)


def _save(cluster: ClusterState, job: JobState) -> None:
    """Request a checkpoint; a preemption has a deadline for it."""
    if job.release.phase is ReleasePhase.NONE:
        job.release.move(ReleasePhase.SAVING)
        saves.request_checkpoint(cluster, job)
        job.release.pause_request = job.reports.save_request
        job.release.deadline_ns = cluster.now_ns + ns(cluster.config.preemption_deadline_s)
        timeouts.wake(job, job.release.deadline_ns)
    job.reason = f"{_yields(job)} as soon as a checkpoint is written{_unsaved(job)}"


def _unsaved(job: JobState) -> str:
    """Return why that takes long, as the end of a sentence; "" if storage takes what it gets."""
    refused = next((w.telemetry.unsaved for w in job.present_members() if w.telemetry.unsaved), "")
    if not refused:
        return ""
    return (
        f", and storage refuses it ({refused}): make room, or mend the storage; it is tried again"
    )


def _leave(cluster: ClusterState, job: JobState) -> None:
    """Ask its members to leave at a boundary."""
    job.release.move(ReleasePhase.LEAVING)
    job.release.deadline_ns = cluster.now_ns + ns(cluster.config.preemption_deadline_s)
    job.reason = _leaves(job)
    # Members that do not leave by then may be cut off: see `JobState.candidates`.
    timeouts.wake(job, job.release.deadline_ns)
    cause = "pause" if job.release.paused else "preempt"
    reconcile.request_leave(
        cluster, job, GroupPlan(GroupAction.ASK, cause=cause, saves=True), job.reason
    )
    _touch_co_preempted(cluster, job)


def _train_on(cluster: ClusterState, job: JobState) -> None:
    """Cancel a preemption that would lose all work: the queue chooses another job, or waits."""
    cluster.note("gives_way_in_vain", job.job_id, to=job.release.yields_to)
    job.release.passed_over_until_ns = cluster.now_ns + eviction.retry_ns(cluster.config)
    cluster.queue.is_outdated = True


def _co_preempted(cluster: ClusterState, job: JobState) -> list[JobState]:
    """Return other jobs that still hold workers and are preempted for the same job, or pause."""
    if job.release.paused:
        return []
    first = job.release.yields_to.partition(" ")[0]
    return [
        other
        for other in cluster.active()
        if other is not job
        and other.is_open
        and (_is_counted_on(cluster, other) or other.release.yields_to.partition(" ")[0] == first)
    ]


def _is_counted_on(cluster: ClusterState, job: JobState) -> bool:
    """Return whether it pauses, and the queue has already allocated its slots to others."""
    return job.release.paused and job.job_id not in cluster.queue.grants


def _touch_co_preempted(cluster: ClusterState, job: JobState) -> None:
    for other in cluster.active():
        if (
            other is not job
            and other.release.yields_to
            and other.is_open
            and not other.release.is_leaving
        ):
            cluster.touch(other)


def _may_leave(cluster: ClusterState, job: JobState) -> bool:
    """Return whether a preempted job can leave at the next boundary."""
    return job.release.is_leaving or (
        _can_leave(job) and _saving(cluster, job).value is EvictionSave.OVER
    )


def _can_leave(job: JobState) -> bool:
    """Return whether its group trains or leaves, is complete, and is not about to end."""
    has_trained = job.release.is_leaving or job.newest.training_since_ns is not None
    return has_trained and _is_whole(job) and not (_is_ending(job) or job.is_end_announced())


def _is_whole(job: JobState) -> bool:
    """Return whether no member is lost; else the group is replaced once all have reported."""
    return all(w in job.workers for w in job.member_ids())


def _is_ending(job: JobState) -> bool:
    return any(w.report.phase is WorkerPhase.FINISHED for w in job.present_members())


def _yields(job: JobState) -> str:
    if job.release.stopping:
        return f"stops ({job.release.stopping})"
    return "pauses" if job.release.paused else f"gives way to {job.release.yields_to}"


def _leaves(job: JobState) -> str:
    workers = job.present_members()
    out = sum(1 for w in workers if w.report.phase is WorkerPhase.READY)
    if out and job.is_in_place():
        return f"{_yields(job)}: {out} of {len(workers)} members have saved their part and left"
    return f"{_yields(job)} at the next boundary"


def _release_workers(cluster: ClusterState, job: JobState) -> None:
    """Persist that a job without a group is paused or preempted, and end its workers."""
    if job.release.paused:
        _pause(cluster, job)
        if job.has_ended():
            return
    elif not job.release.preempted_by:
        _wait_again(cluster, job)
    detail = "job paused" if job.release.paused else f"its job gave way to {job.release.yields_to}"
    for worker_id in sorted(job.workers):
        stop_worker(cluster, job, worker_id, ExitCause(ExitKind.STOPPED, detail=detail))


def _pause(cluster: ClusterState, job: JobState) -> None:
    if job.phase is JobPhase.PAUSED:
        return
    if job.release.stopping:
        reconcile.end_job(cluster, job, JobPhase.STOPPED, job.release.stopping)
        return
    job.move(JobPhase.PAUSED, cluster.now_ns)
    job.waits_for = ""
    job.reason = f"paused by a user: elastic resume {job.job_id}"
    job.reports.save_request, job.wake_ns = 0, None
    cluster.persist(job)
    cluster.note("job_paused", job.job_id, generation=job.generation)


def _wait_again(cluster: ClusterState, job: JobState) -> None:
    """Put it back into the queue; it continues from its checkpoint automatically."""
    job.release.preempted_by = job.release.yields_to
    job.reason = f"waiting: preempted by {job.release.preempted_by}; its workers end"
    job.reports.save_request = 0
    cluster.persist(job)
    cluster.note(
        "job_preempted", job.job_id, by=job.release.preempted_by, generation=job.generation
    )

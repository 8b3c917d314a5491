"""Jobs that give all their workers back: a checkpoint, then they leave at a boundary and end.

A user pauses a job, or the queue has it make room for one of higher priority.

Rule: that a pause is wanted is durable, how far it has come is not: after a restart of the
coordinator it begins again with a checkpoint. A group that is about to finish is let finish, and
one whose members are lost meanwhile rests on the newest checkpoint that there is. A pause takes as
long as it takes; who makes room has a deadline for the checkpoint and another for the boundary,
unless there is no checkpoint at all to go on from.
"""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.events.coordinator import Persist
from elastic.core.machine import saves, settle
from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.policy.membership import Act, Plan
from elastic.core.world import ExitCause, ExitKind, JobPhase, WorkerPhase


def advance(cluster: Cluster, job: JobState) -> None:
    """Do the next thing on the way to rest of a job that is to hold no workers."""
    if not job.must_rest() or job.has_ended():
        return
    if not job.is_open:
        _rest(cluster, job)
    elif job.training_since_ns is None or not _is_whole(job) or _is_ending(job):
        return
    elif job.gives_all:
        job.reason = _leaves(job)
    elif _waits_for_checkpoint(cluster, job):
        if not job.pause_wish:
            saves.wish(cluster, job)
            job.pause_wish = job.save_request
        job.reason = _saves(job)
    else:
        job.gives_all = True
        job.rest_by_ns = cluster.now_ns + ns(cluster.config.preemption_deadline_s)
        job.reason = _leaves(job)
        # Who does not leave by then is cut off, if that is due at all: see `JobState.candidates`.
        settle.wake(job, job.rest_by_ns)
        settle.ask(
            cluster, job, Plan(Act.ASK, cause="pause" if job.paused else "preempt"), job.reason
        )


def _waits_for_checkpoint(cluster: Cluster, job: JobState) -> bool:
    """Return whether its members go on until a checkpoint is written."""
    if not job.spec.run_path or not job.is_in_place() or job.is_saved:
        return False
    if job.paused:
        return True
    if job.rest_by_ns is None:
        job.rest_by_ns = cluster.now_ns + ns(cluster.config.preemption_deadline_s)
    if cluster.now_ns < job.rest_by_ns:
        settle.wake(job, job.rest_by_ns)
        return True
    return not job.checkpoints


def _is_whole(job: JobState) -> bool:
    """Return whether no member is lost; else the group is replaced as soon as all were heard."""
    return all(w in job.workers for w in job.member_ids())


def _is_ending(job: JobState) -> bool:
    workers = [job.workers[w] for w in job.member_ids() if w in job.workers]
    return any(w.report.phase is WorkerPhase.FINISHED for w in workers)


def _saves(job: JobState) -> str:
    if job.paused:
        return "pauses as soon as a checkpoint is written"
    return f"gives way to {job.gives_way_to} as soon as a checkpoint is written"


def _leaves(job: JobState) -> str:
    if job.paused:
        return "pauses at the next boundary"
    return f"gives way to {job.gives_way_to} at the next boundary"


def _rest(cluster: Cluster, job: JobState) -> None:
    """No group is out there: write down that it rests, and end its workers."""
    if job.paused:
        _pause(cluster, job)
    elif not job.preempted_by:
        _wait_again(cluster, job)
    detail = "job paused" if job.paused else f"its job gave way to {job.gives_way_to}"
    for worker_id in sorted(job.workers):
        settle.stop_worker(cluster, job, worker_id, ExitCause(ExitKind.STOPPED, detail=detail))


def _pause(cluster: Cluster, job: JobState) -> None:
    if job.phase is JobPhase.PAUSED:
        return
    job.move(JobPhase.PAUSED, cluster.now_ns)
    job.waits_for = ""
    job.reason = f"paused by a user: elastic resume {job.job_id}"
    job.save_request, job.wake_ns = 0, None
    job.is_fresh = True
    cluster.do(Persist((job.record(),)))
    cluster.note("job_paused", job.job_id, generation=job.generation)


def _wait_again(cluster: Cluster, job: JobState) -> None:
    """It is in the queue again, and goes on from its checkpoint by itself."""
    job.preempted_by = job.gives_way_to
    job.reason = f"waiting: preempted by {job.preempted_by}; its workers end"
    job.save_request = 0
    job.is_fresh = True
    cluster.do(Persist((job.record(),)))
    cluster.note("job_preempted", job.job_id, by=job.preempted_by, generation=job.generation)

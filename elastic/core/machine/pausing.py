"""Jobs that a user pauses: a checkpoint, then all workers leave at a boundary and end.

Rule: that a pause is wanted is durable, how far it has come is not: after a restart of the
coordinator it begins again with a checkpoint. A group that is about to finish is let finish, and
one whose members are lost meanwhile rests on the newest checkpoint that there is.
"""

from __future__ import annotations

from elastic.core.events.coordinator import Persist
from elastic.core.machine import saves, settle
from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.policy.membership import Act, Plan
from elastic.core.world import ExitCause, ExitKind, JobPhase, WorkerPhase


def advance(cluster: Cluster, job: JobState) -> None:
    """Do the next thing on a paused job's way to rest."""
    if not job.paused or job.has_ended():
        return
    if not job.is_open:
        _rest(cluster, job)
    elif job.gives_all or job.training_since_ns is None or not _is_whole(job) or _is_ending(job):
        return
    elif job.spec.run_path and job.is_in_place() and not job.is_saved:
        if not job.pause_wish:
            saves.wish(cluster, job)
            job.pause_wish = job.save_request
        job.reason = "pauses as soon as a checkpoint is written"
    else:
        job.gives_all = True
        job.reason = "pauses at the next boundary"
        settle.ask(cluster, job, Plan(Act.ASK, cause="pause"), job.reason)


def _is_whole(job: JobState) -> bool:
    """Return whether no member is lost; else the group is replaced as soon as all were heard."""
    return all(w in job.workers for w in job.member_ids())


def _is_ending(job: JobState) -> bool:
    workers = [job.workers[w] for w in job.member_ids() if w in job.workers]
    return any(w.report.phase is WorkerPhase.FINISHED for w in workers)


def _rest(cluster: Cluster, job: JobState) -> None:
    """No group is out there: write down that it rests, and end its workers."""
    if job.phase is not JobPhase.PAUSED:
        job.move(JobPhase.PAUSED, cluster.now_ns)
        job.waits_for = ""
        job.reason = f"paused by a user: elastic resume {job.job_id}"
        job.save_request, job.wake_ns = 0, None
        cluster.do(Persist((job.record(),)))
        cluster.note("job_paused", job.job_id, generation=job.generation)
    for worker_id in sorted(job.workers):
        cause = ExitCause(ExitKind.STOPPED, detail="job paused")
        settle.stop_worker(cluster, job, worker_id, cause)

"""Checkpoint requests, of a user or of the coordinator: sent to the group until one is recorded.

Rule: requests are numbered, and a greater number is a newer one, also across coordinators. They are
kept in memory only: the user sees within seconds whether a checkpoint was taken, and can repeat
the request; one that is served days later would be useless.
"""

from __future__ import annotations

from elastic.core.events.coordinator import CheckpointRequested, Reply
from elastic.core.facts import JobPhase
from elastic.core.machine.announcing import send_worker
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.transitions import ReleasePhase
from elastic.core.messages import SaveState


def on_requested(cluster: ClusterState, event: CheckpointRequested) -> None:
    """Record the request and send it to the group, or refuse it with the reason."""
    job = cluster.jobs.get(event.job_id)
    if job is None:
        text = f"no job {event.job_id} is known here"
        cluster.do(Reply(event.request_id, "not_found", text))
    elif refusal := _refuse(job):
        cluster.do(Reply(event.request_id, "failed_precondition", refusal))
    else:
        request_checkpoint(cluster, job)
        cluster.do(Reply(event.request_id, "", str(job.reports.save_request)))


def request_checkpoint(cluster: ClusterState, job: JobState, **why: str) -> None:
    """Request a checkpoint of the group; `why` has fields for the event log."""
    cluster.num_saves += 1
    job.reports.save_request = cluster.term.first_number + cluster.num_saves
    for worker in job.present_members():
        remind(cluster, job, worker)
    cluster.note("checkpoint_requested", job.job_id, request=job.reports.save_request, **why)


def remind(cluster: ClusterState, job: JobState, worker: WorkerState) -> None:
    """Send a member of the newest group the pending checkpoint request, if there is one."""
    if job.reports.save_request:
        worker_id = worker.report.worker_id
        send_worker(cluster, worker, SaveState(worker_id, job.generation, job.reports.save_request))


def _refuse(job: JobState) -> str:
    """Return why no checkpoint can be taken of a job now, "" if one can."""
    if job.has_ended():
        return f"job {job.job_id} has ended already: {job.phase.value}"
    if not job.spec.run_path:
        return (
            f"job {job.job_id} has no run directory to keep checkpoints in: submit it with one "
            f"(RunConfig(storage_path=...), or --storage-path)"
        )
    if job.phase is not JobPhase.RUNNING or not job.is_open:
        return f"job {job.job_id} does not train now ({job.reason}): ask again when it does"
    return ""


def served(job: JobState, request: int) -> None:
    """Mark requests up to this number as served: an automatic checkpoint was recorded."""
    if request >= job.reports.save_request:
        job.reports.save_request = 0
    release = job.release
    if release.phase is ReleasePhase.SAVING and release.pause_request <= request:
        release.move(ReleasePhase.SAVED)

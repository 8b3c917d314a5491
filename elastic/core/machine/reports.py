"""Reports of workers, applied to the coordinator's state: metrics, checkpoints, telemetry.

Rule: a report of an earlier generation is refused. One with a checkpoint is durable before it is
acknowledged. Automatic checkpoints are recorded, but shown only in lists of checkpoints. The
outcome of a validation is applied once.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events.coordinator import SendAgent
from elastic.core.facts import (
    CheckpointRecord,
    CheckpointStatus,
    Generation,
    RefusalCode,
    ReportKind,
    SessionId,
)
from elastic.core.machine import saves
from elastic.core.machine.job_parts import Interruption
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.reconcile import forgive
from elastic.core.messages import Progress, Report, ReportAck, is_metrics
from elastic.core.policy import retention


def take_report(cluster: ClusterState, session: SessionId, report: Report) -> None:
    """Record a report, durably if it has a checkpoint; refuse one from an old generation."""
    job = cluster.jobs.get(report.job_id)
    code, refusal = _refuse_report(job, report)
    if job is None or refusal:
        cluster.do(SendAgent(session, _ack(report, code, refusal)))
        if report.checkpoint:
            cluster.note(
                "checkpoint_refused", report.job_id, path=report.checkpoint, reason=refusal
            )
        return
    # An agent that has reconnected resends its newest ones, which may be known.
    number = report.generation, report.index
    is_users = is_metrics(report)
    is_again = is_users and number == job.reports.newest
    if is_users and number > job.reports.newest:
        # A report with a slow upload may come late, and is not the newest.
        job.reports.metrics, job.reports.newest = report.metrics, number
    if report.kind is ReportKind.VALIDATION:
        # Not progress of the run: a new rank 0 resends all results of validations.
        _take_validation(cluster, job, report)
    elif not is_again or report.checkpoint:
        forgive(job)
        if report.checkpoint:
            _record(cluster, job, report)
    cluster.do(SendAgent(session, _ack(report)))
    if is_users and not is_again:
        cluster.note(
            "report",
            job.job_id,
            generation=report.generation,
            index=report.index,
            metrics=report.metrics,
        )


def _ack(report: Report, code: RefusalCode = RefusalCode.NONE, refusal: str = "") -> ReportAck:
    return ReportAck(
        report.worker_id, report.generation, report.index, not refusal, refusal, code, report.kind
    )


def _record(cluster: ClusterState, job: JobState, report: Report) -> None:
    """Record a checkpoint durably, and drop those that the retention policy does not keep."""
    record = CheckpointRecord(
        report.checkpoint,
        report.generation,
        report.index,
        report.metrics,
        report.status,
        report.request,
        report.kind,
    )
    if any(c.path == record.path for c in job.reports.checkpoints):
        return  # A repetition, perhaps in a later generation: the reply was lost.
    # With its first checkpoint it may be preempted.
    cluster.queue.is_outdated = cluster.queue.is_outdated or not job.reports.checkpoints
    # In order of reports, not of arrival: a repeated or late one is not the newest. Automatic
    # ones come from one thread, in order; their index may restart.
    records = (*job.reports.checkpoints, record)
    order = sorted(
        records, key=lambda c: (c.generation, c.automatic, 0 if c.automatic else c.index)
    )
    _keep(job, order)
    if record in job.reports.checkpoints:
        cluster.persist(job)
        cluster.note("checkpoint_recorded", job.job_id, path=report.checkpoint)
        if record.automatic:
            saves.served(job, record.request)
            # A job that pauses or is preempted may wait for it.
            cluster.touch(job)


def _take_validation(cluster: ClusterState, job: JobState, report: Report) -> None:
    """Record the result of a checkpoint's validation; the first result counts."""
    pending = CheckpointStatus.PENDING_VALIDATION
    known = [
        c for c in job.reports.checkpoints if c.path == report.checkpoint and c.status is pending
    ]
    if not known:
        return
    settled = replace(known[0], metrics=report.metrics, status=report.status)
    _keep(job, [settled if c is known[0] else c for c in job.reports.checkpoints])
    cluster.persist(job)
    cluster.note(
        "checkpoint_validated", job.job_id, path=report.checkpoint, status=report.status.value
    )


def drop_damaged(cluster: ClusterState, job: JobState, path: str, found_in: Generation) -> bool:
    """Let the groups to come begin with the checkpoint before this one, which is damaged.

    Args:
        cluster: the state to change.
        job: whose checkpoint it is.
        path: of the checkpoint.
        found_in: the group that found it; a later one may have made another one of this name.

    Returns:
        Whether they begin with another one now, or anew: a job may have been submitted to begin
        with this one.
    """
    recorded = job.reports.checkpoints
    kept = tuple(c for c in recorded if c.path != path or c.generation > found_in)
    if kept != recorded:
        job.reports.checkpoints = kept
        cluster.queue.is_outdated = cluster.queue.is_outdated or not kept
        cluster.persist(job)
        cluster.note("checkpoint_dropped", job.job_id, path=path, reason="damaged")
    return job.latest_checkpoint() != path


def _keep(job: JobState, records: list[CheckpointRecord]) -> None:
    """Apply the retention policy to these records, oldest first."""
    job.reports.checkpoints = retention.keep(
        records,
        num_to_keep=job.spec.num_to_keep,
        score_attribute=job.spec.score_attribute,
        score_order=job.spec.score_order,
    )


def _refuse_report(job: JobState | None, report: Report) -> tuple[RefusalCode, str]:
    """Return why a report does not count, "" if it does."""
    if job is None:
        return RefusalCode.JOB_UNKNOWN, f"job {report.job_id} is not known here"
    if job.has_ended():
        return RefusalCode.JOB_ENDED, f"job {job.job_id} has ended: {job.phase.value}"
    if report.generation != job.generation or not job.is_open:
        state = "is suspended" if report.generation == job.generation else "is over"
        text = f"generation {report.generation} {state}, the job is at {job.generation}"
        return RefusalCode.GENERATION_OVER, text
    if not job.is_member(report.worker_id):
        text = f"worker {report.worker_id} is not a member of generation {job.generation}"
        return RefusalCode.NO_MEMBER, text
    return RefusalCode.NONE, ""


def take_progress(cluster: ClusterState, progress: Progress) -> None:
    """Record telemetry; log when every member has done its first step of the generation."""
    job = cluster.job_of(progress.worker_id)
    if job is None:
        return
    worker, telemetry = job.workers[progress.worker_id], progress.telemetry
    # Also of an earlier generation: it has time that was not booked yet.
    job.ledger.add_report(worker.account, progress.spent, telemetry.position, cluster.now_ns)
    if progress.generation != job.generation:
        return
    if worker.telemetry.unsaved != telemetry.unsaved and job.must_release_workers():
        cluster.touch(job)  # What it waits for has changed.
    worker.steps, worker.telemetry = progress.steps, telemetry
    worker.measured_ns = cluster.now_ns
    # Otherwise a job that always ends at the same step would never be given up.
    is_new = not job.ledger.is_again(telemetry.position)
    if progress.steps and is_new and job.outcome.history.losses:
        forgive(job)
    if progress.worker_id in job.newest.first_steps or not progress.first_step_unix_ns:
        return
    job.newest.first_steps[progress.worker_id] = progress.first_step_unix_ns
    if len(job.newest.first_steps) < len(job.member_ids()):
        return
    group = job.newest.group
    if set(job.member_ids()) <= set(job.newest.first_steps):
        last = max(job.newest.first_steps[w] for w in job.member_ids())
        pause_ns = _pause_ns(cluster, job, last)
        cluster.note(
            "first_step", job.job_id, generation=job.generation, unix_ns=last,
            world_size=len(job.members), cause=group.reason if group is not None else "",
            pause_s=None if pause_ns is None else f"{pause_ns / 1e9:.3f}",
            lost="; ".join(job.newest.interruption.lost), **_behind(job),
        )  # fmt: skip
        job.newest.interruption = Interruption()


def _behind(job: JobState) -> dict[str, str]:
    """Return where a group is that does steps again, because nobody had the state after them."""
    position = min((w.telemetry.position for w in job.present_members()), default=(0, 0))
    if position == (0, 0) or position >= job.ledger.again_until:
        return {}  # Not reported, or nothing is done again.
    return {"at": _position_text(position), "was_at": _position_text(job.ledger.again_until)}


def _position_text(position: tuple[int, int]) -> str:
    epoch, step = position
    return f"epoch {epoch}, step {step}"


def _pause_ns(cluster: ClusterState, job: JobState, last_unix_ns: int) -> int | None:
    """Return how long training was interrupted before this step, None if it was not.

    It counts from when the coordinator noticed. The end is the step's reported time, because in
    large groups the reports themselves are delayed.
    """
    since_ns, ahead_ns = job.newest.interruption.since_ns, cluster.term.unix_ahead_ns
    if since_ns is None:
        return None
    received_ns = cluster.now_ns - since_ns
    if ahead_ns is None:
        return received_ns
    return min(received_ns, max(0, last_unix_ns - ahead_ns - since_ns))

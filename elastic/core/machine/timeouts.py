"""How long workers may take to start, to join a group, or to leave one.

Rule: the time of a member that waits for others does not count; it counts for those it waits for.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S, ns
from elastic.core.facts import WorkerPhase
from elastic.core.machine.announcing import send_worker
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.transitions import GroupPhase
from elastic.core.messages import DumpStacks
from elastic.core.policy.pacing import forming_is_long_after_ns

DUMP_NS = 3 * NS_PER_S // 10
"""Between the request for stacks and the kill: writing them takes some milliseconds, more on a
loaded machine."""

START_S_MIN = 600.0
"""A slow disk may need minutes for the imports of a process, and again for those of its job."""
AHEAD_S_MIN = 4 * 3600.0
"""The same where a worker may be in its train function, which may prepare data for hours."""


def is_somebody_behind(job: JobState) -> bool:
    """Return whether a member of the newest group has not joined it yet."""
    return any(w.report.generation < job.generation for w in _members(job))


def first_out_ns(job: JobState) -> int | None:
    """Return since when members that still form can be late, None while they cannot.

    None while any member has not joined (the others wait for it) or none trains yet (the culprit
    is unknown). Time counts from the first member that trains, so that a link that was cut and has
    healed counts against no member.
    """
    members = _members(job)
    if any(w.report.generation < job.generation for w in members):
        return None
    out = (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
    return min((w.since_ns for w in members if w.report.phase in out), default=None)


def watch_forming(cluster: ClusterState, job: JobState) -> None:
    """Schedule the check of a slowly forming group; after a restart, once all nodes are back."""
    members = _members(job)
    if job.job_id not in cluster.probes.polls and not any(
        cluster.node_of(w).absence.is_unconfirmed for w in members
    ):
        cluster.probes.polls[job.job_id] = cluster.now_ns + forming_is_long_after_ns(len(members))


def does_somebody_wait(cluster: ClusterState, job: JobState) -> bool:
    """Return whether a member of the newest group waits for its peers, or may."""
    return any(may_wait(cluster, job, worker) for worker in _members(job))


def may_wait(cluster: ClusterState, job: JobState, worker: WorkerState) -> bool:
    """Return whether a member reports to wait, or has stalled where that cannot be detected.

    The latter is a member that has begun a collective in a group within its group.
    """
    main_thread = worker.main_thread
    if main_thread is None or main_thread.generation != job.generation:
        return False
    hides = bool(main_thread.begun) and is_stalled(cluster, job, worker)
    return hides or main_thread.waits(job.generation, cluster.now_ns)


def _members(job: JobState) -> list[WorkerState]:
    return job.present_members() if job.is_open else []


def patience_s(cluster: ClusterState, job: JobState, worker: WorkerState) -> float:
    """Return how long a worker may take to start, or to join or leave a group, in seconds."""
    report = worker.report
    if report.phase is WorkerPhase.STARTING:
        # It may run its train function already (`StartWorker.ahead`), up to the first collective:
        # members of the first group may prepare as long as they like.
        least_s = AHEAD_S_MIN if job.is_in_place() else START_S_MIN
        return max(least_s, job.spec.collective_timeout_s)
    limit_s = cluster.config.form_timeout_s
    if not report.in_place or report.phase is not WorkerPhase.TRAINING:
        return limit_s
    # Its loop leaves by itself, at its next micro-batch; user code between epochs may take long.
    limit_s = max(limit_s, job.spec.collective_timeout_s)
    return min(limit_s, job.spec.hang_timeout_s) if is_stalled(cluster, job, worker) else limit_s


def is_stalled(cluster: ClusterState, job: JobState, worker: WorkerState) -> bool:
    """Return whether a worker's main thread has stalled for longer than the hang timeout."""
    main_thread, hang_s = worker.main_thread, job.spec.hang_timeout_s
    if (
        not hang_s
        or main_thread is None
        or not main_thread.is_stalled(worker.report.generation, cluster.now_ns)
    ):
        return False
    return cluster.now_ns - (main_thread.still_since_ns or 0) >= ns(hang_s)


def is_saving(cluster: ClusterState, job: JobState) -> bool:
    """Return whether members save where they leave, and none of those still inside has stalled."""
    if not (job.newest.phase is GroupPhase.SAVING and job.is_in_place()):
        return False
    return not any(
        w.report.phase is WorkerPhase.TRAINING and is_stalled(cluster, job, w)
        for w in job.present_members()
    )


def dump_group_stacks(cluster: ClusterState, job: JobState, why: str) -> None:
    """Request the stacks of all members of the newest group."""
    for worker in _members(job):
        send_worker(cluster, worker, DumpStacks(worker.report.worker_id, why))


def dump_before_kill(
    cluster: ClusterState, worker: WorkerState, since_ns: int, limit_s: float, why: str
) -> int | None:
    """Request the stacks of a worker that is about to be killed for being late.

    Returns:
        When to check again, None when it can be killed.
    """
    until_ns = since_ns + ns(limit_s)
    if cluster.now_ns < until_ns - DUMP_NS:
        return until_ns - DUMP_NS
    if worker.shown_ns < until_ns - DUMP_NS:  # Also if it was late before, and then was not.
        worker.shown_ns = cluster.now_ns
        send_worker(cluster, worker, DumpStacks(worker.report.worker_id, why))
    until_ns = max(until_ns, worker.shown_ns + DUMP_NS)
    return until_ns if cluster.now_ns < until_ns else None

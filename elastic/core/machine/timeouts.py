"""Workers that take too long: to start, to join a group, to leave one, or to move on in it.

Rule: the time of a member that waits for others does not count; it counts for those it waits for.
A worker is killed only after a request for its stacks.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S, ns
from elastic.core.facts import ExitCause, ExitKind, WorkerPhase
from elastic.core.machine.announcing import send_worker, stop_worker
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.transitions import GroupPhase
from elastic.core.messages import DumpStacks
from elastic.core.policy import hang
from elastic.core.policy.decision import Decision
from elastic.core.policy.hang import Hang, WatchedMember
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
        # A joiner may be in its train function already (`StartWorker.ahead`), and prepare as long
        # as members of the first group may: hours.
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


def wake(job: JobState, moment: int | None) -> None:
    """Evaluate the job again at `moment`, or earlier if it has an earlier time."""
    if moment is not None:
        job.wake_ns = moment if job.wake_ns is None else min(job.wake_ns, moment)


# ---------------------------------------------------------------- late to start, join or leave


def end_overdue(cluster: ClusterState, job: JobState) -> None:
    """Kill workers that did not start, join or leave in time.

    Forming members wait for absent ones. If all are forming and none finishes, the hanging one is
    unknown: the group is formed again, and that one will be absent.
    """
    members = job.member_ids() if job.is_open else ()
    first_out: list[int | None] = []
    for worker_id in [*members, *sorted(set(job.workers).difference(members))]:
        worker = job.workers.get(worker_id)
        if worker is None or worker.stop_cause is not None:
            continue
        report, since_ns = worker.report, max(job.newest.announced_ns, worker.group_sent_ns)
        lingers_since_ns, worker.lingers_since_ns = worker.lingers_since_ns, None
        is_forming = report.phase is WorkerPhase.FORMING
        if members and report.generation >= job.generation:  # Only members know that generation.
            if is_forming and not first_out:
                first_out.append(first_out_ns(job))
            if not is_forming or (out_ns := first_out[0]) is None:
                continue
            since_ns = max(since_ns, out_ns)
        if not cluster.node_of(worker).is_live():
            continue
        what = f"join generation {job.generation}"
        is_member = job.is_open and job.is_member(worker_id)
        if report.phase is WorkerPhase.STARTING:
            since_ns = worker.since_ns
            what = "get ready"
        elif is_member and report.phase is WorkerPhase.TRAINING:
            worker.lingers_since_ns = since_ns = lingers_since_ns or since_ns
        elif is_member:
            pass
        elif report.phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING):
            # From the first group without it: later groups do not extend the time.
            since_ns = lingers_since_ns or max(since_ns, worker.since_ns)
            worker.lingers_since_ns = since_ns
            what = f"leave generation {report.generation}"
        else:
            continue
        limit_s = patience_s(cluster, job, worker)
        wake_ns = _dump_before_kill(cluster, worker, since_ns, limit_s, f"has to {what}")
        if wake_ns is not None:
            wake(job, wake_ns)
            continue
        detail = f"did not {what} within {limit_s:g} s"
        if report.phase is WorkerPhase.STARTING:
            detail = (
                f"{worker_id} on node {worker.node_id} {detail}: its log shows where it stands; "
                f"for a slower start set a larger TorchConfig(timeout_s=)"
            )
        stop_worker(cluster, job, worker_id, ExitCause(ExitKind.HUNG, detail=detail))


def _dump_before_kill(
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


# ---------------------------------------------------------------- hung


def judge_members(cluster: ClusterState, job: JobState) -> Decision[Hang]:
    """Decide which members of the newest group hang, and record who only works for long."""
    members = []
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        trains = (
            worker is not None
            and worker.stop_cause is None
            and worker.report.phase is WorkerPhase.TRAINING
            and worker.report.generation == job.generation
            and cluster.node_of(worker).is_live()
        )
        members.append(WatchedMember(worker_id, trains, worker.main_thread if worker else None))
    timeout_ns = ns(job.spec.hang_timeout_s)
    decision = hang.judge(job.generation, members, cluster.now_ns, timeout_ns)
    waiting = sum(
        1 for m in members if m.main_thread and m.main_thread.waits(job.generation, cluster.now_ns)
    )
    works = decision.value.works
    job.newest.hang.works = f"{works}; {waiting} of {len(members)} wait for it" if works else ""
    return decision


def end_hung(cluster: ClusterState, job: JobState, decision: Decision[Hang]) -> None:
    """Request the stacks of all members when one hangs, and kill it after `DUMP_NS`."""
    if decision.value.is_stuck:
        _unstick(cluster, job, decision.reason)
    culprits = decision.value.culprits
    seconds = f"{(cluster.now_ns - decision.value.since_ns) / NS_PER_S:.1f}"
    # A member that moves after all is not killed, however late.
    job.newest.hang.culprits = {
        worker_id: at for worker_id, at in job.newest.hang.culprits.items() if worker_id in culprits
    }
    fresh = [worker_id for worker_id in culprits if worker_id not in job.newest.hang.culprits]
    for worker_id in fresh:
        job.newest.hang.culprits[worker_id] = cluster.now_ns
        worker = job.workers[worker_id]
        main_thread = worker.main_thread
        cluster.note(
            "worker_hung",
            job.job_id,
            worker=worker_id,
            node=worker.node_id,
            rank=job.rank_of(worker_id),
            epoch=main_thread.epoch if main_thread else "",
            step=main_thread.step if main_thread else "",
            seconds=seconds,
        )
    if fresh:
        dump_group_stacks(cluster, job, decision.reason)
    for worker_id in culprits:
        if cluster.now_ns - job.newest.hang.culprits[worker_id] >= DUMP_NS:
            detail = f"did not move for {seconds} s: {decision.reason}"
            stop_worker(cluster, job, worker_id, ExitCause(ExitKind.HUNG, detail=detail))
            cluster.touch(job)


def _unstick(cluster: ClusterState, job: JobState, why: str) -> None:
    """Request the stacks of all members, and mark the group as stuck, so that it is replaced."""
    if job.newest.hang.stuck:
        return
    job.newest.hang.stuck = why
    cluster.note("group_stuck", job.job_id, generation=job.generation, reason=why)
    dump_group_stacks(cluster, job, why)
    cluster.touch(job)

"""Reconciles one job with the current facts: form, ask, suspend, start, stop, end.

Rule: `reconcile_job` runs after every event that touched the job. It calls the policies and turns
their decisions into effects. A group is persisted before its announcement is sent to any member.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from elastic.core.config import ns
from elastic.core.facts import (
    NO_GENERATION,
    ExitCause,
    ExitKind,
    Generation,
    Group,
    JobId,
    JobPhase,
    Member,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine import (
    announcing,
    copies,
    draining,
    early_finish,
    feeding,
    invariants,
    node_links,
    queueing,
    saves,
    timeouts,
)
from elastic.core.machine.announcing import send_worker, stop_order, stop_worker
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.timeouts import wake
from elastic.core.machine.transitions import GroupPhase
from elastic.core.messages import Announce, LeaveGroup, StartWorker
from elastic.core.policy import failure, membership
from elastic.core.policy.membership import GroupAction, GroupPlan
from elastic.core.policy.pacing import forming_is_long_after_ns
from elastic.core.policy.ranks import assign_ranks
from elastic.core.telemetry import Telemetry
from elastic.errors import check

ROUNDS_MAX = 8
"""A job settles in two or three rounds; more mean that two policies contradict each other."""


def reconcile_job(cluster: ClusterState, job: JobState) -> None:
    """Apply the policies until the job's state is stable under the current facts."""
    job.wake_ns, before = None, job.generation
    if job.has_ended():
        _stop_all(cluster, job)
        copies.end(cluster, job)
        return
    if feeding.has_nobody(cluster, job):
        end_job(cluster, job, JobPhase.STOPPED, f"the job that it fed, {job.spec.feeds}, is over")
        return
    if job.phase is JobPhase.PAUSED:
        return
    if announcing.announce_end_early(cluster, job):
        job.wake_ns = cluster.now_ns + 1
        return
    wake(job, node_links.settle(cluster, job))
    if job.newest.leavers.is_news:
        # Once for all that came together: a cloud may take a thousand nodes at once.
        job.newest.leavers.is_news = False
        remind_of_leavers(cluster, job, job.member_ids())
    if job.newest.anew_ns is not None:
        # A member whose process is spent gets a successor before the next group is decided. Else
        # a new member would train without it, and be spent itself when the successor joins.
        _start_workers(cluster, job)
    for _ in range(ROUNDS_MAX):
        timeouts.end_overdue(cluster, job)
        if _is_complete(job):
            end_job(cluster, job, JobPhase.SUCCEEDED, "all workers finished")
            return
        if not _settle_group(cluster, job):
            break
    else:
        check(False, f"job {job.job_id} does not settle: {job.reason}")
    if job.has_ended():
        return
    if job.generation > before and announcing.is_large(cluster, job):
        job.wake_ns = cluster.now_ns + 1  # All else can wait until they are notified.
        return
    _save_before_they_leave(cluster, job)
    _stop_leavers(cluster, job)
    _stop_surplus(cluster, job)
    if _start_workers(cluster, job) and not job.is_open:
        _settle_group(cluster, job)
    _explain_waiting(cluster, job)
    _watch_health(cluster, job)
    wake(job, copies.settle(cluster, job))
    wake(job, feeding.settle(cluster, job))


def end_job(cluster: ClusterState, job: JobState, phase: JobPhase, reason: str) -> None:
    """Persist how the job ended, then order every worker to end."""
    job.move(phase, cluster.now_ns)
    job.newest.move(GroupPhase.NONE)
    job.reason = reason
    # No worker starts for it any more, and two hundred ended jobs are kept in memory.
    job.spec = replace(job.spec, entry=replace(job.spec.entry, payload=b""))
    if phase is JobPhase.SUCCEEDED:
        job.outcome.failure, job.outcome.failed_worker, job.outcome.rank_failures = None, "", ()
        job.outcome.result = job.outcome.finished[job.member_ids()[0]]
    cluster.persist(job)
    cluster.note("job_ended", job.job_id, phase=phase.value, reason=reason)
    cluster.touch(job)
    cluster.touch_active()


def hurry(cluster: ClusterState, job: JobState) -> None:
    """End the workers of a job that has ended, whatever their scripts are doing."""
    job.release.hurries = True
    for worker_id in sorted(job.workers):
        if job.workers[worker_id].stop_cause is not None:
            send_worker(
                cluster, job.workers[worker_id], stop_order(cluster, job, job.workers[worker_id])
            )


def _send_group(cluster: ClusterState, worker: WorkerState, message: Announce | LeaveGroup) -> None:
    """Send a worker the newest group; its timeout starts now if its agent is connected."""
    if cluster.node_of(worker).session is not None:
        worker.group_sent_ns = cluster.now_ns
    send_worker(cluster, worker, message)


def remind_of_leavers(cluster: ClusterState, job: JobState, workers: Iterable[WorkerId]) -> None:
    """Send these members of the newest group its leaving nodes, if there are any."""
    news = draining.news(cluster, job)
    for worker_id in workers if news is not None else ():
        worker = job.workers.get(worker_id)
        if worker is not None and news is not None:
            send_worker(cluster, worker, replace(news, worker_id=worker_id))


# ---------------------------------------------------------------- the group


def _settle_group(cluster: ClusterState, job: JobState) -> bool:
    """Apply the membership policy; return True if that may change its next decision."""
    candidates = [*job.candidates(cluster.book).values()]
    current = replace(job.current(), is_saving=timeouts.is_saving(cluster, job))
    decision = membership.decide(job.limits, current, candidates, cluster.now_ns, cluster.config)
    wake(job, decision.wake_ns)
    plan = decision.value
    if plan.dumps_stacks:
        timeouts.dump_group_stacks(cluster, job, decision.reason)
    if plan.cause == "broken" and plan.action in (GroupAction.FORM, GroupAction.REPLACE):
        if early_finish.has_finished(job):
            verdict = early_finish.charge_early_finish(cluster, job)
            wake(job, verdict.wake_ns)
            if verdict.value is early_finish.EarlyFinishOutcome.WAIT:
                _set_reason(job, verdict.reason)
                return False
            if verdict.value is early_finish.EarlyFinishOutcome.FAIL:
                end_job(cluster, job, JobPhase.FAILED, verdict.reason)
                return False
            decision = replace(decision, reason=verdict.reason)
        elif _charge_broken_group(cluster, job):
            return False
    if plan.action is GroupAction.FORM:
        if draining.charge_preemptions(cluster, job, plan.members):
            end_job(cluster, job, JobPhase.FAILED, job.reason)
            return False
        _form(cluster, job, plan, decision.reason)
        _set_reason(job, membership.forming(0, len(plan.members)))
        return False
    if plan.action is GroupAction.ASK:
        request_leave(cluster, job, plan, decision.reason)
        _set_reason(job, decision.reason)
        return False
    if plan.action in (GroupAction.SUSPEND, GroupAction.REPLACE):
        if draining.charge_preemptions(cluster, job, plan.members):
            end_job(cluster, job, JobPhase.FAILED, job.reason)
            return False
        _end_group(cluster, job, plan, decision.reason)
        return True
    if plan.action is GroupAction.WAIT:
        job.waits_for = decision.reason
    else:
        _set_reason(job, decision.reason)
    return False


def _set_reason(job: JobState, reason: str) -> None:
    """Record that there is a group, or that one is forming, with the reason to show."""
    job.waits_for, job.reason = "", node_links.explain(job, reason)


def _charge_broken_group(cluster: ClusterState, job: JobState) -> bool:
    """Charge a group that broke without a loss; return whether the job has ended for it.

    Not while one of its nodes leaves, which broke it, nor while a member is still joining: the
    others have only waited for it, and its time is bounded.
    """
    if draining.nodes_of(cluster, job) or timeouts.is_somebody_behind(job):
        return False
    node_links.check_into_broken(cluster, job)
    decision = failure.judge_break(job.outcome.history, cluster.config)
    job.outcome.history = decision.value.history
    if decision.value.job_fails:
        end_job(cluster, job, JobPhase.FAILED, decision.reason)
    return decision.value.job_fails


def _form(cluster: ClusterState, job: JobState, plan: GroupPlan, reason: str) -> None:
    """Number, rank, persist and announce the next group."""
    node_of = {w: job.workers[w].node_id for w in plan.members}
    previous = job.newest.group
    places = assign_ranks(plan.members, node_of, previous.nodes if previous else None)
    former = frozenset(job.member_ids())
    before = former if job.is_open else frozenset()
    job.newest.group = Group(
        generation=job.generation + 1,
        members=tuple(
            Member(p.worker_id, p.node_id, p.rank, job.workers[p.worker_id].report.store_address)
            for p in places
        ),
        reason=plan.cause,
        key=_key_of_group(cluster, job.job_id, job.generation + 1),
    )
    job.newest.placed = job.newest.group, places
    job.newest.move(GroupPhase.OPEN)
    job.newest.leavers.is_unsaved = plan.is_unsaved
    job.newest.hang.stuck = ""
    job.newest.anew_ns = None
    if plan.cause != "broken" or job.newest.training_since_ns is not None:
        job.node_links.nowhere_ns = cluster.now_ns
    job.newest.announced_ns, job.newest.training_since_ns = cluster.now_ns, None
    soonest_s = min(cluster.config.form_timeout_s, job.spec.hang_timeout_s or inf)
    wake(job, cluster.now_ns + ns(soonest_s))
    cluster.probes.polls[job.job_id] = cluster.now_ns + forming_is_long_after_ns(len(places))
    job.newest.holders = former if job.newest.first_steps else job.newest.holders
    job.newest.first_steps, job.outcome.finished = {}, {}
    job.release.preempted_by = ""
    job.reason = reason
    cluster.queue.is_outdated = True
    job.ledger.group_formed()
    for worker in job.workers.values():
        cluster.book_time(job, worker)
    invariants.check_bounds(job)
    job.move(JobPhase.RUNNING, cluster.now_ns)
    cluster.persist(job)
    announce = announcing.announcer(cluster, job)
    for place in places:
        worker = job.workers[place.worker_id]
        worker.steps, worker.telemetry = 0, Telemetry()
        _send_group(cluster, worker, announce(place))
        saves.remind(cluster, job, worker)
    remind_of_leavers(cluster, job, plan.members)
    for worker_id in sorted(before - set(plan.members)):
        if worker_id in job.workers:
            leave = LeaveGroup(worker_id, job.generation - 1, False, reason)
            _send_group(cluster, job.workers[worker_id], leave)
    cluster.note(
        "group_formed",
        job.job_id,
        generation=job.generation,
        world_size=len(places),
        cause=plan.cause,
        reason=reason,
    )


def _key_of_group(cluster: ClusterState, job_id: JobId, generation: Generation) -> str:
    """Return the secret with which the members of a group authenticate to each other."""
    name = f"group\n{job_id}\n{generation}".encode()
    return hashlib.blake2b(name, key=cluster.term.secret, digest_size=32).hexdigest()


def request_leave(cluster: ClusterState, job: JobState, plan: GroupPlan, reason: str) -> None:
    """Ask every member to leave at the next boundary; a later request replaces an earlier one.

    That they save is persisted, so that a new coordinator allows the longer timeout of a save. The
    request is sent before that is durable: losing the flag shortens a timeout, and does no harm.
    """
    is_news = job.newest.phase is GroupPhase.SAVING or plan.saves
    job.newest.leavers.saved_before = job.reports.automatic_of(job.generation)
    job.newest.move(GroupPhase.SAVING if plan.saves else GroupPhase.LEAVING)
    for worker_id in job.member_ids():
        worker = job.workers[worker_id]
        leave = LeaveGroup(worker_id, job.generation, True, plan.cause, saves=plan.saves)
        send_worker(cluster, worker, leave)
    if is_news:
        cluster.persist(job)
    cluster.note(
        "change_planned", job.job_id, generation=job.generation, cause=plan.cause, reason=reason
    )


def _end_group(cluster: ClusterState, job: JobState, plan: GroupPlan, reason: str) -> None:
    """Order the members to leave at once; they keep their state and wait, or are replaced."""
    job.newest.move(GroupPhase.NONE)
    job.newest.anew_ns = cluster.now_ns if plan.action is GroupAction.REPLACE else None
    cluster.queue.is_outdated = True
    job.newest.announced_ns = cluster.now_ns
    job.reason = reason
    for worker in job.workers.values():
        cluster.book_time(job, worker)
    job.move(JobPhase.PENDING, cluster.now_ns)
    cluster.persist(job)
    for worker in job.present_members():
        leave = LeaveGroup(worker.report.worker_id, job.generation, False, plan.cause)
        _send_group(cluster, worker, leave)
    cluster.note("group_suspended", job.job_id, generation=job.generation, reason=reason)


def _explain_waiting(cluster: ClusterState, job: JobState) -> None:
    """Record why the job waits, if it does; log it when it changes."""
    gave_way = f"preempted by {job.release.preempted_by}; " if job.release.preempted_by else ""
    full = f"waiting: {gave_way}{node_links.explain(job, job.waits_for)}"
    if job.waits_for and job.reason != full and not job.release.paused:
        job.reason = full
        cluster.note("waiting", job.job_id, reason=full.removeprefix("waiting: "))


def _is_complete(job: JobState) -> bool:
    """Return whether every remaining member has finished this generation.

    Rank 0 must be among the finished ones, as it usually writes the results of a run; and user
    code must not have raised in a member after others had returned.
    """
    if not job.is_open or job.member_ids()[0] not in job.outcome.finished:
        return False
    if job.outcome.failure_generation == job.generation:
        return False
    left = job.present_members()
    return bool(left) and all(worker.has_finished(job.generation) for worker in left)


def _save_before_they_leave(cluster: ClusterState, job: JobState) -> None:
    """Request a checkpoint in time, if the group cannot continue without the leaving nodes."""
    decision = draining.save_is_due(cluster, job)
    wake(job, decision.wake_ns)
    if not decision.value:
        return
    job.newest.leavers.saved_ns = cluster.now_ns
    wake(job, draining.save_is_due(cluster, job).wake_ns)
    saves.request_checkpoint(cluster, job, reason=decision.reason)


# ---------------------------------------------------------------- workers


def _start_workers(cluster: ClusterState, job: JobState) -> bool:
    """Start as many more workers as max and the nodes allow; return whether any was started."""
    is_ending = any(w.report.phase is WorkerPhase.FINISHED for w in job.present_members())
    if job.is_open and is_ending:
        return False
    if job.must_release_workers():
        return False
    alive = [w for w in job.workers.values() if w.stop_cause is None]
    have = len(alive)
    if cluster.book.draining or job.release.yields or job.node_links.out:
        have -= sum(1 for w in alive if job.is_to_leave(w, cluster.node_of(w)))
    if have >= job.limits.max_workers:
        return False
    not_before = max(job.outcome.restart_at_ns, cluster.term.hold_until_ns)
    if cluster.now_ns < not_before:
        wake(job, not_before)
        return False
    hosting: dict[NodeId, int] = {}
    for worker in alive:
        hosting[worker.node_id] = hosting.get(worker.node_id, 0) + 1
    nodes, in_place = queueing.place(cluster, job, hosting, have), job.is_in_place()
    for node_id in nodes:
        state = cluster.book.nodes[node_id]
        worker_id = state.next_worker_id()
        report = WorkerReport(worker_id, job.job_id, WorkerPhase.STARTING, NO_GENERATION)
        worker = cluster.add_worker(job, state, report)
        send_worker(cluster, worker, StartWorker(worker_id, job.spec, ahead=in_place))
        wake(job, cluster.now_ns + ns(timeouts.patience_s(cluster, job, worker)))
        cluster.note("worker_starting", job.job_id, worker=worker_id, node=node_id)
    if (
        not nodes
        and not job.is_open
        and not any(w.report.phase is WorkerPhase.STARTING for w in alive)
    ):
        job.waits_for = queueing.explain(cluster, job, hosting, have)
    return bool(nodes)


def _stop_leavers(cluster: ClusterState, job: JobState) -> None:
    """End workers on draining nodes, and released ones, as soon as no group needs them.

    The last holders of the state of a suspended run stay as long as their node does: a group that
    they can pass it on to may still form.
    """
    if not cluster.book.draining and not job.release.yields:
        return
    holders = job.state_holders()
    gives_back = job.must_release_workers() or bool(job.release.yields)
    waits = not (job.is_open or gives_back) and all(
        cluster.node_of(job.workers[w]).drain.is_on for w in holders
    )
    for worker_id in sorted(job.workers):
        node = cluster.node_of(job.workers[worker_id])
        if job.is_open and job.is_member(worker_id):
            continue
        leave_by_ns = node.drain.by_ns or 0
        if waits and worker_id in holders and cluster.now_ns < leave_by_ns:
            wake(job, leave_by_ns)
        elif node.drain.is_on or worker_id in job.release.yields:
            detail = (
                f"node drains: {node.reason}" if node.drain.is_on else "given back to another job"
            )
            stop_worker(cluster, job, worker_id, ExitCause(ExitKind.STOPPED, detail=detail))


def _stop_surplus(cluster: ClusterState, job: JobState) -> None:
    """End workers above max that no group needs: first those excluded by links, then the newest.

    Last those with the run's state, and not before the group has it.
    """
    out = job.node_links.out
    if len(job.workers) <= job.limits.max_workers:
        return
    alive = [
        worker_id
        for worker_id, worker in sorted(job.workers.items())
        if worker.stop_cause is None
        and not cluster.node_of(worker).drain.is_on
        and not job.gives_back(worker_id)
    ]
    holders = job.state_holders()
    needed = holders if job.is_open and not job.newest.first_steps else frozenset()
    idle = [w for w in alive if w not in needed and not (job.is_open and job.is_member(w))]

    def last_to_end(worker_id: WorkerId) -> tuple[bool, bool, int, WorkerId]:
        worker = job.workers[worker_id]
        return worker_id in holders, worker.node_id not in out, -worker.since_ns, worker_id

    idle.sort(key=last_to_end)
    high = job.limits.max_workers
    for worker_id in idle[: max(0, len(alive) - high)]:
        cause = ExitCause(ExitKind.STOPPED, detail=f"max_workers={high} is reached")
        stop_worker(cluster, job, worker_id, cause)


def _stop_all(cluster: ClusterState, job: JobState) -> None:
    """End every worker of a job that has ended."""
    for worker_id in sorted(job.workers):
        cause = ExitCause(ExitKind.STOPPED, detail=f"job {job.phase.value}")
        stop_worker(cluster, job, worker_id, cause)


def _watch_health(cluster: ClusterState, job: JobState) -> None:
    """Note when the whole group trains, and forgive losses once it has trained long enough."""
    if not job.is_open:
        return
    if job.newest.training_since_ns is not None and not job.outcome.history.losses:
        return
    members = [job.workers.get(w) for w in job.member_ids()]
    training = (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
    # A member known from the journal only is no evidence that it trains.
    is_training = all(
        w
        and w.report.phase in training
        and w.report.generation == job.generation
        and not cluster.node_of(w).absence.is_unconfirmed
        for w in members
    )
    if not is_training and job.newest.training_since_ns is None:
        timeouts.watch_forming(cluster, job)
    if is_training and job.newest.training_since_ns is None:
        job.newest.training_since_ns = cluster.now_ns
        if not timeouts.does_somebody_wait(cluster, job):
            cluster.probes.polls.pop(job.job_id, None)
        took_ms = (cluster.now_ns - job.newest.announced_ns) // 1_000_000
        cluster.note("group_training", job.job_id, generation=job.generation, took_ms=took_ms)
    if job.newest.training_since_ns is not None and job.outcome.history.losses:
        until = job.newest.training_since_ns + ns(cluster.config.healthy_after_s)
        if cluster.now_ns < until:
            wake(job, until)
        elif timeouts.does_somebody_wait(cluster, job):
            # A group without progress is not healthy, or a hang that repeats in every group would
            # never end the job.
            wake(job, cluster.now_ns + ns(1.0))
        else:
            forgive(job)


def forgive(job: JobState) -> None:
    """Reset the count of successive losses, because the job made progress."""
    job.outcome.history = type(job.outcome.history)(
        job.outcome.history.failures, 0, job.outcome.history.last
    )
    job.outcome.restart_at_ns = 0

"""Messages of agents, applied to the coordinator's state.

Rule: a report describes the present state. Messages missed while a stream was broken are repaired
by comparing the report with the state that the job needs: the worker is sent its group again, or
ordered to leave it, or to end.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import ns
from elastic.core.copy_messages import CopiesHeld, CopyFailed
from elastic.core.events.coordinator import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    CloseSession,
    SendAgent,
)
from elastic.core.facts import (
    ExitCause,
    ExitKind,
    Failure,
    Generation,
    JobPhase,
    NodePhase,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine import (
    copies,
    health,
    node_links,
    node_liveness,
    report_coalescing,
    reports,
    requests,
    saves,
    suspicion,
)
from elastic.core.machine.announcing import announcement, send_worker, stop_order
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.nodes import NodeDrain, NodeState
from elastic.core.machine.reconcile import end_job, remind_of_leavers
from elastic.core.machine.transitions import GroupPhase
from elastic.core.messages import (
    Drain,
    DrainNotice,
    ForgetWorker,
    Hello,
    LeaveGroup,
    LinksTried,
    NodeHealth,
    Progress,
    Pulse,
    Refusal,
    Reported,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerUpdate,
)
from elastic.core.policy import failure as failure_policy

# ---------------------------------------------------------------- connections


def on_connected(cluster: ClusterState, event: AgentConnected) -> None:
    """Register a node, or refuse it with the reason."""
    node = event.hello.node
    refusal = _refuse(cluster, event.hello)
    if refusal is not None:
        cluster.do(SendAgent(event.session, refusal), CloseSession(event.session, refusal.reason))
        cluster.note("agent_refused", node=node.node_id, reason=refusal.reason)
        return
    state = _enter(cluster, event)
    term = cluster.term
    cluster.do(SendAgent(event.session, Welcome(cluster.name, term.number, term.history)))
    if event.hello.draining:
        start_drain(cluster, state, event.hello.drain_reason, event.hello.drain_timeout_ns)
    elif state.drain.is_on:
        _send_drain(cluster, state)
    copies.take_held(cluster, state, event.hello.copies)
    _compare(cluster, state, event.hello)
    cluster.book.settle(state)
    cluster.touch_active()
    cluster.note(
        "node_registered",
        node=node.node_id,
        slots=node.num_slots,
        workers=len(event.hello.workers),
        host=node.host,
    )


def _refuse(cluster: ClusterState, hello: Hello) -> Refusal | None:
    """Return why this agent may not register, None if it may."""
    known = cluster.book.nodes.get(hello.node.node_id)
    if known is None or known.absence.is_unconfirmed:
        return None
    if hello.node.incarnation < known.node.incarnation:
        return Refusal(
            f"node {hello.node.node_id} belongs to an agent that started later "
            f"(incarnation {known.node.incarnation}, yours is {hello.node.incarnation}): "
            f"this agent is stale, end it or give it another --node-id",
            final=True,
        )
    if known.is_live() and hello.node.incarnation != known.node.incarnation:
        return Refusal(
            f"node {hello.node.node_id} is in use by another live agent on {known.node.host}: "
            f"give this one another --node-id",
            final=False,
        )
    return None


def _enter(cluster: ClusterState, event: AgentConnected) -> NodeState:
    """Record the node under its new session."""
    node = event.hello.node
    book = cluster.book
    state = book.nodes.get(node.node_id)
    if state is None or state.phase in (NodePhase.LOST, NodePhase.LEFT):
        serial = state.last_serial if state is not None else cluster.term.first_number
        copies_before = state.copies if state is not None else ()
        before, state = (
            state,
            NodeState(
                node, NodePhase.READY, cluster.now_ns, last_serial=serial, copies=copies_before
            ),
        )
        book.nodes[node.node_id] = state
        if before is not None and before.node.incarnation == node.incarnation:
            # Only its link was lost: its faults persist.
            state.faults = before.faults
    elif not state.absence.is_unconfirmed and state.node.incarnation != node.incarnation:
        lose_node_workers(cluster, state, "its agent was started anew")
        state.drain = NodeDrain()
        health.forgive(cluster, state)
    if state.session is not None:
        cluster.do(CloseSession(state.session, "replaced by a newer connection"))
    state.node, state.copies_at = node, event.hello.copies_at
    book.came(state, cluster.now_ns)
    book.bind(state, event.session)
    state.reports_due = max(0, event.hello.reports_due)
    health.take_problems(cluster, state, event.hello.problems)
    suspicion.received(cluster, state)
    phase = NodePhase.DRAINING if state.drain.is_on else NodePhase.READY
    state.move(phase, cluster.now_ns, state.reason if state.drain.is_on else "")
    return state


def _compare(cluster: ClusterState, state: NodeState, hello: Hello) -> None:
    """Compare the agent's workers with the recorded ones, and repair the differences."""
    reported = {report.worker_id: report for report in hello.workers}
    for worker_id in sorted(set(state.held) - set(reported)):
        job, worker = _find(cluster, worker_id)
        if job is None or worker is None:
            continue
        is_new = worker.report.phase is WorkerPhase.STARTING and worker.report.pid == 0
        if is_new and worker.stop_cause is None and not job.has_ended():
            send_worker(cluster, worker, StartWorker(worker_id, job.spec, ahead=job.is_in_place()))
        else:
            cause = ExitCause(ExitKind.LOST, detail="its agent does not know it any more")
            lose_worker(cluster, job, worker_id, cause)
    for report in hello.workers:
        take_worker_report(cluster, state, report)
        _resume(cluster, report)


def _find(cluster: ClusterState, worker_id: WorkerId) -> tuple[JobState | None, WorkerState | None]:
    job = cluster.job_of(worker_id)
    return job, job.workers[worker_id] if job else None


def _resume(cluster: ClusterState, report: WorkerReport) -> None:
    """Send a worker again what it may have missed while its agent was disconnected."""
    job = cluster.jobs.get(report.job_id)
    worker = job.workers.get(report.worker_id) if job else None
    if job is None or worker is None:
        return
    if worker.stop_cause is not None:
        send_worker(cluster, worker, stop_order(cluster, job, worker))
        return
    if worker.group_sent_ns < job.newest.announced_ns:
        # A worker is not late for a message that it could not get. Only once, so that a flapping
        # link does not extend its time again and again.
        worker.group_sent_ns = cluster.now_ns
    is_member = job.is_open and job.is_member(report.worker_id)
    if is_member and report.generation < job.generation:
        send_worker(cluster, worker, announcement(cluster, job, report.worker_id))
        saves.remind(cluster, job, worker)
        remind_of_leavers(cluster, job, [report.worker_id])
    elif is_member:
        if job.is_end_announced():
            over = (report.worker_id, job.generation, False, "the group is over")
            send_worker(cluster, worker, LeaveGroup(*over, follows=True))
        elif job.newest.is_asked_to_leave:
            fields = (report.worker_id, job.generation, True, "planned change")
            send_worker(
                cluster, worker, LeaveGroup(*fields, saves=job.newest.phase is GroupPhase.SAVING)
            )
        saves.remind(cluster, job, worker)
        remind_of_leavers(cluster, job, [report.worker_id])
    elif report.spent or report.phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING):
        leave = LeaveGroup(report.worker_id, report.generation, False, "the group is over")
        send_worker(cluster, worker, leave)


def on_disconnected(cluster: ClusterState, event: AgentDisconnected) -> None:
    """Handle the end of a stream: the node has a grace period to reconnect, then it is lost."""
    state = cluster.book.of_session(event.session)
    if state is None:
        return
    cluster.book.unbind(state)
    if state.drain.is_released:
        state.move(NodePhase.LEFT, cluster.now_ns, state.reason)
        state.drain.is_on = False
        lose_node_workers(cluster, state, "its node left")
        cluster.note("node_left", node=state.node.node_id, reason=state.reason)
    else:
        state.move(NodePhase.DISCONNECTED, cluster.now_ns, event.reason)
        state.absence.lost_at_ns = cluster.now_ns + ns(cluster.config.node_grace_s)
        if node_liveness.caused_by_our_suspend(cluster, state):
            node_liveness.extend_grace(cluster, state)
        cluster.note("node_disconnected", node=state.node.node_id, reason=event.reason)
        node_liveness.check_broken_groups(cluster, state)
    cluster.book.settle(state)
    cluster.touch_active()


def give_up(cluster: ClusterState, state: NodeState, reason: str) -> None:
    """Treat a node that does not answer as lost now, before its stream ends."""
    if state.session is not None:
        cluster.do(CloseSession(state.session, reason))
        on_disconnected(cluster, AgentDisconnected(state.session, reason))
        if not state.absence.is_extended:
            state.absence.lost_at_ns = cluster.now_ns


def start_drain(cluster: ClusterState, state: NodeState, reason: str, timeout_ns: int) -> None:
    """Begin the drain of a node: its workers leave at a boundary, or at the deadline."""
    leave_by_ns = cluster.now_ns + timeout_ns
    drain = state.drain
    if drain.is_on and drain.by_ns is not None:
        if leave_by_ns < drain.by_ns:
            drain.by_ns = leave_by_ns
            _note_leavers(cluster, state)
        cluster.touch_active()
        return
    drain.is_on, drain.by_ns, drain.announced = True, leave_by_ns, reason or "told to leave"
    _note_leavers(cluster, state)
    if state.is_live():
        state.move(NodePhase.DRAINING, cluster.now_ns, reason)
    cluster.book.settle(state)
    cluster.touch_active()
    cluster.note(
        "drain_started",
        node=state.node.node_id,
        reason=reason,
        timeout_s=f"{timeout_ns / 1e9:g}",
    )


def order_drain(cluster: ClusterState, state: NodeState, reason: str, timeout_ns: int) -> int:
    """Drain a node for an operator; its agent is notified, which may outlive this coordinator.

    Returns:
        Nanoseconds until it has left; fewer than requested if it drains already, and sooner.
    """
    start_drain(cluster, state, reason, timeout_ns)
    _send_drain(cluster, state)
    return max(0, (state.drain.by_ns or 0) - cluster.now_ns)


def _send_drain(cluster: ClusterState, state: NodeState) -> None:
    """Notify an agent that its node drains.

    The agent itself ends workers that are still there a stop grace before the time is over.
    """
    if state.session is None:
        return
    left_ns = max(ns(cluster.config.stop_grace_s), (state.drain.by_ns or 0) - cluster.now_ns)
    cluster.do(SendAgent(state.session, Drain(state.drain.announced, left_ns)))


def _note_leavers(cluster: ClusterState, state: NodeState) -> None:
    """Schedule a notice to all members of groups with workers on this leaving node."""
    for worker_id in sorted(state.held):
        job = cluster.job_of(worker_id)
        if job is not None:
            job.newest.leavers.is_news = True


def lose_node_workers(cluster: ClusterState, state: NodeState, why: str) -> None:
    """Record that all workers of a node are gone; charge each job for one loss at most."""
    charged: set[str] = set()
    for worker_id in sorted(state.held):
        job, _ = _find(cluster, worker_id)
        if job is None:
            state.held.pop(worker_id)
            continue
        cause = ExitCause(ExitKind.LOST, detail=f"node {state.node.node_id}: {why}")
        lose_worker(cluster, job, worker_id, cause, charge=job.job_id not in charged)
        charged.add(job.job_id)


# ---------------------------------------------------------------- workers


def on_message(cluster: ClusterState, event: AgentMessageReceived) -> None:
    """Process one message of a registered agent; ignore one over an old session."""
    state = cluster.book.of_session(event.session)
    if state is None:
        return
    suspicion.received(cluster, state)
    message = event.message
    if isinstance(message, WorkerUpdate):
        take_worker_report(cluster, state, message.report)
    elif isinstance(message, Reported):
        if state.has(message.report.worker_id):
            reports.take_report(cluster, event.session, message.report)
        if state.reports_due:
            state.reports_due -= 1
            if not state.reports_due:
                cluster.touch_active()
    elif isinstance(message, Progress) and state.has(message.worker_id):
        reports.take_progress(cluster, message)
    elif isinstance(message, Pulse):
        suspicion.take_pulse(cluster, state, message)
    elif isinstance(message, DrainNotice):
        start_drain(cluster, state, message.reason, message.timeout_ns)
    elif isinstance(message, CopiesHeld):
        copies.take_held(cluster, state, message.copies)
    elif isinstance(message, CopyFailed):
        copies.on_failed(cluster, state, message)
    elif isinstance(message, LinksTried):
        node_links.take_tried(cluster, state, message)
    elif isinstance(message, NodeHealth):
        health.take_problems(cluster, state, message.problems)


def take_worker_report(cluster: ClusterState, state: NodeState, report: WorkerReport) -> None:
    """Record an agent's report of a worker; it may report only workers of its own node."""
    if not state.has(report.worker_id):
        return
    job = cluster.jobs.get(report.job_id)
    known = job is not None and report.worker_id in job.workers
    if report.phase is WorkerPhase.EXITED:
        if job is not None and known:
            job.workers[report.worker_id].update(report, cluster.now_ns)
            cause = report.exit or ExitCause(ExitKind.LOST, detail="its agent gave no cause")
            lose_worker(cluster, job, report.worker_id, cause, failure=report.failure)
        cluster.send(state, ForgetWorker(report.worker_id))
        return
    if job is None or report.generation > job.generation:
        why = "its job is not known here" if job is None else "it is from another history"
        grace = ns(cluster.config.stop_grace_s)
        cluster.send(state, StopWorker(report.worker_id, grace, why))
        return
    if not known:
        other = cluster.job_of(report.worker_id)
        if other is not None:
            lose_worker(cluster, other, report.worker_id, ExitCause(ExitKind.LOST))
        cluster.add_worker(job, state, report)
        cluster.note("worker_adopted", job.job_id, worker=report.worker_id)
    worker = job.workers[report.worker_id]
    before = worker.report
    was_in_place = job.is_in_place() if report.in_place is not before.in_place else None
    worker.update(report, cluster.now_ns)
    job.newest.has_looped |= report.in_place
    cluster.book_time(job, worker)
    if before.phase is WorkerPhase.TRAINING and report.phase is WorkerPhase.READY:
        _note_pause(cluster, job, report.worker_id)
    if report.micro_batches > 0 and report.generation == job.generation:
        requests.on_cut(cluster, job, report.micro_batches)
    if was_in_place is not None and job.is_in_place() is not was_in_place:
        cluster.queue.is_outdated = True  # It can be saved at any step, so it may be preempted.
        if was_in_place and job.release.stopping:
            job.release.deadline_ns = None  # What follows the loop has a time of its own.
    if report.phase is WorkerPhase.FINISHED and report.generation == job.generation:
        job.outcome.finished[report.worker_id] = report.result
        cluster.queue.is_outdated = True
    if not report_coalescing.may_wait(cluster, job, worker, before):
        cluster.touch(job)
    if node_liveness.is_broken(job, worker) and job.is_open:
        node_liveness.suspect_silent_nodes(cluster, job)


def lose_worker(
    cluster: ClusterState,
    job: JobState,
    worker_id: WorkerId,
    cause: ExitCause,
    *,
    failure: Failure | None = None,
    charge: bool = True,
) -> None:
    """Remove a worker that is gone, and apply the failure policy."""
    rank = job.rank_of(worker_id)
    worker = cluster.remove_worker(job, worker_id)
    if rank >= 0 and job.is_open:
        node_liveness.suspect_silent_nodes(cluster, job, only_away=True)
    what = failure_policy.describe(worker.stop_cause or cause)
    failure = failure or worker.report.failure
    shown = what if worker.stop_cause else failure_policy.with_error(what, failure)
    cluster.note("worker_gone", job.job_id, worker=worker_id, rank=rank, cause=shown)
    if rank >= 0 and job.is_open:
        _note_pause(cluster, job, worker_id)
        job.newest.interruption.lost.append(f"{worker_id} (rank {rank}) {what}")
    has_failed = job.phase is JobPhase.FAILED  # Others may fail at the same time.
    if failure is not None and (has_failed or worker.stop_cause is None):
        is_news = job.outcome.note_failure(job.generation, rank, failure)
        if has_failed and is_news:
            cluster.persist(job)
    if job.has_ended() or not charge:
        return
    if worker.stop_cause is not None:
        cause, failure = worker.stop_cause, None
    node = cluster.book.nodes.get(worker.node_id)
    if node is not None:
        is_ordered = worker.stop_cause is not None
        health.take_exit(cluster, node, worker.stop_cause or cause, ordered=is_ordered)
    if failure is not None and failure.damaged:
        failure = _without_damaged(cluster, job, failure, worker.report.generation)
    decision = failure_policy.judge_exit(
        job.spec,
        job.outcome.history,
        cause,
        failure,
        cluster.config,
        announced=node.drain.announced if node else "",
    )
    judgement = decision.value
    is_users = judgement.history.failures > job.outcome.history.failures
    if job.outcome.is_charged_already(worker.report.generation, judgement.history):
        return
    job.outcome.history = judgement.history
    if is_users:
        job.outcome.failure = failure or Failure("WorkerExited", f"worker {worker_id} {what}")
        job.outcome.failed_worker = f"{worker_id} (rank {rank})" if rank >= 0 else worker_id
        job.outcome.note_failure(job.generation, rank, job.outcome.failure)
    if judgement.job_fails:
        end_job(cluster, job, JobPhase.FAILED, decision.reason)
        return
    job.outcome.restart_at_ns = max(job.outcome.restart_at_ns, cluster.now_ns + judgement.delay_ns)
    if is_users:
        cluster.persist(job)


def _without_damaged(
    cluster: ClusterState, job: JobState, failure: Failure, generation: Generation
) -> Failure:
    """Drop the damaged checkpoint that a failure names; return the failure as it is judged.

    As one of user code, if the next group would begin with the same checkpoint, or if this group
    has reported it: each group might report another one, and so make progress for ever.
    """
    recorded_in = {one.path: one.generation for one in job.reports.checkpoints}
    is_own = recorded_in.get(failure.damaged) == generation
    if not reports.drop_damaged(cluster, job, failure.damaged, generation) or is_own:
        return replace(failure, damaged="")
    # User code has raised: members that have returned do not complete the job.
    job.outcome.failure_generation = max(job.outcome.failure_generation, generation)
    return failure


def _note_pause(cluster: ClusterState, job: JobState, worker_id: WorkerId) -> None:
    """Record when training was interrupted, because a member left the newest group."""
    if job.is_member(worker_id) and job.newest.interruption.since_ns is None:
        job.newest.interruption.since_ns = cluster.now_ns


def placeholder(job: JobState, worker_id: WorkerId) -> WorkerReport:
    """Return the report of a member that is known from the journal only."""
    return WorkerReport(worker_id, job.job_id, WorkerPhase.TRAINING, job.generation)

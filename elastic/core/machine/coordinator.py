"""The coordinator's state machine: events in; effects out, in the order to perform them.

Rule: only `step` changes state. It applies the event (`agent_messages`, `requests`), reconciles
each job that the event touched (`reconcile`), and checks the invariants (`invariants`). It reads no
clock, does no IO and draws no random number, so a journal and a list of events replay it exactly.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import CoordinatorConfig, ns
from elastic.core.copy_messages import CopiesHeld
from elastic.core.events.coordinator import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    CheckpointRequested,
    CoordinatorEffect,
    CoordinatorEvent,
    EventBatch,
    Forget,
    NodeCordonRequested,
    NodeDrainRequested,
    PauseRequested,
    Recovered,
    Reply,
    ResumeRequested,
    ScaleRequested,
    StopRequested,
    SubmitRequested,
    WokeFromSuspend,
)
from elastic.core.events.shared import Tick
from elastic.core.facts import ENDED, JobId, JobPhase, Member, Node, NodeId, NodePhase
from elastic.core.machine import (
    agent_messages,
    health,
    invariants,
    node_liveness,
    pausing,
    queueing,
    reconcile,
    releasing,
    requests,
    saves,
    suspicion,
)
from elastic.core.machine.cluster_parts import Term
from elastic.core.machine.event_history import EventHistory
from elastic.core.machine.job_parts import JobSubmission
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeAbsence, NodeState
from elastic.core.machine.restoring import restore
from elastic.core.messages import ProbeAck, Progress, Pulse
from elastic.core.policy import placement
from elastic.core.view import ClusterView, JobSample
from elastic.errors import InvariantViolation, check

HOLD_AFTER_RESTART_S = 2.0
"""After a restart agents usually report their workers within this time; starting workers earlier
would start some of them twice."""
GONE_NODES_MAX = 1000
PLANS_MAX = 100
"""Limit of replanning in one step. The queue is planned again after its last plan was carried
out, usually once or twice."""


class CoordinatorMachine:
    """All decisions about nodes, jobs and groups.

    Guarantees, checked by the simulator: one current generation per job; a generation is never
    reused; no generation is announced before it is durable; groups are never below min nor above
    max.
    """

    def __init__(self, config: CoordinatorConfig, name: str = "coordinator") -> None:
        """Start empty; the first event must be `Recovered`."""
        self._cluster = ClusterState(config, name)
        self._history = EventHistory()
        self._recovered = False

    def step(self, event: CoordinatorEvent, now_ns: int) -> tuple[CoordinatorEffect, ...]:
        """Process one event.

        Args:
            event: to process.
            now_ns: monotonic; never decreases.

        Returns:
            Effects, to be performed in this order; `Persist` is a barrier.

        Raises:
            InvariantViolation: a bug; includes the last events.
        """
        cluster = self._cluster
        check(now_ns >= cluster.now_ns, f"time fell from {cluster.now_ns} to {now_ns}")
        cluster.now_ns = now_ns
        cluster.effects = []
        try:
            suspicion.forgive_own_sleep(cluster)
            for one in event.events if isinstance(event, EventBatch) else (event,):
                if not _is_chatter(one):
                    self._history.add(now_ns, _without_payload(one))
                self._take(one)
            suspicion.check(cluster)
            self._reconcile_all()
            invariants.check_cluster(cluster)
            suspicion.plan_check(cluster)
        except InvariantViolation as violation:
            raise InvariantViolation(str(violation), self._history.lines()) from violation
        return tuple(cluster.effects)

    def next_deadline_ns(self) -> int | None:
        """Return when to call `step(Tick)` at the latest, None if nothing waits for time."""
        moments = [job.wake_ns for job in self._cluster.active() if job.wake_ns is not None]
        node = self._cluster.book.next_deadline_ns()
        if node is not None:
            moments.append(node)
        others = (self._cluster.probes.check_by_ns, self._cluster.queue.outdated_at_ns)
        moments += [moment for moment in others if moment is not None]
        return min(moments, default=None)

    def view(self, now_ns: int) -> ClusterView:
        return ClusterView(
            now_ns,
            self._cluster.book.views(now_ns),
            tuple(
                job.view(now_ns, self._cluster.term.unix_ahead_ns)
                for job in self._cluster.jobs.values()
            ),
            self._cluster.book.record().cordons,
        )

    def samples(self) -> tuple[JobSample, ...]:
        """Return what the history keeps each second."""
        return tuple(job.sample() for job in self._cluster.jobs.values())

    def first_member(self, job_id: JobId) -> Member | None:
        """Return rank 0 of a job's group, None while it has no group that trains."""
        job = self._cluster.jobs.get(job_id)
        return job.members[0] if job is not None and job.is_open else None

    def _take(self, event: CoordinatorEvent) -> None:
        cluster = self._cluster
        check(
            self._recovered or isinstance(event, Recovered),
            f"the first event must be Recovered, got {type(event).__name__}",
        )
        if isinstance(event, AgentMessageReceived):
            agent_messages.on_message(cluster, event)
        elif isinstance(event, Tick):
            self._touch_due()
            for state, reason in suspicion.silent(cluster):
                agent_messages.give_up(cluster, state, reason)
        elif isinstance(event, AgentConnected):
            agent_messages.on_connected(cluster, event)
        elif isinstance(event, AgentDisconnected):
            agent_messages.on_disconnected(cluster, event)
        elif isinstance(event, SubmitRequested):
            self._submit(event)
        elif isinstance(event, StopRequested):
            requests.on_stop(cluster, event)
        elif isinstance(event, CheckpointRequested):
            saves.on_requested(cluster, event)
        elif isinstance(event, NodeDrainRequested):
            self._drain(event)
        elif isinstance(event, NodeCordonRequested):
            requests.on_cordon(cluster, event)
        elif isinstance(event, PauseRequested):
            requests.on_pause(cluster, event)
        elif isinstance(event, ResumeRequested):
            requests.on_resume(cluster, event)
        elif isinstance(event, ScaleRequested):
            requests.on_scale(cluster, event)
        elif isinstance(event, WokeFromSuspend):
            node_liveness.on_woke(cluster, event)
        elif isinstance(event, Recovered):
            self._recover(event)
        else:
            check(False, f"{type(event).__name__} inside another one")

    def _touch_due(self) -> None:
        for job in self._cluster.active():
            if job.wake_ns is not None and job.wake_ns <= self._cluster.now_ns:
                self._cluster.touch(job)

    def _reconcile_all(self) -> None:
        cluster = self._cluster
        releasing.settle_nodes(cluster)
        health.end_quarantines(cluster)
        queueing.plan(cluster)
        plans = 0
        while cluster.dirty:
            job_id = next(iter(cluster.dirty))
            del cluster.dirty[job_id]
            job = cluster.jobs.get(job_id)
            if job is not None:
                reconcile.reconcile_job(cluster, job)
                pausing.advance(cluster, job)
                invariants.check_job(cluster, job)
            if not cluster.dirty:
                releasing.settle_nodes(cluster)
                queueing.plan(cluster)
                plans += 1
                check(plans <= PLANS_MAX, "the queue and the jobs do not settle")
        self._drop_ended()
        cluster.book.drop_gone(GONE_NODES_MAX)

    def _drop_ended(self) -> None:
        """Forget the oldest ended jobs whose workers are gone."""
        cluster = self._cluster
        ended = [job for job in cluster.jobs.values() if job.has_ended() and not job.workers]
        over = ended[: max(0, len(ended) - cluster.config.ended_jobs_kept)]
        for job in over:
            del cluster.jobs[job.job_id]
        if over:
            cluster.do(Forget(tuple(job.job_id for job in over)))

    # ------------------------------------------------------------ requests

    def _recover(self, event: Recovered) -> None:
        """Restore the journal's state; members of running groups are awaited."""
        cluster = self._cluster
        check(not self._recovered, "Recovered came twice")
        self._recovered = True
        has_active = any(record.phase not in ENDED for record in event.jobs)
        cluster.term = Term(
            event.term,
            event.history,
            event.secret,
            unix_ahead_ns=event.unix_ns - cluster.now_ns if event.unix_ns else None,
            hold_until_ns=cluster.now_ns + ns(HOLD_AFTER_RESTART_S) if has_active else 0,
        )
        cluster.book.recovered_ns = cluster.now_ns
        cluster.book.await_until_ns = cluster.now_ns + ns(cluster.config.adoption_s_max)
        cluster.sequence = max((record.sequence for record in event.jobs), default=0)
        cluster.book.cordons = {c.node_id: c.reason for c in event.nodes.cordons}
        for record in sorted(event.jobs, key=lambda r: r.sequence):
            job = restore(record, cluster.now_ns, cluster.term.unix_ahead_ns)
            cluster.jobs[job.job_id] = job
            if job.has_ended():
                continue
            job.copies.not_before_ns = cluster.now_ns + ns(cluster.config.adoption_grace_s)
            for member in _awaited_members(job):
                state = self._await_node(member.node_id)
                cluster.add_worker(job, state, agent_messages.placeholder(job, member.worker_id))
            cluster.touch(job)
        cluster.note("recovered", jobs=len(event.jobs))

    def _await_node(self, node_id: NodeId) -> NodeState:
        """Add a node that is known from the journal only, and must reconnect in time."""
        cluster = self._cluster
        state = cluster.book.nodes.get(node_id)
        if state is None:
            state = NodeState(
                Node(node_id, incarnation=0, host="", num_slots=0),
                NodePhase.DISCONNECTED,
                cluster.now_ns,
                absence=NodeAbsence(
                    lost_at_ns=cluster.now_ns + ns(cluster.config.adoption_grace_s),
                    is_unconfirmed=True,
                ),
                last_serial=cluster.term.first_number,
                reason="known from the journal, has not come back yet",
            )
            cluster.book.nodes[node_id] = state
            cluster.book.settle(state)
        return state

    def _submit(self, event: SubmitRequested) -> None:
        cluster, spec = self._cluster, event.spec
        same = [job for job in cluster.active() if job.spec.name == spec.name]
        types = [s.node.accelerator_type for s in cluster.book.ordered() if s.is_live()]
        refusal = placement.refuse_accelerator(spec, [t for t in types if t])
        if same:
            text = (
                f"a job named {spec.name!r} is {same[0].phase.value} already "
                f"({same[0].job_id}): choose another name, or stop it first"
            )
            cluster.do(Reply(event.request_id, "already_exists", text))
        elif spec.job_id in cluster.jobs:
            text = f"job id {spec.job_id} exists already"
            cluster.do(Reply(event.request_id, "already_exists", text))
        elif refusal:
            cluster.do(Reply(event.request_id, "invalid", refusal))
        elif over := requests.too_many_jobs(cluster):
            cluster.do(Reply(event.request_id, "exhausted", over))
        elif event.dry_run:
            cluster.do(Reply(event.request_id, "", spec.job_id))
        else:
            cluster.sequence += 1
            submission = JobSubmission(cluster.sequence, event.submitter)
            job = JobState(spec, submission, JobPhase.PENDING, cluster.now_ns, "submitted")
            cluster.jobs[job.job_id] = job
            cluster.persist(job)
            cluster.do(Reply(event.request_id, "", job.job_id))
            cluster.note(
                "job_submitted",
                job.job_id,
                job_name=spec.name,
                min_workers=spec.min_workers,
                max_workers=spec.max_workers,
            )
            cluster.touch(job)
            cluster.queue.is_outdated = True

    def _drain(self, event: NodeDrainRequested) -> None:
        state = self._cluster.book.nodes.get(event.node_id)
        if state is None:
            known = ", ".join(sorted(self._cluster.book.nodes)) or "none"
            text = f"no node {event.node_id} is known here; known: {known}"
            self._cluster.do(Reply(event.request_id, "not_found", text))
        elif not state.is_live():
            text = f"node {event.node_id} is {state.phase.value}, only a connected one can drain"
            self._cluster.do(Reply(event.request_id, "failed_precondition", text))
        else:
            left_ns = agent_messages.order_drain(
                self._cluster, state, event.reason, event.timeout_ns
            )
            self._cluster.do(Reply(event.request_id, "", f"{left_ns}"))


def _awaited_members(job: JobState) -> list[Member]:
    """Return the members of a restored job's newest group that may be alive.

    Those of a suspended group wait with its state, so that no other may form without them; but
    those of a job that was paused or preempted were ordered to end.
    """
    if job.is_open:
        return [*job.members]
    if job.release.paused or job.release.preempted_by:
        return []
    gone = {one.worker_id for one in job.outcome.former}
    return [member for member in job.members if member.worker_id not in gone]


def _without_payload(event: CoordinatorEvent) -> CoordinatorEvent:
    """Return an event for the history: without a pickled function, perhaps of megabytes."""
    if not isinstance(event, SubmitRequested):
        return event
    spec = event.spec
    return replace(event, spec=replace(spec, entry=replace(spec.entry, payload=b"")))


def _is_chatter(event: CoordinatorEvent) -> bool:
    """Return whether an event is too frequent and trivial for the history of events."""
    if isinstance(event, AgentMessageReceived):
        return isinstance(event.message, (Progress, Pulse, ProbeAck, CopiesHeld))
    return isinstance(event, Tick)

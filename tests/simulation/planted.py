"""Bugs in how a group is formed, kept and replaced; see `planting`."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic.core.events.coordinator import SendAgent
from elastic.core.facts import Group, RefusalCode
from elastic.core.machine import (
    agent,
    agent_connection,
    agent_messages,
    announcing,
    coordinator,
    early_finish,
    health,
    jobs,
    queueing,
    reconcile,
    reports,
    suspicion,
    timeouts,
    worker,
)
from elastic.core.machine import agent_parts as agent_books
from elastic.core.messages import WorkerUpdate
from elastic.core.policy import (
    failure,
    goodput,
    hang,
    membership,
    placement,
)
from elastic.core.policy.decision import Decision
from tests.simulation import coordinators, terms
from tests.simulation.planting import Patch, bug


@bug
def announces_before_it_persists(patch: Patch) -> None:
    """Effects that must wait for the store are performed before the write."""
    honest = coordinator.CoordinatorMachine.step

    def step(self: Any, event: Any, now_ns: int) -> Any:
        effects = honest(self, event, now_ns)
        sends = [e for e in effects if isinstance(e, SendAgent)]
        rest = [e for e in effects if not isinstance(e, SendAgent)]
        return (*sends, *rest)

    patch.setattr(coordinator.CoordinatorMachine, "step", step)


@bug
def reuses_the_generation_when_a_worker_is_lost(patch: Patch) -> None:
    """The next group gets the same generation as the previous one."""
    honest = reconcile._form

    def form(cluster: Any, job: Any, plan: Any, reason: str) -> None:
        if job.generation and plan.cause == "lost":
            job.newest.group = _of_the_generation_before(job.newest.group)
        honest(cluster, job, plan, reason)

    patch.setattr(reconcile, "_form", form)


def _of_the_generation_before(group: Group) -> Group:
    return dataclasses.replace(group, generation=group.generation - 1)


@bug
def forgets_the_generation_after_a_restart(patch: Patch) -> None:
    """A restarted coordinator counts from the generation before the newest."""
    honest = coordinator.restore

    def restore(record: Any, *clocks: Any) -> Any:
        job = honest(record, *clocks)
        if job.generation:
            job.newest.group = _of_the_generation_before(job.newest.group)
        return job

    patch.setattr(coordinator, "restore", restore)


@bug
def gives_two_workers_one_rank(patch: Patch) -> None:
    """Local ranks are announced as ranks."""
    honest = announcing.announcer

    def announcer(cluster: Any, job: Any) -> Any:
        announce = honest(cluster, job)
        return lambda place: announce(place._replace(rank=place.local_rank))

    patch.setattr(announcing, "announcer", announcer)


@bug
def forms_groups_below_min(patch: Patch) -> None:
    """Any number of survivors continues."""
    honest = membership.choose

    def choose(spec: Any, *args: Any, **kwargs: Any) -> Any:
        lowest = object.__new__(type(spec))
        for field in dataclasses.fields(spec):
            object.__setattr__(lowest, field.name, getattr(spec, field.name))
        object.__setattr__(lowest, "min_workers", 1)
        return honest(lowest, *args, **kwargs)

    patch.setattr(membership, "choose", choose)


@bug
def forms_groups_above_max(patch: Patch) -> None:
    """All workers that are ready join."""
    honest_choose, honest_place = membership.choose, placement.place
    honest_demand = queueing.demand_of

    def roomier(spec: Any) -> Any:
        return dataclasses.replace(spec, max_workers=spec.max_workers + spec.workers_per_replica)

    patch.setattr(membership, "choose", lambda spec, *a, **k: honest_choose(roomier(spec), *a, **k))
    patch.setattr(placement, "place", lambda spec, *a: honest_place(roomier(spec), *a))

    def demand_of(*args: Any) -> Any:
        demand = honest_demand(*args)
        return dataclasses.replace(demand, spec=roomier(demand.spec))

    patch.setattr(queueing, "demand_of", demand_of)
    patch.setattr(reconcile, "_stop_surplus", lambda cluster, job: None)


@bug
def holds_on_to_a_group_that_it_has_finished_in(patch: Patch) -> None:
    """A member whose train function has returned never closes its connections."""
    patch.setattr(worker.WorkerMachine, "_close_group", lambda self: None)


@bug
def takes_a_group_that_was_left_for_one_that_broke(patch: Patch) -> None:
    """A member that leaves early is not detected, and no failure is charged."""
    patch.setattr(early_finish, "has_finished", lambda job: False)


@bug
def splits_a_replica(patch: Patch) -> None:
    """Groups ignore that a replica has several workers."""
    honest = membership.choose

    def choose(spec: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(dataclasses.replace(spec, workers_per_replica=1), *args, **kwargs)

    patch.setattr(membership, "choose", choose)


@bug
def records_checkpoints_of_old_generations(patch: Patch) -> None:
    """Reports are not fenced by generation."""

    def accept(job: Any, report: Any) -> tuple[RefusalCode, str]:
        if job is None or job.has_ended():
            return RefusalCode.JOB_ENDED, "over"
        return RefusalCode.NONE, ""

    patch.setattr(reports, "_refuse_report", accept)


@bug
def ignores_broken_streams(patch: Patch) -> None:
    """A node whose stream ended is regarded as alive for ever."""
    patch.setattr(agent_messages, "on_disconnected", lambda cluster, event: None)


@bug
def says_nothing_again_after_a_reconnect(patch: Patch) -> None:
    """Messages that were lost with a broken stream are not sent again."""
    patch.setattr(agent_messages, "_resume", lambda cluster, report: None)


@bug
def tells_metrics_to_one_coordinator_only(patch: Patch) -> None:
    """Unacknowledged reports are not sent again to the next coordinator."""
    patch.setattr(
        agent_connection.UnacknowledgedReports, "reconnect", lambda self, generations: None
    )


@bug
def counts_free_slots_without_held_ones(patch: Patch) -> None:
    """All slots of every node count as free."""
    patch.setattr(jobs.NodeState, "free_slots", lambda self: self.node.num_slots)


@bug
def revives_ended_jobs_after_a_restart(patch: Patch) -> None:
    """The phase in a record is ignored on restore."""
    honest = coordinator.restore

    def restore(record: Any, *clocks: Any) -> Any:
        phase = type(record.phase).PENDING
        return honest(dataclasses.replace(record, phase=phase), *clocks)

    patch.setattr(coordinator, "restore", restore)


@bug
def swallows_exits(patch: Patch) -> None:
    """An agent does not report the end of a worker."""
    honest = agent.AgentMachine.step

    def step(self: Any, event: Any, now_ns: int) -> Any:
        return tuple(
            effect
            for effect in honest(self, event, now_ns)
            if not (
                isinstance(getattr(effect, "message", None), WorkerUpdate)
                and effect.message.report.exit is not None
            )
        )

    patch.setattr(agent.AgentMachine, "step", step)


@bug
def persists_the_members_in_another_order(patch: Patch) -> None:
    """The durable group and the announced one differ."""
    honest = jobs.JobState.record

    def record(self: Any, *clock: Any) -> Any:
        kept = honest(self, *clock)
        if kept.group is None:
            return kept
        turned = Group(kept.group.generation, tuple(reversed(kept.group.members)))
        return dataclasses.replace(kept, group=turned)

    patch.setattr(jobs.JobState, "record", record)


@bug
def waits_for_ever_where_all_wait(patch: Patch) -> None:
    """A group in which all members wait for each other is never replaced."""
    patch.setattr(hang, "STUCK_TIMES", 10**6)


@bug
def replaces_a_group_that_waits_for_a_slow_member(patch: Patch) -> None:
    """A member that makes progress is regarded as waiting."""
    honest = hang.judge

    def judge(generation: Any, members: Any, now_ns: int, timeout_ns: int) -> Any:
        waiting = [m for m in members if m.main_thread and m.main_thread.waits(generation, now_ns)]
        since_ns = max((m.main_thread.waiting_since_ns for m in waiting), default=now_ns)
        if waiting and now_ns - since_ns >= hang.STUCK_TIMES * timeout_ns:
            return Decision(hang.Hang(since_ns=since_ns, is_stuck=True), "all wait")
        return honest(generation, members, now_ns, timeout_ns)

    patch.setattr(hang, "judge", judge)


@bug
def never_notices_a_hang(patch: Patch) -> None:
    """A hung member is never detected."""
    patch.setattr(hang.MainThreadState, "is_stalled", lambda self, generation, now_ns: False)


@bug
def accuses_all_who_seem_to_stand(patch: Patch) -> None:
    """A member in a hidden wait for a hung one is killed with it."""
    patch.setattr(hang, "_at_the_end", lambda waiting, standing, queue: tuple(standing))


@bug
def kills_slow_movers(patch: Patch) -> None:
    """A member for which others wait is regarded as hung, even while it makes progress."""

    def judge(generation: int, members: Any, now_ns: int, timeout_ns: int) -> Any:
        waiting = [m for m in members if m.main_thread and m.main_thread.waits(generation, now_ns)]
        late = tuple(m.worker_id for m in members if m not in waiting and m.trains)
        since_ns = max((m.main_thread.waiting_since_ns for m in waiting), default=now_ns)
        is_over = bool(waiting and late) and now_ns - since_ns >= timeout_ns
        return Decision(hang.Hang(late, since_ns) if is_over else hang.Hang(), "is late")

    patch.setattr(hang, "judge", judge)


@bug
def kills_who_takes_long_over_the_first_step(patch: Patch) -> None:
    """A process that has committed no step yet gets no more time than others."""
    patch.setattr(hang, "FIRST_TIMES", 1)


@bug
def takes_probed_nodes_for_silent(patch: Patch) -> None:
    """The reply to a probe is ignored."""
    honest = suspicion.received

    def received(cluster: Any, state: Any) -> None:
        asked_ns = cluster.probes.sent.get(state.node.node_id)
        honest(cluster, state)
        if asked_ns is not None:
            cluster.probes.sent[state.node.node_id] = asked_ns

    patch.setattr(suspicion, "received", received)


@bug
def counts_kills_as_losses(patch: Patch) -> None:
    """A kill from outside counts as a failure of the job, and steps do not reset the count."""
    patch.setattr(failure, "is_kill", lambda cause: False)
    patch.setattr(reports, "forgive", lambda job: None)


@bug
def cuts_leavers_off_at_once(patch: Patch) -> None:
    """A drain does not wait for a step boundary."""
    honest = agent_messages.start_drain

    def start_drain(cluster: Any, state: Any, reason: str, timeout_ns: int) -> None:
        honest(cluster, state, reason, 0)

    patch.setattr(agent_messages, "start_drain", start_drain)


@bug
def forgets_drains_with_the_coordinator(patch: Patch) -> None:
    """An operator's drain request is lost when another coordinator takes over."""
    honest = agent_books.AgentBooks.drain

    def drain(self: Any, reason: str, timeout_ns: int) -> None:
        if reason != "operator":
            honest(self, reason, timeout_ns)

    patch.setattr(agent_books.AgentBooks, "drain", drain)


@bug
def forgets_the_time_of_workers_that_are_gone(patch: Patch) -> None:
    """A worker's time since its last report is booked under no category."""
    patch.setattr(goodput.Ledger, "close", lambda *_, **__: None)


@bug
def leaves_alone_who_does_not_leave(patch: Patch) -> None:
    """Only stuck members of the newest group are ended."""
    honest = timeouts.end_overdue

    def end_overdue(cluster: Any, job: Any) -> None:
        if job.is_open:
            honest(cluster, job)

    patch.setattr(timeouts, "end_overdue", end_overdue)


@bug
def blames_others_for_its_own_slowness(patch: Patch) -> None:
    """Replies to probes that queue up while the coordinator waits for its disk count as late."""
    patch.setattr(suspicion, "forgive_own_sleep", lambda cluster: None)


@bug
def obeys_leaders_that_were_replaced(patch: Patch) -> None:
    """An agent regards any coordinator that welcomes it as the leader."""
    honest = agent_connection.Connection.welcomed

    def welcomed(self: Any, welcome: Any, now_ns: int) -> bool:
        self._term = 0
        return honest(self, welcome, now_ns)

    patch.setattr(agent_connection.Connection, "welcomed", welcomed)


@bug
def leads_on_while_its_lease_is_not_renewed(patch: Patch) -> None:
    """A leader stops only when the store rejects it, which it may be unable to reach."""
    patch.setattr(coordinators.CoordinatorHost, "may_act", lambda self: True)
    patch.setattr(terms.Candidate, "is_valid", lambda self: self._stands)


@bug
def writes_without_comparing_the_leader(patch: Patch) -> None:
    """The store accepts a write of any coordinator."""
    patch.setattr(terms.LeaseStore, "fence", lambda self, name, term: True)


@bug
def takes_the_neighbour_of_a_hung_worker_for_ill(patch: Patch) -> None:
    """A hang is counted against another node."""
    honest = health.take_exit

    def take_exit(cluster: Any, state: Any, cause: Any, *, ordered: bool) -> None:
        others = [other for other in cluster.book.ordered() if other is not state]
        honest(cluster, (others or [state])[-1], cause, ordered=ordered)

    patch.setattr(health, "take_exit", take_exit)


@bug
def ends_who_forms_with_the_one_that_it_waits_for(patch: Patch) -> None:
    """All members of a group that does not form in time are ended, not only the late one."""
    patch.setattr(timeouts, "first_out_ns", lambda job: 0)

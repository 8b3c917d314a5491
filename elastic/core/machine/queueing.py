"""Applies the queue: collects the facts for its policy, and carries out the plan for each job.

Rule: the plan is computed when one of its inputs changed, never per report or per step, and a job
alone in the cluster needs none. A released worker leaves like one on a draining node: at a
boundary, without repeated work. How a preempted job gets there is for `pausing.advance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic.core.facts import JobId, NodeId, Strategy, WorkerId, WorkerPhase
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import eviction, placement, queue
from elastic.core.policy.decision import Decision
from elastic.core.policy.demands import NAMED_MAX, Allocation, Demand, listed
from elastic.core.policy.packing import NodeCapacity


def plan(cluster: ClusterState) -> None:
    """Compute the plan again if an input changed, and touch the affected jobs."""
    if cluster.queue.outdated_at_ns is not None and cluster.now_ns >= cluster.queue.outdated_at_ns:
        cluster.queue.is_outdated = True
    if not cluster.queue.is_outdated:
        return
    if cluster.now_ns < cluster.term.hold_until_ns:
        # After a restart most nodes are still away: a plan without them would move every job.
        cluster.queue.outdated_at_ns = cluster.term.hold_until_ns
        return
    cluster.queue.is_outdated, cluster.queue.outdated_at_ns = False, None
    # Slots of a job that pauses come free by themselves, if that does not take too long.
    jobs = [
        job for job in cluster.active() if not job.release.paused or job.is_late(cluster.now_ns)
    ]
    grants = _grants(cluster, jobs)
    gave_way = [_room_made(cluster, job) for job in cluster.active()]
    for job in cluster.active():
        before, now = cluster.queue.grants.get(job.job_id), grants.get(job.job_id)
        for_whom = now.yields_to if now is not None else ""
        if before == now and job.release.yields_to == for_whom:
            continue  # Before the first plan a job may be preempted as restored from the journal.
        _make_room(cluster, job, for_whom)
        yields = _yields(job, now)
        is_new = before is None or before.yields != yields
        job.release.yields = frozenset(yields)
        cluster.touch(job)
        if yields and job.is_open and is_new:
            cluster.note("gives_back", job.job_id, workers=" ".join(yields))
    cluster.queue.grants = grants
    if gave_way != [_room_made(cluster, job) for job in cluster.active()]:
        for job in cluster.active():
            if job.release.yields_to:
                cluster.touch(job)  # It may have waited for one that need not leave any more.


def _room_made(cluster: ClusterState, job: JobState) -> tuple[str, bool]:
    """Return what other preempted jobs depend on: whether it leaves, or is counted on to."""
    return job.release.yields_to, job.job_id in cluster.queue.grants


def _make_room(cluster: ClusterState, job: JobState, for_whom: str) -> None:
    """Begin or cancel the preemption of a job; `pausing` carries it out.

    Members that were asked to leave and need not any more join the next group at that boundary.
    """
    before, job.release.yields_to = job.release.yields_to, for_whom
    if bool(before) is bool(for_whom):
        return
    if not job.release.paused:  # A pause continues, with the deadlines of a preemption.
        job.release.reset()
    if job.is_open:
        name = "gives_way" if for_whom else "gives_way_no_more"
        cluster.note(name, job.job_id, to=for_whom or before)


def _yields(job: JobState, grant: Allocation | None) -> tuple[WorkerId, ...]:
    """Return the workers to release singly: members of a preempted job leave together."""
    if grant is None:
        return ()
    if grant.yields_to and job.is_open:
        return tuple(w for w in grant.yields if not job.is_member(w))
    return grant.yields


def _grants(cluster: ClusterState, jobs: list[JobState]) -> dict[JobId, Allocation]:
    """Return the allocation of each job; empty if there is only one job."""
    if len(jobs) < 2:
        return {}
    nodes = [capacity_of(cluster, state) for state in cluster.book.ordered() if state.may_host()]
    demands = [demand_of(cluster, job) for job in jobs]
    decision = queue.decide(demands, nodes, now_ns=cluster.now_ns)
    cluster.queue.outdated_at_ns = decision.wake_ns
    return {grant.job_id: grant for grant in decision.value}


def capacity_of(cluster: ClusterState, state: NodeState) -> NodeCapacity:
    is_closed = bool(cluster.book.closed(state, cluster.now_ns))
    return NodeCapacity.of(state.node, free_slots=state.free_slots(), cordoned=is_closed)


def demand_of(cluster: ClusterState, job: JobState) -> Demand:
    alive = {w: job.workers[w] for w in _by_preference(job) if job.workers[w].stop_cause is None}
    nodes = {worker_id: cluster.node_of(worker) for worker_id, worker in alive.items()}
    passed_over = eviction.passed_over_until(
        cluster.config,
        until_ns=job.release.passed_over_until_ns,
        num_checkpoints=len(job.reports.checkpoints),
    )
    limits = job.limits
    if job.release.paused:
        # It keeps what it has until it is saved, and gets no more.
        whole = len(alive) // limits.workers_per_replica * limits.workers_per_replica
        limits = replace(
            limits, max_workers=max(limits.min_workers, min(whole, limits.max_workers))
        )
    elif job.node_links.out:
        # An excluded worker keeps its slot, and its state, until another has replaced it.
        step = limits.workers_per_replica
        num_out = sum(1 for w in alive.values() if w.node_id in job.node_links.out)
        more = -(-num_out // step) * step
        limits = replace(limits, max_workers=limits.max_workers + more)
    return Demand(
        spec=limits,
        sequence=job.submission.sequence,
        held_slots=tuple((w, nodes[w].node.node_id) for w in alive if nodes[w].may_host()),
        away=sum(1 for w in alive if not nodes[w].is_live()),
        out=frozenset(job.node_links.out),
        trains=job.is_open,
        is_ending=job.is_open
        and any(
            w.has_finished(job.generation) for w in job.present_members() if w.stop_cause is None
        ),
        keeps_state=job.generation > 0,
        in_place=job.is_in_place(),
        stays=eviction.why_it_stays(
            job.spec, in_place=job.is_in_place(), num_checkpoints=len(job.reports.checkpoints)
        ),
        passed_over_until_ns=passed_over.value,
        passed_over_why=passed_over.reason,
    )


def _by_preference(job: JobState) -> list[WorkerId]:
    """Return members by rank, then ready workers, then starting ones; excluded ones come last."""
    members = [w for w in job.member_ids() if w in job.workers]
    others = sorted(
        set(job.workers) - set(members),
        key=lambda w: (job.workers[w].report.phase is WorkerPhase.STARTING, w),
    )
    out = job.node_links.out
    return sorted(members + others, key=lambda w: job.workers[w].node_id in out)


def place(
    cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int
) -> tuple[NodeId, ...]:
    """Choose nodes for more workers of a job: those of its plan that are free by now.

    Returns:
        Empty if no worker can or need be started; `explain` returns why.
    """
    return _place(cluster, job, hosting, have).value


def explain(cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int) -> str:
    """Return why `place` chooses nothing, and what would let workers start."""
    grant = cluster.queue.grants.get(job.job_id)
    reason = grant.reason if grant is not None else ""
    if not reason and have >= job.limits.min_workers:
        return job.waits_for  # Not for more workers: it has the group's own reason.
    if not reason:
        offers = [state.offer(hosting.get(state.node.node_id, 0)) for state in _open(cluster, job)]
        reason = placement.place(job.limits, offers, have).reason
    return _with_cordons(cluster, reason)


def _place(
    cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int
) -> Decision[tuple[NodeId, ...]]:
    """Place the plan's workers on free slots; the reason considers only nodes with free slots."""
    grant = cluster.queue.grants.get(job.job_id)
    if grant is not None and not grant.starts:
        return Decision((), "the plan has no new workers for it")
    planned = None if grant is None else dict(grant.starts)
    # Full nodes matter where a job is bound to one, or is spread over them and their zones.
    counts_full = job.spec.strategy is not Strategy.PACK
    offers = []
    for state in _open(cluster, job):
        node_id = state.node.node_id
        if not state.free_slots() and not (counts_full and node_id in hosting):
            continue
        offer = state.offer(hosting.get(node_id, 0))
        if planned is not None:
            offer = replace(offer, free_slots=min(offer.free_slots, planned.get(node_id, 0)))
        offers.append(offer)
    return placement.place(job.limits, offers, have)


def _with_cordons(cluster: ClusterState, reason: str) -> str:
    """Add to a reason which nodes are quarantined or cordoned."""
    live = [s for s in cluster.book.ordered() if s.may_host()]
    ill = [s for s in live if s.quarantine(cluster.now_ns)]
    if ill:
        named = [f"{s.node.node_id} is quarantined: {s.quarantine(cluster.now_ns)}" for s in ill]
        reason = "; ".join([reason, *named[:NAMED_MAX], *(["..."] if len(ill) > NAMED_MAX else [])])
    closed = [s.node.node_id for s in live if s.node.node_id in cluster.book.cordons]
    if not closed:
        return reason
    names = listed(closed)
    if len(closed) == len(live):
        return f"no new worker may start: {names} cordoned; elastic uncordon NODE takes that back"
    return f"{reason}; cordoned: {names}"


def _open(cluster: ClusterState, job: JobState) -> list[NodeState]:
    """Return the nodes on which new workers of a job may start, by id."""
    book, out = cluster.book, job.node_links.out
    return [
        state
        for state in book.ordered()
        if state.may_host()
        and not book.closed(state, cluster.now_ns)
        and state.node.node_id not in out
    ]

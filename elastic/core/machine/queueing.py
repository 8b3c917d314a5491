"""The queue at work: facts for its policy, and what its answer means for each job.

Rule: the plan is made anew when something changed that it depends on, never per report or per
step, and a job alone in the cluster needs none. A worker that is given back leaves as one on a
draining node does: at a boundary, and nothing is done twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import eviction, placement, queue
from elastic.core.policy.decision import Decision
from elastic.core.policy.demands import NAMED_MAX, Allocation, Demand, listed
from elastic.core.policy.packing import NodeCapacity
from elastic.core.world import JobId, NodeId, Strategy, WorkerId, WorkerPhase


def plan(cluster: ClusterState) -> None:
    """Divide the cluster again if that may have another result; touch the jobs that it concerns."""
    if cluster.replan_at_ns is not None and cluster.now_ns >= cluster.replan_at_ns:
        cluster.replan = True
    if not cluster.replan:
        return
    if cluster.now_ns < cluster.hold_until_ns:
        # After a restart most nodes are still away: a plan without them would move everybody.
        cluster.replan_at_ns = cluster.hold_until_ns
        return
    cluster.replan, cluster.replan_at_ns = False, None
    # Slots of a job that pauses come free by themselves, if that does not take too long.
    jobs = [job for job in cluster.active() if not job.paused or job.is_late(cluster.now_ns)]
    grants = _grants(cluster, jobs)
    gave_way = [_room_made(cluster, job) for job in cluster.active()]
    for job in cluster.active():
        before, now = cluster.grants.get(job.job_id), grants.get(job.job_id)
        for_whom = now.yields_to if now is not None else ""
        if before == now and job.yields_to == for_whom:
            continue  # Before the first plan a job may give way as the coordinator before had it.
        _make_room(cluster, job, for_whom)
        yields = _yields(job, now)
        is_new = before is None or before.yields != yields
        job.yields = frozenset(yields)
        cluster.touch(job)
        if yields and job.is_open and is_new:
            cluster.note("gives_back", job.job_id, workers=" ".join(yields))
    cluster.grants = grants
    if gave_way != [_room_made(cluster, job) for job in cluster.active()]:
        for job in cluster.active():
            if job.yields_to:
                cluster.touch(job)  # It may have waited for one that need not leave any more.


def _room_made(cluster: ClusterState, job: JobState) -> tuple[str, bool]:
    """Return what others that make room look at: whether it leaves, or is counted on to."""
    return job.yields_to, job.job_id in cluster.grants


def _make_room(cluster: ClusterState, job: JobState, for_whom: str) -> None:
    """Begin to have a job leave all its slots, or end that: `pausing` does what follows.

    Whoever was asked to leave and need not any more is put into the next group at that boundary.
    """
    before, job.yields_to = job.yields_to, for_whom
    if bool(before) is bool(for_whom):
        return
    if not job.paused:  # It goes on with its pause, in the time of who gives way.
        job.forget_rest()
    if job.is_open:
        name = "gives_way" if for_whom else "gives_way_no_more"
        cluster.note(name, job.job_id, to=for_whom or before)


def _yields(job: JobState, grant: Allocation | None) -> tuple[WorkerId, ...]:
    """Return who is given back one by one: members of a job that gives way leave together."""
    if grant is None:
        return ()
    if grant.yields_to and job.is_open:
        return tuple(w for w in grant.yields if not job.is_member(w))
    return grant.yields


def _grants(cluster: ClusterState, jobs: list[JobState]) -> dict[JobId, Allocation]:
    """Return what each job may have; nothing for a job without a rival."""
    if len(jobs) < 2:
        return {}
    rooms = [room_of(cluster, state) for state in cluster.book.ordered() if state.may_host()]
    claims = [claim_of(cluster, job) for job in jobs]
    decision = queue.decide(claims, rooms, now_ns=cluster.now_ns)
    cluster.replan_at_ns = decision.wake_ns
    return {grant.job_id: grant for grant in decision.value}


def room_of(cluster: ClusterState, state: NodeState) -> NodeCapacity:
    """Return a node as the plan sees it."""
    return NodeCapacity(
        node_id=state.node.node_id,
        slots=state.node.num_slots,
        resources=state.node.resources,
        free_slots=state.free_slots(),
        accelerator_type=state.node.accelerator_type,
        labels=state.node.labels,
        cordoned=bool(cluster.book.closed(state, cluster.now_ns)),
    )


def claim_of(cluster: ClusterState, job: JobState) -> Demand:
    """Return a job as the plan sees it."""
    alive = {w: job.workers[w] for w in _by_preference(job) if job.workers[w].stop_cause is None}
    nodes = {worker_id: cluster.node_of(worker) for worker_id, worker in alive.items()}
    passed_over = eviction.passed_over_until(
        cluster.config,
        until_ns=job.passed_over_until_ns,
        num_checkpoints=len(job.checkpoints),
    )
    limits = job.limits
    if job.paused:
        # It keeps what it has until it is saved, and gets no more.
        whole = len(alive) // limits.workers_per_replica * limits.workers_per_replica
        limits = replace(
            limits, max_workers=max(limits.min_workers, min(whole, limits.max_workers))
        )
    elif job.links.out:
        # Who is out keeps its slot, and its state, until another has taken its place.
        step = limits.workers_per_replica
        num_out = sum(1 for w in alive.values() if w.node_id in job.links.out)
        more = -(-num_out // step) * step
        limits = replace(limits, max_workers=limits.max_workers + more)
    return Demand(
        spec=limits,
        sequence=job.sequence,
        seats=tuple((w, nodes[w].node.node_id) for w in alive if nodes[w].may_host()),
        away=sum(1 for w in alive if not nodes[w].is_live()),
        out=frozenset(job.links.out),
        trains=job.is_open,
        is_ending=job.is_open and any(_has_finished(job, alive.get(w)) for w in job.member_ids()),
        keeps_state=job.generation > 0,
        in_place=job.is_in_place(),
        stays=eviction.why_it_stays(
            job.spec, in_place=job.is_in_place(), num_checkpoints=len(job.checkpoints)
        ),
        passed_over_until_ns=passed_over.value,
        passed_over_why=passed_over.reason,
    )


def _by_preference(job: JobState) -> list[WorkerId]:
    """Members by rank, then those who are ready, then those who start; last who must stay out."""
    members = [w for w in job.member_ids() if w in job.workers]
    others = sorted(
        set(job.workers) - set(members),
        key=lambda w: (job.workers[w].report.phase is WorkerPhase.STARTING, w),
    )
    out = job.links.out
    return sorted(members + others, key=lambda w: job.workers[w].node_id in out)


def _has_finished(job: JobState, worker: WorkerState | None) -> bool:
    if worker is None:
        return False
    report = worker.report
    return report.phase is WorkerPhase.FINISHED and report.generation == job.generation


def place(
    cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int
) -> tuple[NodeId, ...]:
    """Choose nodes for further workers of a job: what its plan says and is free by now.

    Args:
        cluster: all there is.
        job: whose workers are to start.
        hosting: its living workers by node.
        have: how many of them it will keep.

    Returns:
        Nothing when nothing can or need be started; `explain` says why.
    """
    return _place(cluster, job, hosting, have).value


def explain(cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int) -> str:
    """Return why `place` chooses nothing, and what would let workers start."""
    grant = cluster.grants.get(job.job_id)
    reason = grant.reason if grant is not None else ""
    if not reason and have >= job.limits.min_workers:
        return job.waits_for  # Not for more workers: the group says what for.
    if not reason:
        offers = [state.offer(hosting.get(state.node.node_id, 0)) for state in _open(cluster, job)]
        reason = placement.place(job.limits, offers, have).reason
    return _with_cordons(cluster, reason)


def _place(
    cluster: ClusterState, job: JobState, hosting: Mapping[NodeId, int], have: int
) -> Decision[tuple[NodeId, ...]]:
    """Place what the plan says by what is free; its reason knows only of nodes with room."""
    grant = cluster.grants.get(job.job_id)
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
    """Say that nodes are there on which nothing may start."""
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
    book, out = cluster.book, job.links.out
    return [
        state
        for state in book.ordered()
        if state.may_host()
        and not book.closed(state, cluster.now_ns)
        and state.node.node_id not in out
    ]

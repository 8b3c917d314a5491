"""Which nodes a job may use while a cluster is upgraded node by node; see `dialects`.

Rule: a job with workers uses the protocol version of its workers, first of those in its newest
group. While nodes of two versions are connected and the version of a job is unknown, nothing is
started for it. A worker that turns out to use another version is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import placement
from elastic.core.policy.demands import listed
from elastic.core.policy.dialects import Dialect
from elastic.core.policy.placement import NodeOffer
from elastic.core.world import NO_GENERATION, ExitCause, ExitKind, NodeId, WorkerId

CAUSE = ExitCause(ExitKind.STOPPED, detail="it does not understand the others: another version")


def dialect(cluster: ClusterState, job: JobState) -> Dialect | None:
    """Return what new workers of a job must speak, None if none may be started.

    After a restart a node counts once its agent has come back, unless all that are there are alike.
    """
    spoken = cluster.book.spoken
    if not cluster.book.is_mixed():
        return next(iter(spoken.values()), None)
    living = {w: one.node_id for w, one in job.workers.items() if one.stop_cause is None}
    if not living:
        return _chosen(cluster, job)
    nodes = (living.get(worker_id) for worker_id in (*job.member_ids(), *sorted(living)))
    ours = next((spoken[node_id] for node_id in nodes if node_id in spoken), None)
    if ours is None:
        return None
    if job.generation == NO_GENERATION and not _has_enough(cluster, job, living, ours):
        # There is nothing yet that would be lost.
        other = _chosen(cluster, job)
        return other if other is not None and _has_enough(cluster, job, {}, other) else ours
    return ours


def strangers(cluster: ClusterState, job: JobState) -> tuple[WorkerId, ...]:
    """Return workers that do not understand the job's others.

    Such as those that were given up, replaced by others, and are back.
    """
    ours = dialect(cluster, job) if cluster.book.is_mixed() else None
    if ours is None:
        return ()
    spoken = cluster.book.spoken
    members = frozenset(job.member_ids() if job.is_open else ())
    return tuple(
        worker_id
        for worker_id, worker in sorted(job.workers.items())
        if worker.stop_cause is None
        and worker_id not in members
        and spoken.get(worker.node_id, ours) != ours
    )


def explain(cluster: ClusterState, job: JobState, reason: str) -> str:
    """Add that nodes would take workers of the job, which would not understand its others.

    Args:
        cluster: all there is.
        job: that waits.
        reason: why it waits.
    """
    if not cluster.book.is_mixed():
        return reason
    ours = dialect(cluster, job)
    if ours is None and any(worker.stop_cause is None for worker in job.workers.values()):
        return "the nodes of its workers are not back: of two versions, theirs must be known first"
    others = [state for state in hosts(cluster) if state.dialect != ours]
    names = [s.node.node_id for s in others if placement.takes(job.limits, s.offer(0))]
    if not names:
        return reason
    advice = "upgrade the other nodes, too"
    if job.workers and (job.spec.run_path or job.generation == NO_GENERATION):
        advice += ", or let the job go over by elastic pause and elastic resume"
    return (
        f"{reason}; on {listed(names)} there is another version of elastic-torch, whose workers do "
        f"not train together with this job's: {advice}"
    )


def _chosen(cluster: ClusterState, job: JobState) -> Dialect | None:
    """Return what a job without workers begins with: the newest in which it can run.

    At once; or else in place of jobs of lower priority; or else when others have left.
    """
    there, below = hosts(cluster), _held_below(cluster, job)
    found = sorted({state.dialect for state in there}, reverse=True)
    for offer in (
        lambda state: state.offer(0),
        lambda state: _offer_without(state, below.get(state.node.node_id, ())),
        lambda state: _offer_without(state, tuple(state.held)),
    ):
        for one in found:
            offers = [offer(state) for state in there if state.dialect == one]
            if placement.place(job.limits, offers, 0).value:
                return one
    return next(iter(found), None)


def _has_enough(
    cluster: ClusterState, job: JobState, living: Mapping[WorkerId, NodeId], ours: Dialect
) -> bool:
    """Return whether a job that has not begun has its min in a dialect, or finds it now."""
    have = sum(1 for node_id in living.values() if cluster.book.spoken.get(node_id) == ours)
    offers = [state.offer(0) for state in hosts(cluster) if state.dialect == ours]
    return have >= job.limits.min_workers or bool(placement.place(job.limits, offers, have).value)


def hosts(cluster: ClusterState) -> list[NodeState]:
    """Return the nodes on which new workers may start, by id."""
    now_ns, book = cluster.now_ns, cluster.book
    return [s for s in book.ordered() if s.may_host() and not book.closed(s, now_ns)]


def _held_below(cluster: ClusterState, job: JobState) -> dict[NodeId, tuple[WorkerId, ...]]:
    """Return the workers of jobs of lower priority, by node."""
    found: dict[NodeId, tuple[WorkerId, ...]] = {}
    for other in cluster.active():
        if other.spec.priority < job.spec.priority:
            for worker_id, worker in other.workers.items():
                found[worker.node_id] = (*found.get(worker.node_id, ()), worker_id)
    return found


def _offer_without(state: NodeState, workers: Sequence[WorkerId]) -> NodeOffer:
    """Return what a node could take if these workers were not there."""
    free = state.node.resources
    for worker_id, held in state.held.items():
        free = free if worker_id in workers else free.minus(held)
    slots = min(state.node.num_slots, state.free_slots() + len(workers))
    return replace(state.offer(0), free=free, free_slots=slots)

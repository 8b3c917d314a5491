"""Which nodes a job may use while a cluster is upgraded node by node; see `dialects`.

Rule: as long as a job has workers it speaks what they do, those of its newest group before others.
Nothing is started while nobody knows what that is; whoever turns out to speak another is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import placement
from elastic.core.policy.claims import NAMED_MAX
from elastic.core.policy.dialects import Dialect
from elastic.core.policy.placement import Offer
from elastic.core.world import ExitCause, ExitKind, WorkerId

CAUSE = ExitCause(ExitKind.STOPPED, detail="it does not understand the others: another version")


def dialect(cluster: Cluster, job: JobState) -> Dialect | None:
    """Return what new workers of a job must speak, None if none may be started.

    After a restart a node counts once its agent has come back, unless all that are there are alike.
    """
    spoken = cluster.book.spoken
    if not cluster.book.is_mixed():
        return next(iter(spoken.values()), None)
    living = [w for w, worker in job.workers.items() if worker.stop_cause is None]
    if not living:
        return _chosen(cluster, job)
    for worker_id in (*job.member_ids(), *sorted(living)):
        worker = job.workers.get(worker_id)
        if worker is not None and worker.stop_cause is None and worker.node_id in spoken:
            return spoken[worker.node_id]
    return None


def strangers(cluster: Cluster, job: JobState) -> tuple[WorkerId, ...]:
    """Return workers that do not understand the job's others: given up, replaced, and back."""
    if not cluster.book.is_mixed():
        return ()
    ours, spoken = dialect(cluster, job), cluster.book.spoken
    members = frozenset(job.member_ids() if job.is_open else ())
    return tuple(
        worker_id
        for worker_id, worker in sorted(job.workers.items())
        if ours is not None
        and worker.stop_cause is None
        and worker_id not in members
        and spoken.get(worker.node_id, ours) != ours
    )


def explain(cluster: Cluster, job: JobState, hosts: Iterable[NodeState], reason: str) -> str:
    """Add that nodes would take workers of the job, which would not understand its others.

    Args:
        cluster: all there is.
        job: that waits.
        hosts: on which workers may start.
        reason: why it waits.
    """
    if not cluster.book.is_mixed():
        return reason
    ours = dialect(cluster, job)
    if ours is None and job.workers:
        return "the nodes of its workers are not back: of two versions, theirs must be known first"
    others = [s for s in hosts if s.dialect != ours and placement.takes(job.limits, s.offer(0))]
    if not others:
        return reason
    names = [state.node.node_id for state in others]
    told = ", ".join(names[:NAMED_MAX]) + (", ..." if len(names) > NAMED_MAX else "")
    advice = "upgrade the other nodes, too"
    if job.workers and job.spec.run_path:
        advice += ", or let the job go over by elastic pause and elastic resume"
    return (
        f"{reason}; on {told} there is another version of elastic-torch, whose workers do not "
        f"train together with this job's: {advice}"
    )


def _chosen(cluster: Cluster, job: JobState) -> Dialect | None:
    """Return what a job without workers begins with: the newest in which it can run.

    At once, or else when others have left what nodes of that version have.
    """
    now_ns, book = cluster.now_ns, cluster.book
    hosts = [s for s in book.ordered() if s.is_live() and not s.draining]
    hosts = [s for s in hosts if not book.closed(s, now_ns)]
    found = sorted({state.dialect for state in hosts}, reverse=True)
    for is_empty in (False, True):
        for one in found:
            offers = [_offer(s, is_empty=is_empty) for s in hosts if s.dialect == one]
            if placement.place(job.limits, offers, 0).value:
                return one
    return next(iter(found), None)


def _offer(state: NodeState, *, is_empty: bool) -> Offer:
    """Return what a node could take, now or if nobody else were there."""
    offer = state.offer(0)
    return replace(offer, free=offer.total, free_slots=state.node.num_slots) if is_empty else offer

"""Nodes whose stream has ended: how long they may be silent, and when they are suspected.

Rule: the end of a stream is not the death of a node. Workers that train with a dead node notice by
themselves and report it. After a restart or a suspend of this coordinator, streams of healthy nodes
have ended too.
"""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.events.coordinator import WokeFromSuspend
from elastic.core.facts import NodePhase, WorkerPhase
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.nodes import NodeState

WAKING_S = 2.0
"""A stream that ends so soon after a suspend of this coordinator has ended because of it."""
AWAY_GRACE_S = 2.0
"""Grace for silent nodes of a group that is broken or short of a member, after a restart or suspend
of the coordinator: their agents may be reconnecting with reports that were not delivered. The group
is not replaced before."""


def on_woke(cluster: ClusterState, event: WokeFromSuspend) -> None:
    """Handle a suspend of this coordinator: agents gave it up, and reconnect as after a restart.

    Their groups train meanwhile, or report missing members as soon as the first agent is back.
    """
    book = cluster.book
    book.woke_ns = cluster.now_ns
    for state in book.unsettled_nodes():
        if state.phase is not NodePhase.DISCONNECTED:
            continue
        if state.is_away() or state.since_ns < cluster.now_ns - event.slept_ns:
            # It was away before: only a short grace, or repeated suspends would extend it for ever.
            until_ns = cluster.now_ns + ns(AWAY_GRACE_S)
            state.absence.lost_at_ns = max(state.absence.lost_at_ns or 0, until_ns)
        else:
            extend_grace(cluster, state)
            check_broken_groups(cluster, state)
    cluster.note("woke", slept_s=f"{event.slept_ns / 1e9:.1f}")
    cluster.touch_active()


def caused_by_our_suspend(cluster: ClusterState, state: NodeState) -> bool:
    """Return whether a stream that ends now has ended because of our suspend.

    The ends of ten thousand streams are noticed one after the other.
    """
    woke_ns = cluster.book.woke_ns
    if woke_ns is None:
        return False
    since_ns = cluster.now_ns - woke_ns
    is_unreceived = state.received_ns <= woke_ns
    return since_ns < ns(cluster.config.adoption_grace_s if is_unreceived else WAKING_S)


def extend_grace(cluster: ClusterState, state: NodeState) -> None:
    """Wait for a node whose stream ended because of our suspend, as after our restart."""
    state.absence.is_extended = True
    until_ns = cluster.now_ns + ns(cluster.config.adoption_grace_s)
    state.absence.lost_at_ns = max(state.absence.lost_at_ns or 0, until_ns)


def check_broken_groups(cluster: ClusterState, state: NodeState) -> None:
    """Give up this node early if a group with members on it is broken: it is the cause."""
    for worker_id in sorted(state.held):
        job = cluster.job_of(worker_id)
        if job is None or not job.is_open or not job.is_member(worker_id):
            continue
        if any(is_broken(job, member) for member in job.present_members()):
            state.absence.lost_at_ns = cluster.now_ns + _timeout_ns(state)


def is_broken(job: JobState, worker: WorkerState) -> bool:
    """Return whether a worker reports that the newest group is broken."""
    report = worker.report
    return report.phase is WorkerPhase.BROKEN and report.generation == job.generation


def suspect_silent_nodes(cluster: ClusterState, job: JobState, *, only_away: bool = False) -> None:
    """Give up the disconnected nodes of a broken group early: they are the cause."""
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        node = cluster.node_of(worker) if worker else None
        if node is None or node.phase is not NodePhase.DISCONNECTED:
            continue
        lost_at_ns = node.absence.lost_at_ns
        if lost_at_ns is not None and (node.is_away() or not only_away):
            node.absence.lost_at_ns = min(lost_at_ns, cluster.now_ns + _timeout_ns(node))


def _timeout_ns(state: NodeState) -> int:
    """Return how long a silent node of a broken group may still come back."""
    return ns(AWAY_GRACE_S) if state.is_away() else 0

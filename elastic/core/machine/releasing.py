"""Nodes that are given up as lost, and draining nodes that may leave.

Rule: a draining node is released once it runs nothing and its memory holds nothing that is needed.
At its deadline copies keep it no longer. A node that still runs workers is ended by its agent
(`machine.agent_departure`).
"""

from __future__ import annotations

from elastic.core.facts import JobId, NodePhase
from elastic.core.machine import copies
from elastic.core.machine.agent_messages import lose_node_workers
from elastic.core.machine.jobs import ClusterState
from elastic.core.machine.nodes import NodeState
from elastic.core.messages import Release


def settle_nodes(cluster: ClusterState) -> None:
    """Give up nodes whose time is over; release drained ones that are not needed any more."""
    known: dict[JobId, copies.CopyCoverage] = {}
    for state in cluster.book.unsettled_nodes():
        lost_at_ns = cluster.book.lost_at_ns(state)
        if lost_at_ns is not None and cluster.now_ns >= lost_at_ns:
            why = state.reason or "its agent did not come back"
            state.move(NodePhase.LOST, cluster.now_ns, why)
            state.drain.is_on = False
            cluster.note("node_lost", node=state.node.node_id, reason=why)
            lose_node_workers(cluster, state, why)
            cluster.touch_active()
        elif state.phase is NodePhase.DRAINING and not state.held and not cluster.dirty:
            _release(cluster, state, known)
        cluster.book.settle(state)


def _release(
    cluster: ClusterState, state: NodeState, known: dict[JobId, copies.CopyCoverage]
) -> None:
    """Release a node that runs nothing, unless its copies are still needed.

    Called after all jobs were reconciled: before, copies may still get another holder.
    """
    drain = state.drain
    if drain.is_released:
        return
    before, drain.kept_for = drain.kept_for, copies.kept_for(cluster, state, known)
    if drain.kept_for:
        if drain.kept_for != before:
            cluster.note("node_kept", node=state.node.node_id, reason=drain.kept_for)
        return
    drain.is_released = True
    cluster.send(state, Release(state.reason))
    cluster.note("node_released", node=state.node.node_id)

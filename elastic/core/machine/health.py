"""The health of nodes: problems that their agents report, and the faults of their workers.

Rule: a node in quarantine gets no new workers; those that train there continue, and no job is
charged. A problem ends when the agent no longer reports it; faults expire with time, and with a
restart of the coordinator.
"""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.facts import ExitCause
from elastic.core.machine.jobs import ClusterState
from elastic.core.machine.nodes import NodeFaults, NodeState
from elastic.core.policy import health as policy

FAULTS_KEPT = 100


def take_problems(cluster: ClusterState, state: NodeState, problems: tuple[str, ...]) -> None:
    """Record the problems of a node that its agent reports."""
    if problems == state.problems:
        return
    was, state.problems = bool(state.problems), problems
    _replan(cluster)
    if problems:
        what = "; ".join(problems)
        cluster.note("node_quarantined", node=state.node.node_id, reason=what)
    elif was:
        cluster.note("node_healthy", node=state.node.node_id)


def forgive(cluster: ClusterState, state: NodeState) -> None:
    """Forget the faults of a node's workers: by an operator, or because its agent is new."""
    state.faults = NodeFaults()
    if state.node.node_id in cluster.book.faulty:
        del cluster.book.faulty[state.node.node_id]
        cluster.note("node_healthy", node=state.node.node_id)
        _replan(cluster)


def end_quarantines(cluster: ClusterState) -> None:
    """Let workers start again on nodes whose time in quarantine is over."""
    for node_id in [*cluster.book.faulty]:
        state = cluster.book.nodes[node_id]
        if state.faults.until_ns <= cluster.now_ns:
            del cluster.book.faulty[node_id]
            cluster.note("node_healthy", node=node_id)
            _replan(cluster)


def _replan(cluster: ClusterState) -> None:
    cluster.queue.is_outdated = True
    cluster.touch_active()


def take_exit(cluster: ClusterState, state: NodeState, cause: ExitCause, *, ordered: bool) -> None:
    """Count an exit that may be the node's fault, and apply the policy."""
    if not policy.is_fault(cause, ordered=ordered) or not state.is_live() or state.drain.is_on:
        return
    now_ns, config = cluster.now_ns, cluster.config
    faults = state.faults
    faults.moments = [*faults.moments[1 - FAULTS_KEPT :], now_ns]
    since_ns = now_ns - ns(config.fault_window_s)
    elsewhere = [
        sum(moment > since_ns for moment in other.faults.moments)
        for other in cluster.book.ordered()
        if other is not state and other.is_live()
    ]
    decision = policy.judge_faults(faults.moments, elsewhere, now_ns, config)
    if decision.value > faults.until_ns:
        faults.until_ns, faults.why = decision.value, decision.reason
        cluster.book.faulty[state.node.node_id] = None
        _replan(cluster)
        cluster.note(
            "node_quarantined",
            node=state.node.node_id,
            reason=decision.reason,
            for_s=f"{(decision.value - now_ns) / 1e9:g}",
        )

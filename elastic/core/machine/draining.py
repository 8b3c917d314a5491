"""Draining nodes: the groups they belong to, the job's budget for them, and checkpoints before.

Rule: this module reads the state and calls policies; it changes only the budget of a job.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.facts import LeavingNode, NodeId, WorkerId
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.messages import Preemption
from elastic.core.policy import membership
from elastic.core.policy import preemption as policy
from elastic.core.policy.decision import Decision


def nodes_of(cluster: ClusterState, job: JobState) -> list[NodeState]:
    """Return the nodes of the newest group that drain and are not gone yet, by id.

    It iterates over the draining nodes, which are few or none, because it is called very often.
    """
    book = cluster.book
    if not book.draining or not job.is_open:
        return []
    members = {member.node_id for member in job.members}
    return [book.nodes[name] for name in sorted(book.draining) if name in members]


def news(cluster: ClusterState, job: JobState) -> Preemption | None:
    """Return the message about leaving nodes for the newest group, None if there are none.

    Its worker id is still empty.
    """
    nodes = nodes_of(cluster, job)
    if not nodes:
        return None
    first = min(nodes, key=lambda state: (state.drain.by_ns or 0, state.node.node_id))
    ranks: dict[NodeId, list[int]] = {state.node.node_id: [] for state in nodes}
    for member in job.members:
        if member.node_id in ranks:
            ranks[member.node_id].append(member.rank)
    leaving = tuple(LeavingNode(name, tuple(numbers)) for name, numbers in ranks.items())
    left_ns = max(0, (first.drain.by_ns or 0) - cluster.now_ns)
    return Preemption(WorkerId(""), job.generation, left_ns, first.drain.announced, leaving)


def charge_preemptions(cluster: ClusterState, job: JobState, staying: Iterable[WorkerId]) -> bool:
    """Count the nodes that a drain takes from the open group; return whether that is one too many.

    Counted when the group is replaced, so that the count is durable with the next group.
    """
    if not job.is_open:
        return False
    kept = frozenset(staying)
    gone = sorted({m.node_id for m in job.members if m.worker_id not in kept})
    taken = [
        name
        for name in gone
        if (state := cluster.book.nodes.get(name)) is not None and state.drain.announced
    ]
    if not taken:
        return False
    job.outcome.preemptions += len(taken)
    cluster.note(
        "preempted", job.job_id, nodes=",".join(taken), preemptions=job.outcome.preemptions
    )
    decision = policy.judge_budget(job.spec, job.outcome.preemptions)
    if decision.value:
        job.reason = decision.reason
    return decision.value


def save_is_due(cluster: ClusterState, job: JobState) -> Decision[bool]:
    """Decide whether a checkpoint must be taken now because of nodes that leave."""
    nodes = nodes_of(cluster, job)
    if not nodes or not job.spec.run_path:
        job.newest.leavers.saved_ns = None
        return Decision(False, "no node of the group leaves")
    found = job.candidates(cluster.book)
    candidates = {worker_id: found[worker_id] for worker_id in sorted(found)}
    wanted = membership.choose(job.limits, job.current(), candidates, interrupting=True)
    # Others may replace them, but only members that stay have the state.
    can_go_on = any(job.is_member(worker_id) for worker_id in wanted)
    leave_by_ns = min(state.drain.by_ns or 0 for state in nodes)
    return policy.save_before(
        leave_by_ns, last_ns=job.newest.leavers.saved_ns, now_ns=cluster.now_ns, can_go_on=can_go_on
    )

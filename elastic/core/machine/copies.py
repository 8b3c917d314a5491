"""Copies of a job's state on nodes that do not train it: who holds one, and who is told so.

Rule: what is told follows from what is wanted and from what was told before in the streams that
stand, so that a node that comes back, and a coordinator that knows nothing yet, are brought up to
date by the same lines. Nothing of it is durable: agents tell in their hello what they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from elastic.core.config import ns
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.messages import CopyFailed, CopyOrder, DropCopy, KeepCopy, Replicate
from elastic.core.policy import replication
from elastic.core.policy.replication import NO_COPY, NO_NODE, Place
from elastic.core.world import HeldCopy, JobId, NodeId

REFUSED_S = 30.0
"""How long a node is not asked again that could not take a copy."""


def key_of(cluster: Cluster, job_id: JobId) -> str:
    """Return the secret by which agents and workers of a job know each other."""
    return hashlib.blake2b(job_id.encode(), key=cluster.secret, digest_size=32).hexdigest()


def addresses(cluster: Cluster, job: JobState) -> tuple[str, ...]:
    """Return where copies of a job's state lie, as far as is known; the newest first."""
    held = sorted(job.copies.held.items(), key=lambda item: (item[1], item[0]), reverse=True)
    nodes = [cluster.book.nodes.get(node_id) for node_id, _ in held]
    return tuple(n.copies_at for n in nodes if n is not None and n.is_present() and n.copies_at)


# ---------------------------------------------------------------- what agents say


def take_held(cluster: Cluster, state: NodeState, said: Sequence[HeldCopy]) -> None:
    """Take what a node says that it holds; what nobody can want any more is given back."""
    node_id = state.node.node_id
    held = {copy.job_id: (copy.generation, copy.steps) for copy in said}
    for job_id in state.copies:
        known = cluster.jobs.get(job_id)
        if known is not None and job_id not in held:
            known.copies.held.pop(node_id, None)
    state.copies = tuple(held)
    for job_id, age in held.items():
        known = cluster.jobs.get(job_id)
        if known is None or known.has_ended():
            _send(cluster, state, DropCopy(job_id, "its job has ended, or is not known here"))
        else:
            known.copies.held[node_id] = age
            cluster.touch(known)


def on_failed(cluster: Cluster, state: NodeState, message: CopyFailed) -> None:
    """A copy did not reach the node that is to hold it: another one is chosen for a while."""
    job = cluster.jobs.get(message.job_id)
    ordered = job.copies.ordered if job is not None else None
    if job is None or ordered is None or ordered[0] != state.session:
        return
    if message.node_id == ordered[2].node_id:
        job.copies.refused_until_ns[message.node_id] = cluster.now_ns + ns(REFUSED_S)
        cluster.note("copy_failed", job.job_id, node=message.node_id, reason=message.reason)
        cluster.touch(job)


# ---------------------------------------------------------------- what follows


def settle(cluster: Cluster, job: JobState) -> int | None:
    """Choose the node that holds the copy, and bring everyone concerned up to date.

    Returns:
        When to look at the job again, None for when something happens.
    """
    copies = job.copies
    _learn_wish(job)
    for node_id in copies.held:
        _grant(cluster, job, cluster.book.nodes.get(node_id))
    if not job.is_open or not copies.every_n_steps:
        return None  # Nobody takes snapshots, and what is held may be needed.
    # After a restart, nodes that hold a copy are about to say so; meanwhile they go on taking it.
    not_before_ns = cluster.hold_until_ns if copies.held else copies.not_before_ns
    if not copies.holder and cluster.now_ns < not_before_ns:
        return not_before_ns
    wake_ns = None
    if not _stays(cluster, job):
        decision = replication.choose(_places(cluster, job), cluster.now_ns)
        wake_ns = decision.wake_ns
        if (decision.value, decision.reason) != (copies.holder, copies.reason):
            node = decision.value or "none"
            cluster.note("copy_placed", job.job_id, node=node, reason=decision.reason)
        copies.holder, copies.reason = decision.value, decision.reason
    holder = cluster.book.nodes.get(copies.holder)
    _grant(cluster, job, holder)
    _order(cluster, job, holder)
    _drop_superfluous(cluster, job)
    return wake_ns


def end(cluster: Cluster, job: JobState) -> None:
    """The job has ended: nobody needs its state any more."""
    _order(cluster, job, None)
    for node_id in sorted({*job.copies.held, *job.copies.granted}):
        _drop(cluster, job, node_id, f"the job has {job.phase.value}")


def _learn_wish(job: JobState) -> None:
    """Know what the members want; what was wanted holds while nobody says anything."""
    members = [job.workers[w].report for w in job.member_ids() if w in job.workers]
    told = [r.copies_every for r in members if r.copies_every and r.generation == job.generation]
    if told:
        job.copies.every_n_steps = max(told)


def _grant(cluster: Cluster, job: JobState, state: NodeState | None) -> None:
    """Let a node take copies and give them, once in each of its streams."""
    if state is None or state.session is None:
        return
    if job.copies.granted.get(state.node.node_id) != state.session:
        job.copies.granted[state.node.node_id] = state.session
        _send(cluster, state, KeepCopy(job.job_id, key_of(cluster, job.job_id)))


def _order(cluster: Cluster, job: JobState, holder: NodeState | None) -> None:
    """Have the node of rank 0 bring its snapshots to the chosen node, and no other node.

    It is said again to each new group, because a node forgets it with the memory of the job.
    """
    source, wanted = _source(cluster, job), None
    if holder is not None and source is not None and source.session is not None:
        order = Replicate(
            job.job_id,
            holder.node.node_id,
            holder.copies_at,
            key_of(cluster, job.job_id),
            job.copies.every_n_steps,
        )
        wanted = (source.session, job.generation, order)
    before, job.copies.ordered = job.copies.ordered, wanted
    if before is not None and (wanted is None or wanted[0] != before[0]):
        last = cluster.book.of_session(before[0])
        if last is not None:
            _send(cluster, last, Replicate(job.job_id, NO_NODE, "", "", 1))
    if wanted is not None and wanted != before and source is not None:
        _send(cluster, source, wanted[2])


def _drop_superfluous(cluster: Cluster, job: JobState) -> None:
    """Free older copies elsewhere, once the chosen node has a newer one."""
    newest = job.copies.held.get(job.copies.holder, NO_COPY)
    for node_id, age in sorted(job.copies.held.items()):
        if node_id != job.copies.holder and replication.is_superfluous(age, newest):
            _drop(cluster, job, node_id, f"node {job.copies.holder} has a newer one")


def _drop(cluster: Cluster, job: JobState, node_id: NodeId, reason: str) -> None:
    """Tell a node to free its copy; one that missed this says in its hello that it has it."""
    job.copies.held.pop(node_id, None)
    job.copies.granted.pop(node_id, None)
    state = cluster.book.nodes.get(node_id)
    if state is not None:
        _send(cluster, state, DropCopy(job.job_id, reason))


def _stays(cluster: Cluster, job: JobState) -> bool:
    """Return whether the copy stays where it is to lie now."""
    state = cluster.book.nodes.get(job.copies.holder)
    if state is None:
        return False
    return replication.is_fit(_place(job, state, _members(job), 0), cluster.now_ns)


def _source(cluster: Cluster, job: JobState) -> NodeState | None:
    """Return the node that sends: all members have the same state, so that one is enough."""
    leader = job.workers.get(job.member_ids()[0]) if job.is_open else None
    return cluster.node_of(leader) if leader is not None else None


def _places(cluster: Cluster, job: JobState) -> list[Place]:
    """Return all nodes as the policy sees them."""
    busy: dict[NodeId, int] = {}
    for other in cluster.active():
        if other is not job and other.copies.holder:
            busy[other.copies.holder] = busy.get(other.copies.holder, 0) + 1
    members = _members(job)
    return [
        _place(job, state, members, busy.get(state.node.node_id, 0))
        for state in cluster.book.ordered()
    ]


def _members(job: JobState) -> frozenset[NodeId]:
    return frozenset(m.node_id for m in job.group.members) if job.group else frozenset()


def _place(job: JobState, state: NodeState, members: frozenset[NodeId], num_copies: int) -> Place:
    node_id = state.node.node_id
    return Place(
        node_id=node_id,
        host=state.node.host,
        is_present=state.is_present(),
        is_live=state.is_live(),
        is_leaving=state.draining,
        takes_copies=bool(state.copies_at),
        has_members=node_id in members,
        copy=job.copies.held.get(node_id, NO_COPY),
        num_copies=num_copies,
        refused_until_ns=job.copies.refused_until_ns.get(node_id, 0),
    )


def _send(cluster: Cluster, state: NodeState, message: CopyOrder) -> None:
    if state.session is not None:
        cluster.do(SendAgent(state.session, message))

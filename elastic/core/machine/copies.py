"""Copies of a job's state on other nodes: which node holds one, and which orders were sent.

State that is alike on all members has one source, the node of rank 0; of a sharded model the node
of each member is a source.

Rule: orders follow from what is wanted and what was sent over the streams that are open now. A node
that reconnects and a new coordinator are therefore brought up to date by the same code. Nothing is
durable: agents report in their hello what they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from elastic.core.config import ns
from elastic.core.copy_messages import (
    CopyEndpoint,
    CopyFailed,
    CopyOrder,
    DropCopy,
    KeepCopy,
    Replicate,
)
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine.copy_book import PlacedCopyOrder
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import replication
from elastic.core.policy.replication import NO_NODE, CopyCandidate
from elastic.core.world import ALL_ALIKE, NO_GENERATION, HeldCopy, JobId, NodeId, zone_of

REFUSED_S = 30.0
"""How long a node is not asked again that could not take a copy."""
NEIGHBOURS = 32
"""Nodes behind a source, and nodes that do not train, among which its copy finds a place."""


class StateLocation(NamedTuple):
    """Where state of a job lies.

    Attributes:
        endpoint: of the node's agent.
        is_sharded: rows of a sharded model, so that one member of a group asks for all.
    """

    node_id: NodeId
    endpoint: CopyEndpoint
    is_sharded: bool


def key_of(cluster: ClusterState, job_id: JobId) -> str:
    """Return the secret by which agents and workers of a job know each other."""
    return hashlib.blake2b(job_id.encode(), key=cluster.secret, digest_size=32).hexdigest()


def addresses(cluster: ClusterState, job: JobState) -> tuple[StateLocation, ...]:
    """Return where a job's state lies, as far as is known: copies of it, the newest first.

    Then nodes whose workers have left a sharded run: what was in their memory may be there still.
    """
    held = {node_id: by for node_id, by in job.copies.held.items() if by}
    order = sorted(held, key=lambda node_id: (max(held[node_id].values()), node_id), reverse=True)
    since_ns = cluster.now_ns - ns(replication.KEPT_S)
    left = {node_id for node_id, at_ns in job.copies.left_ns.items() if at_ns >= since_ns}
    order += sorted({*left, *job.copies.holders} - {*held} - _members(job))
    found = [(node_id, cluster.book.nodes.get(node_id)) for node_id in order]
    return tuple(
        StateLocation(node_id, state.copy_endpoint, ALL_ALIKE not in held.get(node_id, ()))
        for node_id, state in found
        if state is not None and state.is_present() and state.copy_endpoint.at
    )


# ---------------------------------------------------------------- what agents say


def take_held(cluster: ClusterState, state: NodeState, said: Sequence[HeldCopy]) -> None:
    """Take what a node says that it holds; what nobody can want any more is given back."""
    node_id = state.node.node_id
    held: dict[JobId, dict[NodeId, replication.Age]] = {}
    for copy in said:
        held.setdefault(copy.job_id, {})[copy.source] = (copy.generation, copy.steps)
    for job_id in state.copies:
        known = cluster.jobs.get(job_id)
        if known is None:
            continue
        _note_lost(known, node_id, held.get(job_id, {}))
        if job_id not in held:
            known.copies.held.pop(node_id, None)
            cluster.touch(known)
    state.copies = tuple(held)
    for job_id, by_source in held.items():
        known = cluster.jobs.get(job_id)
        if known is None or known.has_ended():
            _send(cluster, state, DropCopy(job_id, "its job has ended, or is not known here"))
        else:
            for source, age in by_source.items():
                if known.copies.newest(node_id, source) != age:
                    known.copies.received_ns[node_id, source] = cluster.now_ns
            known.copies.held[node_id] = by_source
            cluster.touch(known)


def _note_lost(job: JobState, node_id: NodeId, now: dict[NodeId, replication.Age]) -> None:
    """Have what a node was to hold, and has no more, brought there again."""
    for source, age in job.copies.held.get(node_id, {}).items():
        is_wanted = job.copies.holders.get(source, (NO_NODE, ""))[0] == node_id
        if is_wanted and now.get(source, replication.NO_COPY) < age:
            job.copies.num_lost[source] = job.copies.num_lost.get(source, 0) + 1


def on_failed(cluster: ClusterState, state: NodeState, message: CopyFailed) -> None:
    """A copy did not reach the node that is to hold it: another one is chosen for a while."""
    job = cluster.jobs.get(message.job_id)
    if job is None:
        return
    source = state.node.node_id if job.copies.is_sharded else ALL_ALIKE
    ordered = job.copies.ordered.get(source)
    if ordered is None or ordered.session != state.session:
        return
    if message.node_id == ordered.order.node_id != NO_NODE:
        until_ns = cluster.now_ns + ns(REFUSED_S)
        job.copies.refused_until_ns[source, message.node_id] = until_ns
        cluster.note("copy_failed", job.job_id, node=message.node_id, reason=message.reason)
        cluster.touch(job)


# ---------------------------------------------------------------- what follows


def settle(cluster: ClusterState, job: JobState) -> int | None:
    """Choose the nodes that hold copies, and bring everyone concerned up to date.

    Returns:
        When to look at the job again, None for when something happens.
    """
    copies = job.copies
    _learn_request(job)
    for node_id in copies.held:
        _grant(cluster, job, cluster.book.nodes.get(node_id))
    for session in [*copies.granted.values()]:
        _grant(cluster, job, cluster.book.of_session(session))
    if not job.is_open or not copies.every_n_steps:
        return None  # Nobody takes snapshots, and what is held may be needed.
    # After a restart, nodes that hold a copy are about to say so; meanwhile they go on taking it.
    not_before_ns = cluster.hold_until_ns if copies.held else copies.not_before_ns
    if not any(node for node, _ in copies.holders.values()) and cluster.now_ns < not_before_ns:
        return not_before_ns
    senders = _senders(cluster, job)
    _forget(cluster, job, senders)
    wakes = [_choose(cluster, job, source) for source in senders]
    for source, sender in senders.items():
        _grant(cluster, job, cluster.book.nodes.get(copies.holders[source][0]))
        if copies.is_sharded:  # It gives its own rows to whoever goes on without its workers.
            _grant(cluster, job, sender)
    _order(cluster, job, senders)
    _drop_superfluous(cluster, job)
    return min((wake_ns for wake_ns in wakes if wake_ns is not None), default=None)


def end(cluster: ClusterState, job: JobState) -> None:
    """The job has ended: nobody needs its state any more."""
    _order(cluster, job, {})
    for node_id in sorted({*job.copies.held, *job.copies.granted}):
        _drop(cluster, job, node_id, ALL_ALIKE, f"the job has {job.phase.value}")


def _learn_request(job: JobState) -> None:
    """Know what the members want; what was wanted holds while nobody says anything."""
    members = [job.workers[w].report for w in job.member_ids() if w in job.workers]
    told = [r for r in members if r.copies_every and r.generation == job.generation]
    if told:
        job.copies.every_n_steps = max(report.copies_every for report in told)
        job.copies.is_sharded = any(report.copies_sharded for report in told)


def _senders(cluster: ClusterState, job: JobState) -> dict[NodeId, NodeState]:
    """Return who sends the copy of which source, in the order of the group's members."""
    leader = job.workers.get(job.member_ids()[0])
    if not job.copies.is_sharded:
        return {ALL_ALIKE: cluster.node_of(leader)} if leader is not None else {}
    members = job.group.members if job.group is not None else ()
    nodes = [cluster.book.nodes.get(member.node_id) for member in members]
    return {state.node.node_id: state for state in nodes if state is not None}


def _forget(cluster: ClusterState, job: JobState, senders: dict[NodeId, NodeState]) -> None:
    """Keep no place for the copies of those who send none any more; remember who they were."""
    copies, since_ns = job.copies, cluster.now_ns - ns(replication.KEPT_S)
    copies.left_ns |= {source: cluster.now_ns for source in copies.holders if source}
    copies.left_ns = {
        s: at_ns for s, at_ns in copies.left_ns.items() if s not in senders and at_ns >= since_ns
    }
    copies.holders = {s: known for s, known in copies.holders.items() if s in senders}


def _choose(cluster: ClusterState, job: JobState, source: NodeId) -> int | None:
    """Find a node for a source's copy, unless it can stay; returns when to look again."""
    known, _ = before = job.copies.holders.get(source, (NO_NODE, ""))
    state = cluster.book.nodes.get(known)
    if state is not None:
        place = _place(job, state, _members(job), 0, source)
        if replication.is_fit(place, cluster.now_ns, source):
            return None
    decision = replication.choose(_places(cluster, job, source), cluster.now_ns, source)
    job.copies.holders[source] = decision.value, decision.reason
    if job.copies.holders[source] != before:
        of = {"source": source} if source else {}
        node = decision.value or "none"
        cluster.note("copy_placed", job.job_id, node=node, reason=decision.reason, **of)
    return decision.wake_ns


def _grant(cluster: ClusterState, job: JobState, state: NodeState | None) -> None:
    """Let a node take copies and give them, once in each of its streams."""
    if state is None or state.session is None:
        return
    if job.copies.granted.get(state.node.node_id) != state.session:
        job.copies.granted[state.node.node_id] = state.session
        _send(cluster, state, KeepCopy(job.job_id, key_of(cluster, job.job_id)))


def _order(cluster: ClusterState, job: JobState, senders: dict[NodeId, NodeState]) -> None:
    """Have each sender bring its snapshots to the chosen node, and nobody else.

    It is said again to each new group, because a node forgets it with the memory of the job; and
    when the chosen node has lost what it was brought, because who has brought it does not know.
    """
    before, job.copies.ordered = job.copies.ordered, {}
    for source, sender in senders.items():
        order = _wanted(cluster, job, source, sender)
        if order is not None and sender.session is not None:
            holder = cluster.book.nodes.get(order.node_id)
            life = holder.node.incarnation if holder is not None else 0
            lost = job.copies.num_lost.get(source, 0)
            told = PlacedCopyOrder(sender.session, job.generation, order, life, lost)
            job.copies.ordered[source] = told
    sending = {told.session for told in job.copies.ordered.values()}
    for session in [told.session for told in before.values()]:
        last = cluster.book.of_session(session)
        if last is not None and session not in sending:
            _send(cluster, last, Replicate(job.job_id, NO_NODE, "", "", 1))
    for source, wanted in job.copies.ordered.items():
        if wanted != before.get(source):
            _send(cluster, senders[source], wanted.order)


def _wanted(
    cluster: ClusterState, job: JobState, source: NodeId, sender: NodeState
) -> Replicate | None:
    """Return what is told to who sends a source's copy; None for nothing.

    That there is no node for it is told of a shard: workers would wait for it to arrive.
    """
    generation = job.generation if source != ALL_ALIKE else 0
    every = job.copies.every_n_steps
    holder = cluster.book.nodes.get(job.copies.holders[source][0])
    if holder is not None:
        key, node_id = key_of(cluster, job.job_id), holder.node.node_id
        at, fingerprint = holder.copy_endpoint
        return Replicate(
            job.job_id, node_id, at, key, every, source, generation, fingerprint=fingerprint
        )
    if source == ALL_ALIKE:
        return None
    return Replicate(job.job_id, NO_NODE, "", "", every, source, generation)


# ---------------------------------------------------------------- who may not leave yet


class CopyCoverage(NamedTuple):
    """How far a job's copies have come to where they are to lie.

    Attributes:
        trains: all members of its newest group do.
        base: the oldest of them, see `_base`; without a group, of those of lost nodes.
        holders: nodes where they are to lie.
        has_place: each has one, or may have within some time.
        staying: without a group: the newest of each source on nodes that do not leave.
        is_waiting: without a group: somebody waits on such a node with what all have alike.
    """

    trains: bool
    base: replication.Age
    holders: frozenset[NodeId]
    has_place: bool
    staying: Mapping[NodeId, replication.Age] = MappingProxyType({})
    is_waiting: bool = False


def kept_for(cluster: ClusterState, state: NodeState, known: dict[JobId, CopyCoverage]) -> str:
    """Return why a drained node stays for a moment: what it has of a job lies nowhere else yet.

    Args:
        cluster: of which all jobs are at rest.
        state: of the node.
        known: how far jobs are, as found in this step for other nodes.

    Returns:
        "" if it may go, or its time is over.
    """
    if state.leave_by_ns is None or cluster.now_ns >= state.leave_by_ns:
        return ""
    node_id = state.node.node_id
    for job in cluster.active():
        if not _has_part(cluster, job, node_id):
            continue
        spread = known.get(job.job_id) or _spread(cluster, job)
        known[job.job_id] = spread
        left = replication.UncopiedState(
            rests=job.must_release_workers() and not job.is_open,
            trains=spread.trains,
            has_place=spread.has_place,
            is_elsewhere=_goes_on_without(job, node_id, spread)
            if not job.is_open
            else spread.trains and _is_elsewhere(job, node_id, spread),
        )
        decision = replication.is_left_behind(left)
        if decision.value:
            return f"has state of job {job.job_id}: {decision.reason}"
    return ""


def _is_elsewhere(job: JobState, node_id: NodeId, spread: CopyCoverage) -> bool:
    """Return whether copies of all that a group which trains has lie on other nodes."""
    ages = job.copies.held.get(node_id, {}).values()
    is_spread = node_id not in spread.holders and spread.base > replication.NO_COPY
    return is_spread and all(age <= spread.base for age in ages)


def _goes_on_without(job: JobState, node_id: NodeId, spread: CopyCoverage) -> bool:
    """Return whether a job without a group has all that it could go on from on nodes that stay."""
    if spread.is_waiting:
        return True
    if not job.copies.is_sharded:
        age = job.copies.newest(node_id, ALL_ALIKE)
        return spread.staying.get(ALL_ALIKE, replication.NO_COPY) >= age
    is_known = spread.base > replication.NO_COPY
    return is_known and spread.staying.get(node_id, replication.NO_COPY) >= spread.base


def _without_group(cluster: ClusterState, job: JobState, spread: CopyCoverage) -> CopyCoverage:
    """Say of a job that waits where its state lies: what all have alike, with any who waits.

    Of a sharded model the rows of a lost node are as old as their copy, and rows of the others that
    are as old are enough.
    """
    present = {at: s for at, s in cluster.book.nodes.items() if s.is_present()}
    found: dict[NodeId, replication.Age] = {}
    staying: dict[NodeId, replication.Age] = {}
    for at, by in job.copies.held.items():
        for source, age in by.items() if at in present else ():
            found[source] = max(age, found.get(source, age))
            if not present[at].draining:
                staying[source] = max(age, staying.get(source, age))
    lost = [found.get(at, replication.NO_COPY) for at in _members(job) if at not in present]
    base = min(lost, default=replication.NO_COPY)
    is_kept = all(staying.get(s) == found.get(s) for s in _members(job) if s not in present)
    # What the group before has left has others as sources.
    base = base if is_kept and base[0] == job.generation else replication.NO_COPY
    waiting = [job.workers[w] for w in job.member_ids() if w in job.workers]
    is_waiting = (
        not job.copies.is_sharded
        and job.training_since_ns is not None
        and any(
            w.stop_cause is None and w.report.in_place and not present[w.node_id].draining
            for w in waiting
            if w.node_id in present
        )
    )
    return spread._replace(base=base, staying=staying, is_waiting=is_waiting)


def _has_part(cluster: ClusterState, job: JobState, node_id: NodeId) -> bool:
    """Return whether a node has copies of a job, or rows of its own that workers left there."""
    copies = job.copies
    left_ns = cluster.now_ns if node_id in copies.holders else copies.left_ns.get(node_id)
    is_kept = left_ns is not None and left_ns + ns(replication.KEPT_S) > cluster.now_ns
    return bool(copies.held.get(node_id)) or (copies.is_sharded and is_kept)


def _spread(cluster: ClusterState, job: JobState) -> CopyCoverage:
    copies = job.copies
    refused = {of for (of, _), at_ns in copies.refused_until_ns.items() if at_ns > cluster.now_ns}
    places = [(source, at) for source, (at, _) in copies.holders.items()]
    spread = CopyCoverage(
        job.is_open and job.training_since_ns is not None,
        _base(job),
        frozenset(at for _, at in places),
        # None was chosen yet by a coordinator that has only begun.
        all(at or source in refused for source, at in places),
    )
    return spread if job.is_open else _without_group(cluster, job, spread)


def _drop_superfluous(cluster: ClusterState, job: JobState) -> None:
    """Free older copies elsewhere, once the chosen nodes have newer ones of all sources."""
    copies, base = job.copies, _base(job)
    for node_id in sorted(copies.held):
        for source, age in sorted(copies.held[node_id].items()):
            is_wanted = copies.holders.get(source, (NO_NODE, ""))[0] == node_id
            if not is_wanted and replication.is_superfluous(age, base):
                _drop(cluster, job, node_id, source, "other nodes have newer ones", age)


def _base(job: JobState) -> replication.Age:
    """Return the oldest of the copies that are wanted, `NO_COPY` before all of them have come.

    Rows of a group that is over are none of those: without the rows of all its nodes, of which some
    may be lost, they are worth nothing.
    """
    ages = [job.copies.newest(at, source) for source, (at, _) in job.copies.holders.items()]
    if job.copies.is_sharded:
        ages = [age if age[0] == job.generation else replication.NO_COPY for age in ages]
    return min(ages, default=replication.NO_COPY)


def _drop(
    cluster: ClusterState,
    job: JobState,
    node_id: NodeId,
    source: NodeId,
    reason: str,
    age: replication.Age = (NO_GENERATION, 0),
) -> None:
    """Tell a node to free its copy; one that missed this says in its hello that it has it.

    Of the age that we know of, if one is given: a newer one, which we are about to hear of, may be
    the newest anywhere. By default whatever is there is freed.
    """
    job.copies.held.get(node_id, {}).pop(source, None)
    if source == ALL_ALIKE or not job.copies.held.get(node_id):
        job.copies.held.pop(node_id, None)
    if source == ALL_ALIKE:
        job.copies.granted.pop(node_id, None)
    state = cluster.book.nodes.get(node_id)
    if state is not None:
        _send(cluster, state, DropCopy(job.job_id, reason, source, *age))


def _places(cluster: ClusterState, job: JobState, source: NodeId) -> list[CopyCandidate]:
    """Return the nodes among which the policy chooses: of a large cluster, some for each shard."""
    busy: dict[NodeId, int] = {}
    for other in cluster.active():
        for of, (holder, _) in other.copies.holders.items():
            if holder and (other is not job or of != source):
                busy[holder] = busy.get(holder, 0) + 1
    members, states = _members(job), cluster.book.ordered()
    if source != ALL_ALIKE and len(states) > 2 * NEIGHBOURS:
        states = _near(job, states, members, source)
    return [
        _place(job, state, members, busy.get(state.node.node_id, 0), source) for state in states
    ]


def _near(
    job: JobState, states: Sequence[NodeState], members: frozenset[NodeId], source: NodeId
) -> list[NodeState]:
    """Return the source, those behind it, all round, some that do not train, those that have it."""
    ids = [state.node.node_id for state in states]
    at = ids.index(source) if source in ids else 0
    near = {*(ids[at:] + ids[:at])[: NEIGHBOURS + 1]}
    near |= {*[node_id for node_id in ids if node_id not in members][:NEIGHBOURS]}
    near |= {node_id for node_id, by in job.copies.held.items() if source in by}
    return [state for state in states if state.node.node_id in near]


def _members(job: JobState) -> frozenset[NodeId]:
    return frozenset(m.node_id for m in job.group.members) if job.group else frozenset()


def _place(
    job: JobState, state: NodeState, members: frozenset[NodeId], num_copies: int, source: NodeId
) -> CopyCandidate:
    node_id = state.node.node_id
    return CopyCandidate(
        node_id=node_id,
        host=state.node.host,
        zone=zone_of(state.node.labels),
        is_present=state.is_present(),
        is_live=state.is_live(),
        is_leaving=state.draining,
        takes_copies=bool(state.copy_endpoint.at),
        has_members=node_id in members,
        copy=job.copies.newest(node_id, source),
        num_copies=num_copies,
        refused_until_ns=job.copies.refused_until_ns.get((source, node_id), 0),
    )


def _send(cluster: ClusterState, state: NodeState, message: CopyOrder) -> None:
    if state.session is not None:
        cluster.do(SendAgent(state.session, message))

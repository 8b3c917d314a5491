"""Copies of a job's state on other nodes: which node holds one, and which orders were sent.

State that is the same on all members has one source, the node of rank 0; of a sharded model the
node of each member is a source.

Rule: orders follow from the wanted state and from what was sent over the streams that are open now.
So the same code updates a node that reconnects and serves a new coordinator. Nothing is durable:
agents report in their Hello the copies that they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from elastic.core.config import ns
from elastic.core.copy_messages import (
    CopyFailed,
    DropCopy,
    KeepCopy,
    Replicate,
)
from elastic.core.machine.copy_book import PlacedCopyOrder
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import replication
from elastic.core.policy.replication import NO_NODE, CopyCandidate
from elastic.core.world import ALL_ALIKE, NO_GENERATION, HeldCopy, JobId, NodeId, zone_of

REFUSED_S = 30.0
"""How long a node that could not receive a copy is not chosen again."""
NEIGHBOURS = 32
"""Candidates for a copy: so many nodes behind its source, and so many that do not train."""


class StateLocation(NamedTuple):
    """A node that has state of a job.

    Attributes:
        address: "host:port" of the node's agent.
        is_sharded: it has rows of a sharded model, so that one member requests all of them.
    """

    node_id: NodeId
    address: str
    is_sharded: bool


def key_of(cluster: ClusterState, job_id: JobId) -> str:
    """Return the secret with which agents and workers of a job authenticate to each other."""
    return hashlib.blake2b(job_id.encode(), key=cluster.term.secret, digest_size=32).hexdigest()


def addresses(cluster: ClusterState, job: JobState) -> tuple[StateLocation, ...]:
    """Return the known locations of a job's state: nodes with copies, the newest first.

    Then nodes whose workers have left a sharded run: their memory may still hold its rows.
    """
    held = {node_id: by for node_id, by in job.copies.held.items() if by}
    order = sorted(held, key=lambda node_id: (max(held[node_id].values()), node_id), reverse=True)
    since_ns = cluster.now_ns - ns(replication.KEPT_S)
    left = {node_id for node_id, at_ns in job.copies.left_ns.items() if at_ns >= since_ns}
    order += sorted({*left, *job.copies.holders} - {*held} - _members(job))
    found = [(node_id, cluster.book.nodes.get(node_id)) for node_id in order]
    return tuple(
        StateLocation(node_id, state.copies_at, ALL_ALIKE not in held.get(node_id, ()))
        for node_id, state in found
        if state is not None and state.is_present() and state.copies_at
    )


def newest(job: JobState, found: Sequence[StateLocation]) -> HeldCopy | None:
    """Return the newest copy there of state that all members share, None if there is none."""
    ages = [job.copies.newest(one.node_id, ALL_ALIKE) for one in found]
    age = max(ages, default=replication.NO_COPY)
    return HeldCopy(job.job_id, *age) if age > replication.NO_COPY else None


# ---------------------------------------------------------------- reports of agents


def take_held(cluster: ClusterState, state: NodeState, copies: Sequence[HeldCopy]) -> None:
    """Record the copies that a node reports; drop those of ended or unknown jobs."""
    node_id = state.node.node_id
    held: dict[JobId, dict[NodeId, replication.Age]] = {}
    for copy in copies:
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
            cluster.send(state, DropCopy(job_id, "its job has ended, or is not known here"))
        else:
            for source, age in by_source.items():
                if known.copies.newest(node_id, source) != age:
                    known.copies.received_ns[node_id, source] = cluster.now_ns
            known.copies.held[node_id] = by_source
            cluster.touch(known)


def _note_lost(job: JobState, node_id: NodeId, now: dict[NodeId, replication.Age]) -> None:
    """Count copies that their holder has lost, so that they are sent there again."""
    for source, age in job.copies.held.get(node_id, {}).items():
        is_wanted = job.copies.holders.get(source, (NO_NODE, ""))[0] == node_id
        if is_wanted and now.get(source, replication.NO_COPY) < age:
            job.copies.num_lost[source] = job.copies.num_lost.get(source, 0) + 1


def on_failed(cluster: ClusterState, state: NodeState, message: CopyFailed) -> None:
    """Handle a copy that could not be sent to its holder: choose another node for a while."""
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


# ---------------------------------------------------------------- orders


def settle(cluster: ClusterState, job: JobState) -> int | None:
    """Choose the nodes that hold copies, and send the orders that are missing.

    Returns:
        When to evaluate the job again, None for the next event.
    """
    copies = job.copies
    _learn_request(job)
    for node_id in copies.held:
        _grant(cluster, job, cluster.book.nodes.get(node_id))
    for session in [*copies.granted.values()]:
        _grant(cluster, job, cluster.book.of_session(session))
    if not job.is_open or not copies.every_n_steps:
        return None  # No snapshots are taken, and held copies may be needed.
    # After a restart, nodes are about to report their copies; meanwhile they still receive them.
    not_before_ns = cluster.term.hold_until_ns if copies.held else copies.not_before_ns
    if not any(node for node, _ in copies.holders.values()) and cluster.now_ns < not_before_ns:
        return not_before_ns
    senders = _senders(cluster, job)
    _forget(cluster, job, senders)
    wakes = [_choose(cluster, job, source) for source in senders]
    for source, sender in senders.items():
        _grant(cluster, job, cluster.book.nodes.get(copies.holders[source][0]))
        if copies.is_sharded:  # It serves its own rows to a group without its workers.
            _grant(cluster, job, sender)
    _order(cluster, job, senders)
    _drop_superfluous(cluster, job)
    return min((wake_ns for wake_ns in wakes if wake_ns is not None), default=None)


def end(cluster: ClusterState, job: JobState) -> None:
    _order(cluster, job, {})
    for node_id in sorted({*job.copies.held, *job.copies.granted}):
        _drop(cluster, job, node_id, ALL_ALIKE, f"the job has {job.phase.value}")


def _learn_request(job: JobState) -> None:
    """Take the members' request for copies; the last one holds while they report none."""
    members = [worker.report for worker in job.present_members()]
    reported = [r for r in members if r.copies_every and r.generation == job.generation]
    if reported:
        job.copies.every_n_steps = max(report.copies_every for report in reported)
        job.copies.is_sharded = any(report.copies_sharded for report in reported)


def _senders(cluster: ClusterState, job: JobState) -> dict[NodeId, NodeState]:
    """Return the sender of each source's copy, in the order of the group's members."""
    leader = job.workers.get(job.member_ids()[0])
    if not job.copies.is_sharded:
        return {ALL_ALIKE: cluster.node_of(leader)} if leader is not None else {}
    members = job.members
    nodes = [cluster.book.nodes.get(member.node_id) for member in members]
    return {state.node.node_id: state for state in nodes if state is not None}


def _forget(cluster: ClusterState, job: JobState, senders: dict[NodeId, NodeState]) -> None:
    """Remove the holders of sources that send no more copies; remember when these left."""
    copies, since_ns = job.copies, cluster.now_ns - ns(replication.KEPT_S)
    copies.left_ns |= {source: cluster.now_ns for source in copies.holders if source}
    copies.left_ns = {
        s: at_ns for s, at_ns in copies.left_ns.items() if s not in senders and at_ns >= since_ns
    }
    copies.holders = {s: known for s, known in copies.holders.items() if s in senders}


def _choose(cluster: ClusterState, job: JobState, source: NodeId) -> int | None:
    """Choose a node for a source's copy, unless it can stay; return when to try again."""
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
    """Permit a node to receive and serve copies, once over each of its streams."""
    if state is None or state.session is None:
        return
    if job.copies.granted.get(state.node.node_id) != state.session:
        job.copies.granted[state.node.node_id] = state.session
        cluster.send(state, KeepCopy(job.job_id, key_of(cluster, job.job_id)))


def _order(cluster: ClusterState, job: JobState, senders: dict[NodeId, NodeState]) -> None:
    """Order each sender to send its snapshots to the chosen node, and others to stop.

    The order is repeated for each new group, because a node forgets it with the job's memory, and
    when the holder has lost its copy, because the sender does not know that.
    """
    before, job.copies.ordered = job.copies.ordered, {}
    for source, sender in senders.items():
        order = _wanted(cluster, job, source)
        if order is not None and sender.session is not None:
            holder = cluster.book.nodes.get(order.node_id)
            incarnation = holder.node.incarnation if holder is not None else 0
            lost = job.copies.num_lost.get(source, 0)
            placed = PlacedCopyOrder(sender.session, job.generation, order, incarnation, lost)
            job.copies.ordered[source] = placed
    sending = {placed.session for placed in job.copies.ordered.values()}
    for session in [placed.session for placed in before.values()]:
        last = cluster.book.of_session(session)
        if last is not None and session not in sending:
            cluster.send(last, Replicate(job.job_id, NO_NODE, "", "", 1))
    for source, wanted in job.copies.ordered.items():
        if wanted != before.get(source):
            cluster.send(senders[source], wanted.order)


def _wanted(cluster: ClusterState, job: JobState, source: NodeId) -> Replicate | None:
    """Return the order for the sender of a source's copy; None for no order.

    For a shard there is also an order that no node was found: its workers would wait for one.
    """
    generation = job.generation if source != ALL_ALIKE else 0
    every = job.copies.every_n_steps
    holder = cluster.book.nodes.get(job.copies.holders[source][0])
    if holder is not None:
        key, node_id = key_of(cluster, job.job_id), holder.node.node_id
        at = holder.copies_at
        return Replicate(job.job_id, node_id, at, key, every, source, generation)
    if source == ALL_ALIKE:
        return None
    return Replicate(job.job_id, NO_NODE, "", "", every, source, generation)


# ---------------------------------------------------------------- nodes that may not leave yet


class CopyCoverage(NamedTuple):
    """How many of a job's copies have reached their holders.

    Attributes:
        trains: all members of its newest group train.
        base: age of the oldest copy, see `_base`; without a group, of those of lost nodes.
        holders: nodes that should hold them.
        has_place: each copy has a holder, or may get one within some time.
        staying: without a group: age of the newest copy of each source on nodes that stay.
        is_waiting: without a group: a worker waits on such a node with the unsharded state.
    """

    trains: bool
    base: replication.Age
    holders: frozenset[NodeId]
    has_place: bool
    staying: Mapping[NodeId, replication.Age] = MappingProxyType({})
    is_waiting: bool = False


def kept_for(cluster: ClusterState, state: NodeState, known: dict[JobId, CopyCoverage]) -> str:
    """Return why a drained node must stay for a while: only it has some state of a job.

    Args:
        cluster: after all its jobs were reconciled.
        state: of the node.
        known: cache of this step, by job.

    Returns:
        "" if it may go, or its time is over.
    """
    if state.drain.by_ns is None or cluster.now_ns >= state.drain.by_ns:
        return ""
    node_id = state.node.node_id
    for job in cluster.active():
        if not _has_part(cluster, job, node_id):
            continue
        spread = known.get(job.job_id) or _spread(cluster, job)
        known[job.job_id] = spread
        left = replication.UncopiedState(
            is_releasing=job.must_release_workers() and not job.is_open,
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
    """Return whether other nodes have copies of all this node has of a training group."""
    ages = job.copies.held.get(node_id, {}).values()
    is_spread = node_id not in spread.holders and spread.base > replication.NO_COPY
    return is_spread and all(age <= spread.base for age in ages)


def _goes_on_without(job: JobState, node_id: NodeId, spread: CopyCoverage) -> bool:
    """Return whether the nodes that stay have all the state of a job without a group."""
    if spread.is_waiting:
        return True
    if not job.copies.is_sharded:
        age = job.copies.newest(node_id, ALL_ALIKE)
        return spread.staying.get(ALL_ALIKE, replication.NO_COPY) >= age
    is_known = spread.base > replication.NO_COPY
    return is_known and spread.staying.get(node_id, replication.NO_COPY) >= spread.base


def _without_group(cluster: ClusterState, job: JobState, spread: CopyCoverage) -> CopyCoverage:
    """Return the coverage of a job without a group: any waiting worker has unsharded state.

    Of a sharded model, the rows of a lost node are as old as their copy, so copies of the other
    rows need not be newer.
    """
    present = {at: s for at, s in cluster.book.nodes.items() if s.is_present()}
    found: dict[NodeId, replication.Age] = {}
    staying: dict[NodeId, replication.Age] = {}
    for at, by in job.copies.held.items():
        for source, age in by.items() if at in present else ():
            found[source] = max(age, found.get(source, age))
            if not present[at].drain.is_on:
                staying[source] = max(age, staying.get(source, age))
    lost = [found.get(at, replication.NO_COPY) for at in _members(job) if at not in present]
    base = min(lost, default=replication.NO_COPY)
    is_kept = all(staying.get(s) == found.get(s) for s in _members(job) if s not in present)
    # Copies of an earlier generation have other sources.
    base = base if is_kept and base[0] == job.generation else replication.NO_COPY
    is_waiting = (
        not job.copies.is_sharded
        and job.newest.training_since_ns is not None
        and any(
            w.stop_cause is None and w.report.in_place and not present[w.node_id].drain.is_on
            for w in job.present_members()
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
        job.is_open and job.newest.training_since_ns is not None,
        _base(job),
        frozenset(at for _, at in places),
        # A coordinator that has just started has chosen no holder yet.
        all(at or source in refused for source, at in places),
    )
    return spread if job.is_open else _without_group(cluster, job, spread)


def _drop_superfluous(cluster: ClusterState, job: JobState) -> None:
    """Drop older copies on other nodes, once the holders have newer ones of all sources."""
    copies, base = job.copies, _base(job)
    for node_id in sorted(copies.held):
        for source, age in sorted(copies.held[node_id].items()):
            is_wanted = copies.holders.get(source, (NO_NODE, ""))[0] == node_id
            if not is_wanted and replication.is_superfluous(age, base):
                _drop(cluster, job, node_id, source, "other nodes have newer ones", age)


def _base(job: JobState) -> replication.Age:
    """Return the age of the oldest wanted copy, `NO_COPY` before all of them have arrived.

    Rows of an earlier group do not count: they are useless without the rows of all its nodes, some
    of which may be lost.
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
    """Order a node to drop its copy; if it misses this, its next Hello still reports the copy.

    With an age, only a copy of that age is dropped: one that is newer and not reported yet may be
    the newest of all. By default any copy is dropped.
    """
    job.copies.held.get(node_id, {}).pop(source, None)
    if source == ALL_ALIKE or not job.copies.held.get(node_id):
        job.copies.held.pop(node_id, None)
    if source == ALL_ALIKE:
        job.copies.granted.pop(node_id, None)
    state = cluster.book.nodes.get(node_id)
    if state is not None:
        cluster.send(state, DropCopy(job.job_id, reason, source, *age))


def _places(cluster: ClusterState, job: JobState, source: NodeId) -> list[CopyCandidate]:
    """Return the policy's candidates: in a large cluster, a subset for each shard."""
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
    """Return the source, nodes after it (cyclic), some that do not train, and its holders."""
    ids = [state.node.node_id for state in states]
    at = ids.index(source) if source in ids else 0
    near = {*(ids[at:] + ids[:at])[: NEIGHBOURS + 1]}
    near |= {*[node_id for node_id in ids if node_id not in members][:NEIGHBOURS]}
    near |= {node_id for node_id, by in job.copies.held.items() if source in by}
    return [state for state in states if state.node.node_id in near]


def _members(job: JobState) -> frozenset[NodeId]:
    return frozenset(m.node_id for m in job.members)


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
        is_leaving=state.drain.is_on,
        takes_copies=bool(state.copies_at),
        has_members=node_id in members,
        copy=job.copies.newest(node_id, source),
        num_copies=num_copies,
        refused_until_ns=job.copies.refused_until_ns.get((source, node_id), 0),
    )

"""Copies of a job's state on other nodes: which node holds one, and which orders were sent.

State that is the same on all members has one source, the node of rank 0; of a sharded model the
node of each member is a source.

Rule: orders follow from the wanted state and from what was sent over the streams that are open now.
So the same code updates a node that reconnects and serves a new coordinator. Nothing is durable:
agents report in their Hello the copies that they hold.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from elastic.core.config import ns
from elastic.core.copy_messages import CopyFailed, DropCopy, KeepCopy, Replicate
from elastic.core.facts import ALL_ALIKE, NO_GENERATION, HeldCopy, JobId, NodeId, zone_of
from elastic.core.machine.copy_book import PlacedCopyOrder
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.policy import replication
from elastic.core.policy.replication import NO_NODE, CopyCandidate

REFUSED_S = 30.0
"""How long a node that could not receive a copy is not chosen again."""


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
            is_routine = known.copies.is_settled(node_id, by_source)
            known.copies.held[node_id] = by_source
            if not (is_routine and known.is_open):
                cluster.touch(known)


def _note_lost(job: JobState, node_id: NodeId, now: dict[NodeId, replication.Age]) -> None:
    """Have copies that their holder has lost sent there again: the sender does not know that."""
    for source, age in job.copies.held.get(node_id, {}).items():
        placed = job.copies.ordered.get(source)
        is_wanted = placed is not None and placed.order.node_id == node_id
        if placed is not None and is_wanted and now.get(source, replication.NO_COPY) < age:
            job.copies.ordered[source] = placed._replace(generation=NO_GENERATION)


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
    if not job.is_open or not copies.every_n_steps:
        return None  # No snapshots are taken, and held copies may be needed.
    # After a restart, nodes are about to report their copies; meanwhile they still receive them.
    not_before_ns = cluster.term.hold_until_ns if copies.held else copies.not_before_ns
    if not any(copies.holders.values()) and cluster.now_ns < not_before_ns:
        return not_before_ns
    senders = _senders(cluster, job)
    _forget(cluster, job, senders)
    _choose(cluster, job, senders)
    for source, sender in senders.items():
        _grant(cluster, job, cluster.book.nodes.get(copies.holders[source]))
        if copies.is_sharded:  # It serves its own rows to a group without its workers.
            _grant(cluster, job, sender)
    _order(cluster, job, senders)
    _drop_superfluous(cluster, job)
    lacking = {source for source in senders if not copies.holders[source]}
    until = [at_ns for (source, _), at_ns in copies.refused_until_ns.items() if source in lacking]
    return min(until, default=None)


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


def _choose(cluster: ClusterState, job: JobState, senders: Mapping[NodeId, NodeState]) -> None:
    """Choose a node for each source's copy that cannot stay where it is."""
    copies, book = job.copies, cluster.book
    copies.refused_until_ns = {
        key: at_ns for key, at_ns in copies.refused_until_ns.items() if at_ns > cluster.now_ns
    }
    refused: dict[NodeId, set[NodeId]] = {}
    for source, node_id in copies.refused_until_ns:
        refused.setdefault(source, set()).add(node_id)
    members = _members(job)
    num_copies = Counter(copies.holders.values())
    ring: list[CopyCandidate] = []
    for source, sender in senders.items():
        theirs = _have_it(job, source)
        barred = theirs.union(refused.get(source, ()))
        before = copies.holders.get(source)
        state = book.nodes.get(before) if before else None
        if state is not None and state.is_present() and _may_hold(state, barred):
            continue
        ring = ring or replication.ring(
            _candidate(state, members)
            for state in book.nodes.values()
            if state.is_live() and _may_hold(state, ())
        )
        ages = {node_id: by[source] for node_id, by in copies.held.items() if source in by}
        others = theirs - {sender.node.node_id}
        having = [sender, *[book.nodes[node_id] for node_id in others if node_id in book.nodes]]
        decision = replication.choose(
            [_candidate(state, members) for state in having], ring, barred, ages, num_copies
        )
        copies.holders[source] = decision.value
        num_copies[decision.value] += 1
        if decision.value != before:
            of = {"source": source} if source else {}
            node = decision.value or "none"
            cluster.note("copy_placed", job.job_id, node=node, reason=decision.reason, **of)


def _have_it(job: JobState, source: NodeId) -> frozenset[NodeId]:
    """Return the nodes that have a source's state without a copy."""
    return _members(job) if source == ALL_ALIKE else frozenset({source})


def _may_hold(state: NodeState, barred: Collection[NodeId]) -> bool:
    return bool(state.copies_at) and not state.drain.is_on and state.node.node_id not in barred


def _candidate(state: NodeState, members: frozenset[NodeId]) -> CopyCandidate:
    node = state.node
    return CopyCandidate(node.node_id, node.host, zone_of(node.labels), node.node_id in members)


def _grant(cluster: ClusterState, job: JobState, state: NodeState | None) -> None:
    """Permit a node to receive and serve copies, once over each of its streams."""
    if state is None or state.session is None:
        return
    if job.copies.granted.get(state.node.node_id) != state.session:
        job.copies.granted[state.node.node_id] = state.session
        cluster.send(state, KeepCopy(job.job_id, key_of(cluster, job.job_id)))


def _order(cluster: ClusterState, job: JobState, senders: Mapping[NodeId, NodeState]) -> None:
    """Order each sender to send its snapshots to the chosen node, and others to stop.

    The order is repeated for each new group, because a node forgets it with the job's memory, and
    for each new agent of the holder, which has lost the copy.
    """
    before, job.copies.ordered = job.copies.ordered, {}
    key = key_of(cluster, job.job_id)
    for source, sender in senders.items():
        if sender.session is not None:
            holder = cluster.book.nodes.get(job.copies.holders[source])
            order = _wanted(job, source, holder, key)
            incarnation = holder.node.incarnation if holder is not None else 0
            placed = PlacedCopyOrder(sender.session, job.generation, order, incarnation)
            job.copies.ordered[source] = placed
    sending = {placed.session for placed in job.copies.ordered.values()}
    for session in [placed.session for placed in before.values()]:
        last = cluster.book.of_session(session)
        if last is not None and session not in sending:
            cluster.send(last, Replicate(job.job_id, NO_NODE, "", "", 1))
    for source, wanted in job.copies.ordered.items():
        if wanted != before.get(source):
            cluster.send(senders[source], wanted.order)


def _wanted(job: JobState, source: NodeId, holder: NodeState | None, key: str) -> Replicate:
    """Return the order for the sender of a source's copy: perhaps that no node holds it.

    Workers of a sharded model would wait for one.
    """
    generation = job.generation if source != ALL_ALIKE else 0
    every = job.copies.every_n_steps
    if holder is None:
        return Replicate(job.job_id, NO_NODE, "", "", every, source, generation)
    node_id = holder.node.node_id
    return Replicate(job.job_id, node_id, holder.copies_at, key, every, source, generation)


# ---------------------------------------------------------------- nodes that may not leave yet


class CopyCoverage(NamedTuple):
    """What the nodes that stay have of a job's state, if the drained ones go.

    Attributes:
        trains: all members of the newest group train. If not, the next group needs the copies.
        staying: age of the newest copy of each source there.
        base: of the oldest copy of the newest group's, see `_base`; without a group, of the rows of
            lost nodes there: it cannot go on from newer ones.
        has_place: each copy has a holder, or may get one within some time.
        is_waiting: without a group: a worker waits there that has all the state.
    """

    trains: bool
    staying: Mapping[NodeId, replication.Age]
    base: replication.Age
    has_place: bool
    is_waiting: bool


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
        is_saved = job.must_release_workers() and not job.is_open
        if is_saved or not (job.copies.held.get(node_id) or _has_rows(cluster, job, node_id)):
            continue
        coverage = known.get(job.job_id) or _coverage(cluster, job)
        known[job.job_id] = coverage
        if not _is_elsewhere(cluster, job, node_id, coverage):
            why = "it does not lie elsewhere yet" if coverage.trains else "the next group needs it"
            return f"has state of job {job.job_id}: {why}"
    return ""


def _is_elsewhere(
    cluster: ClusterState, job: JobState, node_id: NodeId, coverage: CopyCoverage
) -> bool:
    """Return whether the nodes that stay have what this node has of a job, or never will."""
    if coverage.is_waiting or (coverage.trains and not coverage.has_place):
        return True
    if _has_rows(cluster, job, node_id):  # How new those are only its agent knows.
        copied = coverage.staying.get(node_id, replication.NO_COPY)
        if coverage.base == replication.NO_COPY:
            return False
        if not coverage.trains and copied < coverage.base:
            return False
    return all(
        coverage.staying.get(source, replication.NO_COPY) >= age
        or (not coverage.trains and _works_on(cluster, job, source))
        for source, age in job.copies.held.get(node_id, {}).items()
    )


def _works_on(cluster: ClusterState, job: JobState, node_id: NodeId) -> bool:
    """Return whether a node's own workers are there, which have its rows, and it stays.

    A node that is only known, or whose agent was started anew, may have lost its memory.
    """
    state = cluster.book.nodes.get(node_id)
    is_here = state is not None and state.session is not None and not state.drain.is_on
    return is_here and any(worker.node_id == node_id for worker in job.present_members())


def _coverage(cluster: ClusterState, job: JobState) -> CopyCoverage:
    copies = job.copies
    staying: dict[NodeId, replication.Age] = {}
    for node_id, by in copies.held.items():
        for source, age in by.items() if _stays(cluster, node_id) else ():
            staying[source] = max(age, staying.get(source, age))
    refused = {of for (of, _), at_ns in copies.refused_until_ns.items() if at_ns > cluster.now_ns}
    has_trained = job.newest.training_since_ns is not None
    trains = job.is_open and has_trained
    lost = [at for at in _members(job) if not _is_present(cluster, at)]
    base = min((staying.get(at, replication.NO_COPY) for at in lost), default=replication.NO_COPY)
    return CopyCoverage(
        trains=trains,
        staying=staying,
        base=_base(job) if trains else base,
        # A coordinator that has just started has chosen no holder yet.
        has_place=all(at or source in refused for source, at in copies.holders.items()),
        is_waiting=not job.is_open
        and not copies.is_sharded
        and has_trained
        and any(
            worker.stop_cause is None and worker.report.in_place and _stays(cluster, worker.node_id)
            for worker in job.present_members()
        ),
    )


def _is_present(cluster: ClusterState, node_id: NodeId) -> bool:
    state = cluster.book.nodes.get(node_id)
    return state is not None and state.is_present()


def _stays(cluster: ClusterState, node_id: NodeId) -> bool:
    return _is_present(cluster, node_id) and not cluster.book.nodes[node_id].drain.is_on


def _has_rows(cluster: ClusterState, job: JobState, node_id: NodeId) -> bool:
    """Return whether a node's memory may have rows of a sharded model that workers left there."""
    left_ns = job.copies.left_ns.get(node_id)
    is_kept = left_ns is not None and left_ns + ns(replication.KEPT_S) > cluster.now_ns
    return job.copies.is_sharded and (is_kept or node_id in job.copies.holders)


def _drop_superfluous(cluster: ClusterState, job: JobState) -> None:
    """Drop older copies on other nodes, once the holders have newer ones of all sources."""
    copies, base = job.copies, _base(job)
    for node_id in sorted(copies.held):
        for source, age in sorted(copies.held[node_id].items()):
            is_wanted = copies.holders.get(source) == node_id
            if not is_wanted and replication.is_superfluous(age, base):
                _drop(cluster, job, node_id, source, "other nodes have newer ones", age)


def _base(job: JobState) -> replication.Age:
    """Return the age of the oldest wanted copy, `NO_COPY` before all of them have arrived.

    Rows of an earlier group do not count: they are useless without the rows of all its nodes, some
    of which may be lost.
    """
    ages = [job.copies.newest(at, source) for source, at in job.copies.holders.items()]
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


def _members(job: JobState) -> frozenset[NodeId]:
    return frozenset(m.node_id for m in job.members)

"""The coordinator's state of nodes: sessions, phases and free resources.

Rule: this module only records; other modules decide what a change means for jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.core.config import ns
from elastic.core.facts import JobId, Node, NodeId, NodePhase, Resources, SessionId, WorkerId
from elastic.core.machine.transitions import NODE, check_move
from elastic.core.policy.packing import NodeCapacity
from elastic.core.policy.placement import NodeOffer
from elastic.core.records import Cordon, NodesRecord
from elastic.core.view import NodeView

LIVE = (NodePhase.READY, NodePhase.DRAINING)
PRESENT = (*LIVE, NodePhase.DISCONNECTED)
SERIAL_DIGITS_MAX = 15
RETURN_PAUSE_S, RETURN_PART = 1.0, 4
"""After a restart no node is given up while others still reconnect: until so long after the last
one, or this part (one fourth) of the time they have taken. Thousands need a while."""


@dataclass
class NodeAbsence:
    """How long a node whose stream has ended is waited for; over once its agent connects.

    Attributes:
        lost_at_ns: when it is given up.
        is_unconfirmed: it is known only from the journal.
        is_extended: its stream ended while this coordinator was suspended.
    """

    lost_at_ns: int | None = None
    is_unconfirmed: bool = False
    is_extended: bool = False


@dataclass
class NodeDrain:
    """The drain of a node, in one incarnation of its agent.

    Attributes:
        is_on: the node drains, or is away while it does.
        by_ns: when its workers must be out of their groups.
        announced: its reason, "" for none; kept when the node is gone, because losses with it are
            not charged.
        is_released: its agent was notified that it may end.
        kept_for: why it was not, though it runs nothing any more.
    """

    is_on: bool = False
    by_ns: int | None = None
    announced: str = ""
    is_released: bool = False
    kept_for: str = ""


@dataclass
class NodeFaults:
    """The faults of a node's workers, which keep new ones away for a time.

    Attributes:
        moments: when workers hung, crashed or did not start here, oldest first.
        until_ns: no new workers start here before, because of those, for `why`.
    """

    moments: list[int] = field(default_factory=list)
    until_ns: int = 0
    why: str = ""


@dataclass
class NodeState:
    """One node as the coordinator knows it.

    Attributes:
        session: the open stream, None while disconnected, lost or gone.
        held: resources of each worker on the node, of all jobs.
        reports_due: reports that its agent announced in its Hello and that have not come yet.
        received_ns: when its agent last sent a message.
        problems: faults reported by its agent.
        last_serial: of the workers started here, in any incarnation of the agent.
        copies: jobs of which it holds copies, as last reported.
        copies_at: "host:port" where its agent receives and serves copies, "" for none.
    """

    node: Node
    phase: NodePhase
    since_ns: int
    reason: str = ""
    session: SessionId | None = None
    absence: NodeAbsence = field(default_factory=NodeAbsence)
    drain: NodeDrain = field(default_factory=NodeDrain)
    faults: NodeFaults = field(default_factory=NodeFaults)
    problems: tuple[str, ...] = ()
    held: dict[WorkerId, Resources] = field(default_factory=dict)
    reports_due: int = 0
    received_ns: int = 0
    last_serial: int = 0
    copies: tuple[JobId, ...] = ()
    copies_at: str = ""

    def is_kept(self) -> bool:
        """Return whether it stays only because of the state in its memory."""
        return self.phase is NodePhase.DRAINING and bool(self.drain.kept_for) and not self.held

    def next_worker_id(self) -> WorkerId:
        self.last_serial += 1
        return WorkerId(f"{self.node.node_id}/{self.last_serial}")

    def has(self, worker_id: WorkerId) -> bool:
        return worker_id.rpartition("/")[0] == self.node.node_id

    def saw_worker(self, worker_id: WorkerId) -> None:
        """Record a worker id, so that it is never reused."""
        serial = worker_id.rpartition("/")[2]
        # It comes from an agent and may be anything: not all digits make a number.
        if serial.isascii() and serial.isdigit() and len(serial) <= SERIAL_DIGITS_MAX:
            self.last_serial = max(self.last_serial, int(serial))

    def move(self, phase: NodePhase, now_ns: int, reason: str = "") -> None:
        """Enter a phase; a move to the same phase changes nothing but the reason."""
        if phase is not self.phase:
            check_move(NODE, f"node {self.node.node_id}", self.phase, phase)
            self.phase = phase
            self.since_ns = now_ns
        self.reason = reason

    def is_live(self) -> bool:
        return self.phase in LIVE

    def may_host(self) -> bool:
        """Return whether new workers may run on the node."""
        return self.is_live() and not self.drain.is_on

    def is_awaited(self) -> bool:
        """Return whether its agent still has to report what happened while it was away."""
        return self.is_away() or self.reports_due > 0

    def is_away(self) -> bool:
        """Return whether it may be alive, and is disconnected because of this coordinator."""
        return self.absence.is_unconfirmed or self.absence.is_extended

    def is_present(self) -> bool:
        """Return whether its workers still count as alive."""
        return self.phase in PRESENT

    def quarantine(self, now_ns: int) -> str:
        """Return why no new workers may start here, "" if they may."""
        if not self.problems and now_ns >= self.faults.until_ns:
            return ""
        reasons = [*self.problems]
        if now_ns < self.faults.until_ns:
            reasons.append(self.faults.why)
        return "; ".join(reasons)

    def free_slots(self) -> int:
        """Return how many more workers may start here."""
        return max(0, self.node.num_slots - len(self.held))

    def free(self) -> Resources:
        left = self.node.resources
        for held in self.held.values():
            left = left.minus(held)
        return left

    def offer(self, hosting: int) -> NodeOffer:
        """Return the node's free capacity for a job of which it hosts `hosting` workers."""
        empty = NodeCapacity.of(self.node)
        return NodeOffer(empty, self.free_slots(), self.free(), hosting)

    def view(self, now_ns: int) -> NodeView:
        quarantine = self.quarantine(now_ns) if self.is_present() else ""
        quarantined = f"quarantined: {quarantine}" if quarantine else ""
        kept = self.drain.kept_for if self.is_kept() else ""
        reason = "; ".join(part for part in (self.reason, kept, quarantined) if part)
        free_slots = self.free_slots() if self.may_host() else 0
        return NodeView(self.node, self.phase, self.since_ns, free_slots, reason)


@dataclass
class NodeBook:
    """All nodes, and which session belongs to which.

    Attributes:
        cordons: nodes on which no new workers start, and why; they need not be connected.
        draining: nodes that drain.
        faulty: nodes in quarantine for the faults of their workers, for a time.
        recovered_ns: when the journal was read.
        returned_ns: when the last node known only from the journal came back.
        await_until_ns: limit of the wait for such nodes, even if others still come back.
        woke_ns: when this coordinator last noticed that it was suspended, None for never.
    """

    nodes: dict[NodeId, NodeState] = field(default_factory=dict)
    sessions: dict[SessionId, NodeId] = field(default_factory=dict)
    unsettled: dict[NodeId, None] = field(default_factory=dict)
    cordons: dict[NodeId, str] = field(default_factory=dict)
    draining: dict[NodeId, None] = field(default_factory=dict)
    faulty: dict[NodeId, None] = field(default_factory=dict)
    recovered_ns: int = 0
    returned_ns: int = 0
    await_until_ns: int = 0
    woke_ns: int | None = None

    def of_session(self, session: SessionId) -> NodeState | None:
        """Return the node of this session; None for an old or refused one."""
        node_id = self.sessions.get(session)
        return self.nodes[node_id] if node_id is not None else None

    def bind(self, state: NodeState, session: SessionId) -> None:
        self.unbind(state)
        state.session = session
        self.sessions[session] = state.node.node_id

    def came(self, state: NodeState, now_ns: int) -> None:
        """Record that the node's agent has connected: it is not lost."""
        if state.absence.is_unconfirmed:
            self.returned_ns = now_ns
        state.absence = NodeAbsence()

    def lost_at_ns(self, state: NodeState) -> int | None:
        """Return when a disconnected node is given up, None if it is not disconnected."""
        absence = state.absence
        if state.phase is not NodePhase.DISCONNECTED or absence.lost_at_ns is None:
            return None
        if not absence.is_unconfirmed:
            return absence.lost_at_ns
        took_ns = self.returned_ns - self.recovered_ns
        until_ns = self.returned_ns + max(ns(RETURN_PAUSE_S), took_ns // RETURN_PART)
        return max(absence.lost_at_ns, min(until_ns, self.await_until_ns))

    def unbind(self, state: NodeState) -> None:
        if state.session is not None:
            self.sessions.pop(state.session, None)
            state.session = None
        state.reports_due = 0

    def ordered(self) -> list[NodeState]:
        return [self.nodes[node_id] for node_id in sorted(self.nodes)]

    def record(self) -> NodesRecord:
        return NodesRecord(tuple(Cordon(n, self.cordons[n]) for n in sorted(self.cordons)))

    def views(self, now_ns: int) -> tuple[NodeView, ...]:
        shown = []
        for state in self.ordered():
            view, cordon = state.view(now_ns), self.cordons.get(state.node.node_id)
            if cordon is not None:
                view = replace(view, cordoned=True, reason=view.reason or f"cordoned: {cordon}")
            shown.append(view)
        return tuple(shown)

    def settle(self, state: NodeState) -> None:
        """Record whether time may still change this node (it drains, or its stream broke)."""
        node_id = state.node.node_id
        if state.drain.is_on:
            self.draining[node_id] = None
        else:
            self.draining.pop(node_id, None)
        if state.phase is NodePhase.DISCONNECTED or state.drain.is_on:
            self.unsettled[node_id] = None
        else:
            self.unsettled.pop(node_id, None)

    def unsettled_nodes(self) -> list[NodeState]:
        """Return the nodes that time may change, by id."""
        return [self.nodes[node_id] for node_id in sorted(self.unsettled)]

    def next_deadline_ns(self) -> int | None:
        unsettled = [self.nodes[node_id] for node_id in self.unsettled]
        moments = [moment for one in unsettled if (moment := self.lost_at_ns(one)) is not None]
        kept = [state.drain.by_ns for state in unsettled if state.is_kept()]
        moments += [moment for moment in kept if moment is not None]
        moments += [self.nodes[name].faults.until_ns for name in self.faulty]
        return min(moments, default=None)

    def closed(self, state: NodeState, now_ns: int) -> str:
        """Return why no new workers may start on a node, "" if they may."""
        if state.node.node_id in self.cordons:
            return "cordoned"
        quarantine = state.quarantine(now_ns)
        return f"quarantined ({quarantine})" if quarantine else ""

    def drop_gone(self, limit: int) -> None:
        """Forget the nodes that are longest gone, so that at most `limit` of them are kept."""
        if len(self.nodes) - len(self.sessions) <= limit:
            return  # A node with a session is not gone.
        gone = [s for s in self.nodes.values() if s.phase in (NodePhase.LOST, NodePhase.LEFT)]
        gone.sort(key=lambda s: (s.since_ns, s.node.node_id))
        for state in gone[: max(0, len(gone) - limit)]:
            del self.nodes[state.node.node_id]
            self.unsettled.pop(state.node.node_id, None)
            self.draining.pop(state.node.node_id, None)
            self.faulty.pop(state.node.node_id, None)

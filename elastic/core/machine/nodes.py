"""The coordinator's state of nodes: sessions, phases and free resources.

Rule: this module only records; other modules decide what a change means for jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.core.config import ns
from elastic.core.copy_messages import NO_ENDPOINT, CopyEndpoint
from elastic.core.events.coordinator import Cordon, NodesRecord
from elastic.core.machine.transitions import NODE, check_move
from elastic.core.policy.placement import NodeOffer
from elastic.core.view import NodeView
from elastic.core.world import JobId, Node, NodeId, NodePhase, Resources, SessionId, WorkerId

LIVE = (NodePhase.READY, NodePhase.DRAINING)
PRESENT = (*LIVE, NodePhase.DISCONNECTED)
SERIAL_DIGITS_MAX = 15
RETURN_PAUSE_S, RETURN_PART = 1.0, 4
"""After a restart no node is given up while others still reconnect: until so long after the last
one, or this part (one fourth) of the time they have taken. Thousands need a while."""


@dataclass
class NodeState:
    """One node as the coordinator knows it.

    Attributes:
        session: the open stream, None while disconnected, lost or gone.
        held: resources of each worker on the node, of all jobs.
        lost_at_ns: when a disconnected node is given up.
        leave_by_ns: when a draining node's workers must be out of their groups.
        unconfirmed: known only from the journal; its agent has not come back yet.
        grace_extended: its stream ended while this coordinator was suspended; its agent has not
            come back yet.
        reports_due: reports that its agent announced in its Hello and that have not come yet.
        received_ns: when its agent last sent a message.
        announced: reason of its announced drain, "" for none in this incarnation of its agent; kept
            when the node is gone, because losses with it are not charged.
        problems: faults reported by its agent.
        faults: when workers hung, crashed or did not start here, oldest first.
        faulty_until_ns: no new workers start here before, because of those, for `faulty_why`.
        released: its agent was notified that it may end.
        kept_for: why it was not, though it runs nothing any more.
        last_serial: of the workers started here, in any incarnation of the agent.
        copies: jobs of which it holds copies, as last reported.
        copy_endpoint: where its agent receives and serves copies.
    """

    node: Node
    phase: NodePhase
    since_ns: int
    session: SessionId | None = None
    held: dict[WorkerId, Resources] = field(default_factory=dict)
    lost_at_ns: int | None = None
    leave_by_ns: int | None = None
    draining: bool = False
    announced: str = ""
    problems: tuple[str, ...] = ()
    faults: list[int] = field(default_factory=list)
    faulty_until_ns: int = 0
    faulty_why: str = ""
    reports_due: int = 0
    received_ns: int = 0
    released: bool = False
    kept_for: str = ""
    unconfirmed: bool = False
    grace_extended: bool = False
    reason: str = ""
    last_serial: int = 0
    copies: tuple[JobId, ...] = ()
    copy_endpoint: CopyEndpoint = NO_ENDPOINT

    def is_kept(self) -> bool:
        """Return whether it stays only because of the state in its memory."""
        return self.phase is NodePhase.DRAINING and bool(self.kept_for) and not self.held

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
        """Return whether its stream is open."""
        return self.phase in LIVE

    def may_host(self) -> bool:
        """Return whether new workers may run on the node."""
        return self.is_live() and not self.draining

    def is_awaited(self) -> bool:
        """Return whether its agent still has to report what happened while it was away."""
        return self.is_away() or self.reports_due > 0

    def is_away(self) -> bool:
        """Return whether it may be alive, and is disconnected because of this coordinator."""
        return self.unconfirmed or self.grace_extended

    def is_present(self) -> bool:
        """Return whether its workers still count as alive."""
        return self.phase in PRESENT

    def quarantine(self, now_ns: int) -> str:
        """Return why no new workers may start here, "" if they may."""
        if not self.problems and now_ns >= self.faulty_until_ns:
            return ""
        reasons = [*self.problems]
        if now_ns < self.faulty_until_ns:
            reasons.append(self.faulty_why)
        return "; ".join(reasons)

    def free_slots(self) -> int:
        """Return how many more workers may start here."""
        return max(0, self.node.num_slots - len(self.held))

    def free(self) -> Resources:
        """Return the resources that no worker holds."""
        left = self.node.resources
        for held in self.held.values():
            left = left.minus(held)
        return left

    def offer(self, hosting: int) -> NodeOffer:
        """Return the node's free capacity for a job of which it hosts `hosting` workers."""
        return NodeOffer(
            node_id=self.node.node_id,
            free_slots=self.free_slots(),
            free=self.free(),
            total=self.node.resources,
            slots=self.node.num_slots,
            accelerator_type=self.node.accelerator_type,
            labels=self.node.labels,
            hosting=hosting,
        )

    def view(self, now_ns: int) -> NodeView:
        quarantine = self.quarantine(now_ns) if self.is_present() else ""
        quarantined = f"quarantined: {quarantine}" if quarantine else ""
        kept = self.kept_for if self.is_kept() else ""
        reason = "; ".join(part for part in (self.reason, kept, quarantined) if part)
        free_slots = self.free_slots() if self.may_host() else 0
        return NodeView(self.node, self.phase, self.since_ns, free_slots, reason)


@dataclass
class NodeBook:
    """All nodes, and which session belongs to which.

    Attributes:
        cordons: nodes on which no new workers start, and why; they need not be connected.
        leaving: nodes that drain.
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
    leaving: dict[NodeId, None] = field(default_factory=dict)
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
        """Make this the node's session; an older one is forgotten."""
        self.unbind(state)
        state.session = session
        self.sessions[session] = state.node.node_id

    def came(self, state: NodeState, now_ns: int) -> None:
        """Record that the node's agent has connected: it is not lost."""
        if state.unconfirmed:
            self.returned_ns = now_ns
        state.unconfirmed, state.grace_extended, state.lost_at_ns = False, False, None

    def lost_at_ns(self, state: NodeState) -> int | None:
        """Return when a disconnected node is given up, None if it is not disconnected."""
        if state.phase is not NodePhase.DISCONNECTED or state.lost_at_ns is None:
            return None
        if not state.unconfirmed:
            return state.lost_at_ns
        took_ns = self.returned_ns - self.recovered_ns
        until_ns = self.returned_ns + max(ns(RETURN_PAUSE_S), took_ns // RETURN_PART)
        return max(state.lost_at_ns, min(until_ns, self.await_until_ns))

    def unbind(self, state: NodeState) -> None:
        """Forget the node's session."""
        if state.session is not None:
            self.sessions.pop(state.session, None)
            state.session = None
        state.reports_due = 0

    def ordered(self) -> list[NodeState]:
        return [self.nodes[node_id] for node_id in sorted(self.nodes)]

    def record(self) -> NodesRecord:
        """Return the durable state of nodes."""
        return NodesRecord(tuple(Cordon(n, self.cordons[n]) for n in sorted(self.cordons)))

    def views(self, now_ns: int) -> tuple[NodeView, ...]:
        """Return all nodes for the status, by id."""
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
        if state.draining:
            self.leaving[node_id] = None
        else:
            self.leaving.pop(node_id, None)
        if state.phase is NodePhase.DISCONNECTED or state.draining:
            self.unsettled[node_id] = None
        else:
            self.unsettled.pop(node_id, None)

    def unsettled_nodes(self) -> list[NodeState]:
        """Return the nodes that time may change, by id."""
        return [self.nodes[node_id] for node_id in sorted(self.unsettled)]

    def next_deadline_ns(self) -> int | None:
        """Return when the next node is given up, released, or out of quarantine."""
        unsettled = [self.nodes[node_id] for node_id in self.unsettled]
        moments = [moment for one in unsettled if (moment := self.lost_at_ns(one)) is not None]
        kept = [state.leave_by_ns for state in unsettled if state.is_kept()]
        moments += [moment for moment in kept if moment is not None]
        moments += [self.nodes[name].faulty_until_ns for name in self.faulty]
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
            self.leaving.pop(state.node.node_id, None)
            self.faulty.pop(state.node.node_id, None)

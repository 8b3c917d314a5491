"""The coordinator's memory of nodes: sessions, phases and what each still has free.

Rule: this module keeps books; what a change means for jobs is decided by the coordinator.
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
"""After a restart, nobody is given up while others still come back: not for so long after the last
one, and not for so many parts of the time that they have taken. Thousands take their time."""


@dataclass
class NodeState:
    """One node as the coordinator knows it.

    Attributes:
        session: the stream that stands, None while disconnected, lost or gone.
        held: what each worker on the node takes, for every job.
        lost_at_ns: when a disconnected node is given up.
        leave_by_ns: when a draining node's workers must be out of their groups.
        unconfirmed: known only from the journal; its agent has not come back yet.
        grace_extended: its stream ended while this coordinator slept; its agent has not come back
            yet.
        reports_due: reports that its agent announced in its hello and that have not come yet.
        received_ns: when its agent last said anything.
        announced: why it was to leave, "" if nobody said so in this life of its agent; stays when
            the node is gone, because what was lost with it is charged to nobody.
        problems: what its agent says is wrong with it.
        faults: when workers hung, crashed or did not start here, oldest first.
        faulty_until_ns: no new workers start here before, because of those, for `faulty_why`.
        released: its agent was told that it may end.
        kept_for: why it was not, though it runs nothing any more.
        last_serial: of the workers started here, in any life of the agent.
        copies: jobs whose state it said last that it holds for others.
        copy_endpoint: where its agent takes and gives copies.
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
        """Return whether it may leave but for what its memory holds."""
        return self.phase is NodePhase.DRAINING and bool(self.kept_for) and not self.held

    def next_worker_id(self) -> WorkerId:
        """Return an id that no worker of this node has had as far as we know."""
        self.last_serial += 1
        return WorkerId(f"{self.node.node_id}/{self.last_serial}")

    def has(self, worker_id: WorkerId) -> bool:
        """Return whether this id is one of this node's: its agent speaks for no other's workers."""
        return worker_id.rpartition("/")[0] == self.node.node_id

    def saw_worker(self, worker_id: WorkerId) -> None:
        """Never give this id to another worker."""
        serial = worker_id.rpartition("/")[2]
        # An agent says it, and may say anything: not all digits make a number.
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
        """Return whether its stream stands."""
        return self.phase in LIVE

    def may_host(self) -> bool:
        """Return whether workers may be on the node from now on."""
        return self.is_live() and not self.draining

    def is_awaited(self) -> bool:
        """Return whether its agent is about to tell more of what happened while it was away."""
        return self.is_away() or self.reports_due > 0

    def is_away(self) -> bool:
        """Return whether it may be there, and is not heard of for what happened to us."""
        return self.unconfirmed or self.grace_extended

    def is_present(self) -> bool:
        """Return whether its workers still count as living."""
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
        """Return what this node could take of a job of which it hosts some workers already."""
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
        """Return what status shows."""
        quarantine = self.quarantine(now_ns) if self.is_present() else ""
        told = f"quarantined: {quarantine}" if quarantine else ""
        kept = self.kept_for if self.is_kept() else ""
        reason = "; ".join(part for part in (self.reason, kept, told) if part)
        free_slots = self.free_slots() if self.may_host() else 0
        return NodeView(self.node, self.phase, self.since_ns, free_slots, reason)


@dataclass
class NodeBook:
    """All nodes, and which session belongs to which.

    Attributes:
        cordons: nodes on which no new workers start, and why; they need not be here now.
        leaving: nodes that drain.
        faulty: nodes that are in quarantine for the faults of their workers, for a time.
        recovered_ns: when the journal was read.
        returned_ns: when a node that was known from it only came back last.
        await_until_ns: whoever comes then, nobody waits for others any more.
        woke_ns: when this coordinator last noticed that it had slept, None for never.
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
        """Return the node that speaks over this session; None for an old or refused one."""
        node_id = self.sessions.get(session)
        return self.nodes[node_id] if node_id is not None else None

    def bind(self, state: NodeState, session: SessionId) -> None:
        """Make this the node's session; an older one is forgotten."""
        self.unbind(state)
        state.session = session
        self.sessions[session] = state.node.node_id

    def came(self, state: NodeState, now_ns: int) -> None:
        """Note that the node's agent has come, or come back: it is not lost."""
        if state.unconfirmed:
            self.returned_ns = now_ns
        state.unconfirmed, state.grace_extended, state.lost_at_ns = False, False, None

    def lost_at_ns(self, state: NodeState) -> int | None:
        """Return when a disconnected node is given up, None for another one."""
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
        """Return all nodes by id."""
        return [self.nodes[node_id] for node_id in sorted(self.nodes)]

    def record(self) -> NodesRecord:
        """Return what must survive the coordinator."""
        return NodesRecord(tuple(Cordon(n, self.cordons[n]) for n in sorted(self.cordons)))

    def views(self, now_ns: int) -> tuple[NodeView, ...]:
        """Return what status shows, by id."""
        shown = []
        for state in self.ordered():
            view, cordon = state.view(now_ns), self.cordons.get(state.node.node_id)
            if cordon is not None:
                view = replace(view, cordoned=True, reason=view.reason or f"cordoned: {cordon}")
            shown.append(view)
        return tuple(shown)

    def settle(self, state: NodeState) -> None:
        """Note whether time may still change this node (it drains, or its stream broke)."""
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
        """Return when the next node is given up, or let go."""
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
            return  # Who has a session is not gone.
        gone = [s for s in self.nodes.values() if s.phase in (NodePhase.LOST, NodePhase.LEFT)]
        gone.sort(key=lambda s: (s.since_ns, s.node.node_id))
        for state in gone[: max(0, len(gone) - limit)]:
            del self.nodes[state.node.node_id]
            self.unsettled.pop(state.node.node_id, None)
            self.leaving.pop(state.node.node_id, None)
            self.faulty.pop(state.node.node_id, None)

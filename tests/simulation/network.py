"""Simulated streams between agents and the coordinator: ordered, delayed, cut, half open.

Rule: as TCP under HTTP/2. Messages of a stream keep their order. A cut holds them back, and each
side closes the stream by itself after its keepalive timeout. Messages in flight may still arrive
after the end of their stream, and must then be ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.core.facts import NodeId, SessionId
from elastic.core.messages import AgentMessage, CoordinatorMessage, Hello
from tests.simulation.world import MS, Timeline


@dataclass
class Conditions:
    """The behavior of the network; drawn from the seed.

    Attributes:
        cut: nodes that cannot reach any coordinator: "up", "down" or "both" directions.
        cut_hosts: coordinators that no agent reaches.
        late: probability that a message arrives after the end of its stream.
        troubled_ns: when each node's link or agent was last cut, stopped or dead.
    """

    delay_min_ns: int = 100_000
    delay_max_ns: int = 2 * MS
    keepalive_ns: int = 1500 * MS
    late: float = 0.3
    cut: dict[NodeId, str] = field(default_factory=dict)
    cut_hosts: dict[str, None] = field(default_factory=dict)
    troubled_ns: dict[NodeId, int] = field(default_factory=dict)

    def blocks(self, node_id: NodeId, direction: str) -> bool:
        """Return whether messages in this direction are held back now."""
        return self.cut.get(node_id, "") in (direction, "both")

    def was_troubled(self, node_id: NodeId, since_ns: int) -> bool:
        """Return whether a node could not be reached at some time since then."""
        if self.cut_hosts:
            return True
        return node_id in self.cut or self.troubled_ns.get(node_id, -1) >= since_ns


@dataclass
class Stream:
    """One stream; each side has its own state of whether it is open.

    Attributes:
        host: the coordinator at the other end.
    """

    session: SessionId
    node_id: NodeId
    host: str = ""
    agent_side: bool = True
    coordinator_side: bool = False
    last_up_ns: int = 0
    last_down_ns: int = 0
    held_up: list[AgentMessage] = field(default_factory=list)
    held_down: list[CoordinatorMessage] = field(default_factory=list)


class Network:
    """All streams of one run."""

    def __init__(self, timeline: Timeline, conditions: Conditions) -> None:
        """Start without streams; call `wire` before the first one."""
        self.timeline = timeline
        self.conditions = conditions
        self.streams: dict[SessionId, Stream] = {}
        self.to_coordinator: Callable[[Stream, AgentMessage], None]
        self.to_agent: Callable[[Stream, CoordinatorMessage], None]
        self.lost_at_coordinator: Callable[[Stream, str], None]
        self.lost_at_agent: Callable[[Stream, str], None]

    def wire(
        self,
        to_coordinator: Callable[[Stream, AgentMessage], None],
        to_agent: Callable[[Stream, CoordinatorMessage], None],
        *,
        lost_at_coordinator: Callable[[Stream, str], None],
        lost_at_agent: Callable[[Stream, str], None],
    ) -> None:
        """Set the receivers of messages and of ends of streams."""
        self.to_coordinator = to_coordinator
        self.to_agent = to_agent
        self.lost_at_coordinator = lost_at_coordinator
        self.lost_at_agent = lost_at_agent

    def open(self, session: SessionId, node_id: NodeId, host: str) -> Stream:
        """Register a new stream, which both sides then regard as open."""
        stream = Stream(session, node_id, host)
        self.streams[session] = stream
        return stream

    def delay(self) -> int:
        """Draw the delay of one message."""
        return self.timeline.between(self.conditions.delay_min_ns, self.conditions.delay_max_ns)

    def send_up(self, session: SessionId, message: AgentMessage) -> None:
        """Send a message from the agent to the coordinator."""
        stream = self.streams.get(session)
        if stream is None or not stream.agent_side:
            return
        if self.blocks(stream, "up"):
            stream.held_up.append(message)
            return
        moment = max(stream.last_up_ns, self.timeline.now_ns + self.delay())
        stream.last_up_ns = moment

        def arrive() -> None:
            is_late = not stream.coordinator_side
            # A driver first learns of a stream by its Hello, and gets no message after its end.
            if is_late and (isinstance(message, Hello) or not self._passes_late()):
                return
            self.to_coordinator(stream, message)

        self.timeline.at(moment, arrive)

    def send_down(self, session: SessionId, message: CoordinatorMessage) -> None:
        """Send a message from the coordinator to the agent."""
        stream = self.streams.get(session)
        if stream is None or not stream.coordinator_side:
            return
        if self.blocks(stream, "down"):
            stream.held_down.append(message)
            return
        moment = max(stream.last_down_ns, self.timeline.now_ns + self.delay())
        stream.last_down_ns = moment

        def arrive() -> None:
            if stream.agent_side or self._passes_late():
                self.to_agent(stream, message)

        self.timeline.at(moment, arrive)

    def blocks(self, stream: Stream, direction: str) -> bool:
        """Return whether this stream's messages in this direction are held back now."""
        is_cut = stream.host in self.conditions.cut_hosts
        return is_cut or self.conditions.blocks(stream.node_id, direction)

    def _passes_late(self) -> bool:
        return self.timeline.chance(self.conditions.late)

    # ------------------------------------------------------------ endings

    def end_at_coordinator(self, stream: Stream, reason: str) -> None:
        """End the coordinator's side of the stream, and notify its driver."""
        if stream.coordinator_side:
            stream.coordinator_side = False
            self.lost_at_coordinator(stream, reason)

    def end_at_agent(self, stream: Stream, reason: str) -> None:
        """End the agent's side of the stream, and notify its driver."""
        if stream.agent_side:
            stream.agent_side = False
            self.lost_at_agent(stream, reason)

    def close_from_coordinator(self, session: SessionId) -> None:
        """Close the stream from the coordinator's side, after the messages sent before."""
        stream = self.streams.get(session)
        if stream is None:
            return
        stream.coordinator_side = False
        moment = max(stream.last_down_ns, self.timeline.now_ns + self.delay())
        self.timeline.at(moment, self.end_at_agent, stream, "closed by the coordinator")

    def close_from_agent(self, session: SessionId) -> None:
        """Close the stream from the agent's side."""
        stream = self.streams.get(session)
        if stream is None:
            return
        stream.agent_side = False
        moment = max(stream.last_up_ns, self.timeline.now_ns + self.delay())
        self.timeline.at(moment, self.end_at_coordinator, stream, "closed by the agent")

    def host_died(self, node_id: NodeId) -> None:
        """Reset the streams of an agent whose process has ended, as its kernel does."""
        self.conditions.troubled_ns[node_id] = self.timeline.now_ns
        for stream in self._of(node_id):
            stream.agent_side = False
            if self.blocks(stream, "up"):
                continue
            self.timeline.after(self.delay(), self.end_at_coordinator, stream, "reset by the agent")

    def coordinator_died(self, host: str) -> None:
        """Reset all streams of a coordinator whose process or term has ended."""
        for stream in self._of_host(host):
            stream.coordinator_side = False
            if self.blocks(stream, "down"):
                continue
            self.timeline.after(self.delay(), self.end_at_agent, stream, "reset by the coordinator")

    def cut(self, node_id: NodeId, how: str) -> None:
        """Hold back a node's messages; if the cut lasts, keepalive ends both sides."""
        self.conditions.cut[node_id] = how
        self._starve(self._of(node_id))

    def cut_host(self, host: str) -> None:
        """Hold back all messages from and to a coordinator."""
        self.conditions.cut_hosts[host] = None
        self._starve(self._of_host(host))

    def _starve(self, streams: list[Stream]) -> None:
        for stream in streams:
            for end in (self.end_at_coordinator, self.end_at_agent):
                wait = self.timeline.between(
                    self.conditions.keepalive_ns // 2, self.conditions.keepalive_ns
                )
                self.timeline.after(wait, self._give_up, stream, end)

    def _give_up(self, stream: Stream, end: Callable[[Stream, str], None]) -> None:
        if self.blocks(stream, "up") or self.blocks(stream, "down"):
            end(stream, "keepalive timed out")

    def heal_host(self, host: str) -> None:
        """Restore the connection of a coordinator; messages that were held back arrive now."""
        if host not in self.conditions.cut_hosts:
            return
        del self.conditions.cut_hosts[host]
        streams = self._of_host(host)
        for stream in streams:
            self.conditions.troubled_ns[stream.node_id] = self.timeline.now_ns
        self._release(streams)

    def heal(self, node_id: NodeId) -> None:
        """Restore a node's connection; messages that were held back arrive now, in order."""
        if self.conditions.cut.pop(node_id, None):
            self.conditions.troubled_ns[node_id] = self.timeline.now_ns
        self._release(self._of(node_id))

    def _release(self, streams: list[Stream]) -> None:
        for stream in streams:
            up, stream.held_up = stream.held_up, []
            down, stream.held_down = stream.held_down, []
            for message in up:
                self.send_up(stream.session, message)
            for order in down:
                self.send_down(stream.session, order)
            # A side that closed the stream during the cut now resets the other side.
            if not stream.agent_side:
                self.timeline.after(self.delay(), self.end_at_coordinator, stream, "reset")
            if not stream.coordinator_side:
                self.timeline.after(self.delay(), self.end_at_agent, stream, "reset")

    def _of_host(self, host: str) -> list[Stream]:
        return [s for s in self.streams.values() if s.host == host]

    def _of(self, node_id: NodeId) -> list[Stream]:
        return [s for s in self.streams.values() if s.node_id == node_id]

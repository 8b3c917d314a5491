"""Links between simulated nodes, over which their workers train: some are cut for a while.

Rule: agents and coordinators hear each other all the same, that is `network`. While two members do
not reach each other their group cannot form, and makes no step; what was sent comes when the link
is there again. What is lost on the way to a group is lost for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic.core.events.agent import LinksProbed
from elastic.core.link_messages import LinksTried, TryLinks
from elastic.core.world import Generation, JobId, NodeId
from tests.simulation.world import MS, S, Timeline

if TYPE_CHECKING:
    from tests.simulation.hosts import AgentHost

LIMIT_NS = 3 * S
"""Whoever tries to connect gives up after this."""


class Links:
    """Which of them are cut, and have been."""

    def __init__(self, timeline: Timeline) -> None:
        """Begin with all whole."""
        self._timeline = timeline
        self._cut: dict[frozenset[NodeId], None] = {}
        self._cut_ns: dict[frozenset[NodeId], int] = {}
        self._lost: set[tuple[JobId, Generation]] = set()

    def lose(self, job_id: JobId, generation: Generation) -> None:
        """Something that a group waits for never comes."""
        self._lost.add((job_id, generation))

    def cut(self, one: NodeId, other: NodeId) -> None:
        """Nothing gets through between these two."""
        self._timeline.tell("world", f"{one} and {other} are parted")
        self._cut[frozenset((one, other))] = None

    def heal(self, *nodes: NodeId) -> None:
        """Everything gets through again, between these two or all."""
        for pair in [frozenset(nodes)] if nodes else [*self._cut]:
            if pair in self._cut:
                del self._cut[pair]
                self._cut_ns[pair] = self._timeline.now_ns

    def hold(self, job_id: JobId, generation: Generation, nodes: Iterable[NodeId]) -> bool:
        """Return whether a group on these nodes gets nowhere."""
        there = set(nodes)
        return (job_id, generation) in self._lost or any(pair <= there for pair in self._cut)

    def were_cut(self, one: NodeId, other: NodeId, since_ns: int) -> bool:
        """Return whether these two did not reach each other at some moment since then."""
        pair = frozenset((one, other))
        return pair in self._cut or self._cut_ns.get(pair, -1) >= since_ns

    def reach_out(self, host: AgentHost, order: TryLinks) -> None:
        """An agent tries to connect; it answers when it has given up the last one."""
        life, names = host.life, [link.node_id for link in order.links]
        lost = tuple(n for n in names if frozenset((host.node_id, n)) in self._cut)
        reached = tuple(n for n in names if n not in lost)
        wait = LIMIT_NS if lost else self._timeline.between(MS, 5 * MS)

        def answer() -> None:
            if host.life == life:
                host.post(LinksProbed(LinksTried(order.job_id, reached, lost)))

        self._timeline.after(wait, answer)

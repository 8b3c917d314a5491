"""Links between simulated nodes, over which their workers train: some are cut for a while.

Rule: links do not affect streams between agents and coordinators (see `network`). While two members
do not reach each other, their group cannot form and makes no step; sent messages arrive when the
link is restored. Messages of a group that were lost (`lose`) never arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic.core.events.agent import LinksProbed
from elastic.core.facts import Generation, JobId, NodeId
from elastic.core.messages import LinksTried, TryLinks
from tests.simulation.world import MS, S, Timeline

if TYPE_CHECKING:
    from tests.simulation.hosts import AgentHost

LIMIT_NS = 3 * S
"""Timeout of an attempt to connect."""


class Links:
    """The links that are cut, and when others were cut last."""

    def __init__(self, timeline: Timeline) -> None:
        """Start with all links intact."""
        self._timeline = timeline
        self._cut: dict[frozenset[NodeId], None] = {}
        self._cut_ns: dict[frozenset[NodeId], int] = {}
        self._lost: set[tuple[JobId, Generation]] = set()

    def lose(self, job_id: JobId, generation: Generation) -> None:
        """Lose a message for which a group then waits for ever."""
        self._lost.add((job_id, generation))

    def cut(self, one: NodeId, other: NodeId) -> None:
        """Cut the link between two nodes."""
        self._timeline.tell("world", f"{one} and {other} are parted")
        self._cut[frozenset((one, other))] = None

    def heal(self, *nodes: NodeId) -> None:
        """Restore the link between two nodes, or all links."""
        for pair in [frozenset(nodes)] if nodes else [*self._cut]:
            if pair in self._cut:
                del self._cut[pair]
                self._cut_ns[pair] = self._timeline.now_ns

    def hold(self, job_id: JobId, generation: Generation, nodes: Iterable[NodeId]) -> bool:
        """Return whether links prevent a group on these nodes from making progress."""
        there = set(nodes)
        return (job_id, generation) in self._lost or any(pair <= there for pair in self._cut)

    def were_cut(self, one: NodeId, other: NodeId, since_ns: int) -> bool:
        """Return whether the link of these two was cut at some time since then."""
        pair = frozenset((one, other))
        return pair in self._cut or self._cut_ns.get(pair, -1) >= since_ns

    def reach_out(self, host: AgentHost, order: TryLinks) -> None:
        """Try links for an agent; it replies when the last attempt is over."""
        life, names = host.life, [link.node_id for link in order.links]
        lost = tuple(n for n in names if frozenset((host.node_id, n)) in self._cut)
        reached = tuple(n for n in names if n not in lost)
        wait = LIMIT_NS if lost else self._timeline.between(MS, 5 * MS)

        def answer() -> None:
            if host.life == life:
                host.post(LinksProbed(LinksTried(order.job_id, reached, lost)))

        self._timeline.after(wait, answer)

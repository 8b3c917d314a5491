"""Whom the coordinator blames, held against what has happened: workers that hang, ill nodes.

Rule: truth is what faults have done to a worker or to its node, never what anybody has reported. A
node is in quarantine for what its own workers did; trouble of coordinators is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.events.shared import Note
from elastic.core.world import NodeId, WorkerId
from tests.simulation.links import Links
from tests.simulation.network import Conditions
from tests.simulation.world import S, Timeline

HUNG = "killed because it hung"
REMEMBERED_NS = 60 * S
"""A worker may be missed for so long after its node was in trouble."""


class Blame:
    """Who may be blamed, over one run."""

    def __init__(
        self,
        timeline: Timeline,
        conditions: Conditions,
        links: Links,
        *,
        fail: Callable[[str, str], None],
    ) -> None:
        """Begin with everybody innocent.

        Args:
            timeline: virtual time.
            conditions: of the network: nodes that could not be heard.
            links: between nodes that train together.
            fail: called with a property that does not hold, and the story; "" for none.
        """
        self._timeline = timeline
        self._conditions = conditions
        self._links = links
        self._fail = fail
        self._troubled: dict[WorkerId, None] = {}
        self.num_quarantines = 0

    def trouble(self, worker_id: WorkerId) -> None:
        """A fault has struck this worker: it hangs, or is stopped."""
        self._troubled[worker_id] = None

    def noted(self, note: Note) -> None:
        """The coordinator says what it holds somebody guilty of."""
        said = dict(note.fields)
        if note.name == "worker_gone" and HUNG in said["cause"]:
            worker_id = WorkerId(said["worker"])
            if worker_id not in self._troubled and not self._is_ill(worker_id.partition("/")[0]):
                self._fail("who is ended as hung has hung", f"worker {worker_id}: {said['cause']}")
        elif note.name == "node_quarantined" and "for_s" in said:
            self.num_quarantines += 1
            node = said["node"]
            own = [w for w in self._troubled if w.partition("/")[0] == node]
            if not own and not self._is_ill(node):
                self._fail("no innocent node is quarantined", f"node {node}: {said['reason']}")

        elif note.name == "link_cut":
            one, other = map(NodeId, said["nodes"].split())
            since_ns = self._timeline.now_ns - REMEMBERED_NS
            if not self._links.were_cut(one, other, since_ns):
                self._fail("only links that were cut are found cut", f"{one} and {other}")

    def _is_ill(self, node: str) -> bool:
        since_ns = self._timeline.now_ns - REMEMBERED_NS
        return self._conditions.was_troubled(NodeId(node), since_ns)

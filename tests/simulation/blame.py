"""Checks the coordinator's verdicts against the injected faults: hung workers, unhealthy nodes.

Rule: the truth is the faults that were injected into a worker or its node, never a report. A node
is quarantined only for its own workers; failures of coordinators are not blamed on any node.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.events.shared import Note
from elastic.core.facts import NodeId, WorkerId
from tests.simulation.links import Links
from tests.simulation.network import Conditions
from tests.simulation.process import SimProcess
from tests.simulation.world import S, Timeline

HUNG = "killed because it hung"
REMEMBERED_NS = 60 * S
"""For how long after a fault of its node a worker may be lost."""


class Blame:
    """The workers and nodes that may be blamed, over one run."""

    def __init__(
        self,
        timeline: Timeline,
        conditions: Conditions,
        links: Links,
        *,
        fail: Callable[[str, str], None],
    ) -> None:
        """Start without any faults.

        Args:
            timeline: virtual time.
            conditions: the network's conditions: nodes that could not be reached.
            links: links between nodes that train together.
            fail: called with the property that does not hold, "" for none, and the details.
        """
        self._timeline = timeline
        self._conditions = conditions
        self._links = links
        self._fail = fail
        self._troubled: dict[WorkerId, None] = {}
        self.num_quarantines = 0

    def trouble(self, worker_id: WorkerId) -> None:
        """Record a fault of this worker: it hangs, or is stopped."""
        self._troubled[worker_id] = None

    def is_well(self, process: SimProcess) -> bool:
        """Return whether a worker runs, never had a fault, and was not ordered to end."""
        is_ending = process.machine._stop is not None
        return process.moves() and process.worker_id not in self._troubled and not is_ending

    def noted(self, note: Note) -> None:
        """Check a verdict that the coordinator noted."""
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

"""Properties of the copies of a sharded run: of each node's rows, which are useless alone.

Rule: as in `checkers`, they compare only what is visible. Deaths of nodes are ignored, because a
coordinator that frees copies may not know of them yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.facts import JobId, NodeId

Age = tuple[int, int]
"""Generation and steps."""
Finding = tuple[str, str]
"""The violated property, "" for none, and its counterexample."""
FINE: Finding = ("", "")


@dataclass
class RowChecks:
    """All copies that were ever made.

    Attributes:
        sources: the nodes that have rows, by job and snapshot.
        holders: the nodes that have ever received a source's rows, by job, snapshot and source.
    """

    sources: dict[tuple[JobId, Age], set[NodeId]] = field(default_factory=dict)
    holders: dict[tuple[JobId, Age, NodeId], set[NodeId]] = field(default_factory=dict)

    def taken(
        self, job_id: JobId, way: tuple[NodeId, NodeId], age: Age, sources: Iterable[NodeId]
    ) -> Finding:
        """Check a copy; `way` is (holder, source)."""
        holder, source = way
        if holder == source:
            return "rows lie on another node than the one that has them", f"{job_id}: {holder}"
        self.sources[job_id, age] = set(sources)
        self.holders.setdefault((job_id, age, source), set()).add(holder)
        return FINE

    def freed(self, job_id: JobId, way: tuple[NodeId, NodeId], age: Age) -> Finding:
        """Check an order to a holder to free a source's rows."""
        holder, source = way
        for (of, newest), sources in self.sources.items():
            if of != job_id or newest < age:
                continue
            # All copies of the newest group count: its members still have their own rows.
            needed = {one: self._holders(job_id, one, max(age, (newest[0], 0))) for one in sources}
            if source in needed:
                needed[source] -= {holder}
            if all(needed.values()):
                return FINE
        return (
            "no rows are freed before all nodes of a group have newer ones elsewhere",
            f"job {job_id}: {holder} has freed those of {source}, {age}",
        )

    def _holders(self, job_id: JobId, source: NodeId, since: Age) -> set[NodeId]:
        """Return the nodes that have ever received rows of a source, of `since` or newer."""
        return {
            node
            for (of, age, one), nodes in self.holders.items()
            if of == job_id and one == source and age >= since
            for node in nodes
        }

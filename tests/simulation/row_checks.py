"""What must hold of copies of a sharded run: of each node's rows, which are worth nothing alone.

Rule: as in `checkers`, only what became visible is compared; deaths do not count, because those who
free copies may not have heard of them yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.world import JobId, NodeId

Age = tuple[int, int]
"""Generation and steps."""
Finding = tuple[str, str]
"""The property that does not hold, "" if all do, and what contradicts it."""
FINE: Finding = ("", "")


@dataclass
class RowChecks:
    """What was ever copied.

    Attributes:
        sources: of each snapshot of each job, the nodes that have rows of it.
        holders: the nodes that have ever taken a source's rows of it.
    """

    sources: dict[tuple[JobId, Age], set[NodeId]] = field(default_factory=dict)
    holders: dict[tuple[JobId, Age, NodeId], set[NodeId]] = field(default_factory=dict)

    def taken(
        self, job_id: JobId, way: tuple[NodeId, NodeId], age: Age, sources: Iterable[NodeId]
    ) -> Finding:
        """A node, the first of the way, holds rows of a source, the second."""
        holder, source = way
        if holder == source:
            return "rows lie on another node than the one that has them", f"{job_id}: {holder}"
        self.sources[job_id, age] = set(sources)
        self.holders.setdefault((job_id, age, source), set()).add(holder)
        return FINE

    def freed(self, job_id: JobId, way: tuple[NodeId, NodeId], age: Age) -> Finding:
        """A node was told to free a source's rows."""
        holder, source = way
        for (of, newest), sources in self.sources.items():
            if of != job_id or newest < age:
                continue
            # Own rows of the group that trains are where they were: any copy of it is as good.
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
        """Return who has ever taken rows of a source that are not older."""
        return {
            node
            for (of, age, one), nodes in self.holders.items()
            if of == job_id and one == source and age >= since
            for node in nodes
        }

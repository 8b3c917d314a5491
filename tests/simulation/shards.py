"""A model of sharded runs: each node's rows in its own memory, and copies of them on other nodes.

Rule: only all rows of one snapshot are worth anything. Those of living nodes, and of the copies
that living nodes hold, are what a group can go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.policy import replication
from elastic.core.policy.replication import CopyMode, CopyProgress
from elastic.core.world import ALL_ALIKE, SNAPSHOT_SLOTS, Generation, HeldCopy, JobId, NodeId
from tests.simulation.checkers import Checkers
from tests.simulation.world import S, Timeline

FIRST_AT = 3
"""Steps of a group after which it takes its first snapshot."""


class Snapshot(NamedTuple):
    """One snapshot of one run.

    Attributes:
        sources: the nodes that have rows of it.
    """

    generation: Generation
    steps: int
    number: int
    sources: tuple[NodeId, ...]


NONE = Snapshot(0, 0, 0, ())
Slots = dict[int, Snapshot]
"""By what is left of the number."""


@dataclass
class Run:
    """What is where, of one job.

    Attributes:
        newest: snapshot that its group knows of; it goes along with the state.
        base: what the newest group has gone on from; None for storage.
        generation: of that group.
        own: in the memory of nodes that train.
        copies: by holder and source.
        arrived: the newest of a source that lies on another node.
        bringing: what the agents of sources say.
        is_exposed: a snapshot was taken though one before could not be copied, or a node has died
            that had rows of it.
    """

    newest: Snapshot = NONE
    base: Snapshot | None = None
    generation: Generation = 0
    taken_ns: int = 0
    own: dict[NodeId, Slots] = field(default_factory=dict)
    copies: dict[tuple[NodeId, NodeId], Slots] = field(default_factory=dict)
    arrived: dict[NodeId, Snapshot] = field(default_factory=dict)
    bringing: dict[NodeId, CopyMode] = field(default_factory=dict)
    is_exposed: bool = False


class Shards:
    """All sharded runs of one simulation."""

    def __init__(
        self, timeline: Timeline, checkers: Checkers, nodes: Callable[[], tuple[NodeId, ...]]
    ) -> None:
        """Begin without runs; `nodes` names them all: what a dead one had is forgotten."""
        self._timeline, self._checkers, self._nodes = timeline, checkers, nodes
        self.runs: dict[JobId, Run] = {}

    # ------------------------------------------------------------ training

    def forms(
        self, job_id: JobId, generation: Generation, nodes: Iterable[NodeId], holders: set[NodeId]
    ) -> int:
        """A group goes on from what its nodes and these holders have; returns its steps.

        What a holder has taken itself is among it, if its workers have not been gone for long.
        """
        run = self.runs.setdefault(job_id, Run())
        is_kept = self._timeline.now_ns - run.taken_ns < replication.KEPT_S * S
        found = self._complete(run, {*nodes, *(holders if is_kept else ())}, holders)
        best = max(found, key=lambda one: (one.steps, one.generation), default=None)
        run.base, run.generation, run.is_exposed = best, generation, False
        run.newest = best or Snapshot(0, 0, run.newest.number, ())
        return best.steps if best is not None else 0

    def from_storage(self, job_id: JobId, steps: int) -> None:
        """What was in storage is newer: the group goes on from that."""
        run = self.runs[job_id]
        run.base, run.newest = None, run.newest._replace(steps=steps)

    def stepped(
        self,
        job_id: JobId,
        generation: Generation,
        every: int,
        nodes: Iterable[NodeId],
        *,
        step: int,
        first: int,
    ) -> None:
        """A group has made a step: perhaps it takes a snapshot.

        One that has not heard yet that it is over is not followed: nobody goes on from its rows.
        """
        run, sources = self.runs[job_id], tuple(sorted(set(nodes)))
        if generation != run.generation:
            return
        is_due = step - first == FIRST_AT or step // every > run.newest.steps // every
        if not is_due or any(self._is_awaited(run, node) for node in sources):
            return
        before = self._worth(run)
        if run.newest.generation == run.generation:
            # Who has brought its rows to a node that died does not know it, and goes on.
            lying = {key[1] for key, slots in run.copies.items() if run.newest in slots.values()}
            left = [node for node in run.newest.sources if node not in lying]
            # Who brings nothing is not waited for; what is lost then is nobody's fault.
            is_excused = any(run.bringing.get(node) is not CopyMode.ON for node in left)
            run.is_exposed = is_excused or (run.is_exposed and bool(left))
        run.newest = Snapshot(run.generation, step, run.newest.number + 1, sources)
        run.taken_ns = self._timeline.now_ns
        for node in sources:
            run.own.setdefault(node, {})[run.newest.number % SNAPSHOT_SLOTS] = run.newest
        self._check(job_id, before, "a snapshot")

    def _is_awaited(self, run: Run, node: NodeId) -> bool:
        """Ask the real policy what a worker on this node asks it."""
        if run.newest.generation != run.generation:
            return False
        waited_s = (self._timeline.now_ns - run.taken_ns) / S
        bringing = run.bringing.get(node, CopyMode.UNKNOWN)
        has_arrived = run.arrived.get(node) == run.newest
        return replication.is_awaited(CopyProgress(bringing, True, has_arrived, waited_s)).value

    # ------------------------------------------------------------ nodes

    def died(self, node_id: NodeId) -> None:
        """A node's memory is gone."""
        self.lost(node_id)
        for run in self.runs.values():
            run.is_exposed = run.is_exposed or node_id in run.own
            run.own.pop(node_id, None)
            run.arrived.pop(node_id, None)
            run.bringing.pop(node_id, None)

    def lost(self, holder: NodeId) -> None:
        """The copies that a node held are gone."""
        for run in self.runs.values():
            held = [key for key in run.copies if key[0] == holder]
            # One more death may then cost more than this one has: until all lies elsewhere again.
            run.is_exposed = run.is_exposed or bool(held)
            for key in held:
                del run.copies[key]

    def to_push(self, job_id: JobId, node_id: NodeId, generation: Generation) -> Snapshot | None:
        """Return what an agent brings next, of this group or a later one; None for nothing."""
        run = self.runs.get(job_id)
        own = run.own.get(node_id, {}).values() if run is not None else ()
        newest = max((one for one in own if one.generation >= generation), default=None)
        return newest

    def taken(self, job_id: JobId, holder: NodeId, source: NodeId, one: Snapshot) -> None:
        """A copy has come."""
        run = self.runs[job_id]
        slots = run.copies.setdefault((holder, source), {})
        before = self._worth(run)
        slots.pop(one.number % SNAPSHOT_SLOTS, None)
        self._check(job_id, before, "a copy that comes")
        slots[one.number % SNAPSHOT_SLOTS] = one
        prop, detail = self._checkers.rows.taken(job_id, (holder, source), one[:2], one.sources)
        self._checkers.require(not prop, prop, detail)

    def freed(self, job_id: JobId, holder: NodeId, source: NodeId = ALL_ALIKE) -> bool:
        """A node was told to free the rows of a source, or of all; returns whether it had any."""
        run = self.runs.get(job_id)
        keys = [key for key in run.copies if key[0] == holder] if run is not None else []
        gone = [key for key in keys if source in (ALL_ALIKE, key[1])]
        for key in gone:
            slots = run.copies.pop(key) if run is not None else {}
            for one in slots.values():
                is_over = job_id in self._checkers.ended
                prop, detail = self._checkers.rows.freed(job_id, key, one[:2])
                self._checkers.require(is_over or not prop, prop, detail)
        return bool(gone)

    def held(self, holder: NodeId) -> Iterator[HeldCopy]:
        """Return the newest copies that a node holds."""
        for job_id, run in self.runs.items():
            for (at, source), slots in run.copies.items():
                if at == holder and slots:
                    newest = max(slots.values())
                    yield HeldCopy(job_id, newest.generation, newest.steps, source)

    def is_protected(self, job_id: JobId) -> bool:
        """Return whether all rows of a snapshot of the newest group have come to other nodes."""
        run = self.runs[job_id]
        lying: dict[Snapshot, set[NodeId]] = {}
        for (_, source), slots in run.copies.items():
            for one in slots.values():
                lying.setdefault(one, set()).add(source)
        return any(
            one.generation == run.generation and sources >= set(one.sources)
            for one, sources in lying.items()
        )

    # ------------------------------------------------------------ what it is worth

    def _complete(self, run: Run, nodes: set[NodeId], holders: set[NodeId]) -> set[Snapshot]:
        """Return the snapshots of which these nodes, and copies on these holders, have all rows."""
        there: dict[Snapshot, set[NodeId]] = {}
        for node, slots in run.own.items():
            for one in slots.values():
                if node in nodes:
                    there.setdefault(one, set()).add(node)
        for (holder, source), slots in run.copies.items():
            for one in slots.values():
                if holder in holders:
                    there.setdefault(one, set()).add(source)
        return {one for one, sources in there.items() if sources >= set(one.sources)}

    def _worth(self, run: Run) -> dict[NodeId, int]:
        """Return to which step the newest group could go back after the death of each node.

        A node that is frozen or cut off is not dead: what it has is there.
        """
        nodes = set(self._nodes())
        worth = {}
        for node in sorted(nodes):
            left = nodes - {node}
            found = self._complete(run, left, left)
            ours = [one for one in found if one.generation == run.generation or one == run.base]
            worth[node] = max((one.steps for one in ours), default=-1)
        return worth

    def _check(self, job_id: JobId, before: dict[NodeId, int], what: str) -> None:
        run = self.runs[job_id]
        if run.is_exposed or job_id in self._checkers.ended:
            return
        after = self._worth(run)
        for node, steps in before.items():
            self._checkers.require(
                after[node] >= steps,
                "nothing takes away what the death of a node would be made good with",
                f"job {job_id}: {what}; without {node} step {steps} was there, now {after[node]}",
            )

"""A model of sharded runs: each node's rows in its own memory, and copies of them on other nodes.

Rule: a snapshot is usable only if all its rows exist. A group can continue from the rows on living
nodes and from the copies that living nodes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.facts import ALL_ALIKE, SNAPSHOT_SLOTS, Generation, HeldCopy, JobId, NodeId
from elastic.core.policy import replication
from elastic.core.policy.replication import CopyMode
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
"""Snapshots by their numbers modulo SNAPSHOT_SLOTS."""


@dataclass
class Run:
    """The snapshots of one job and their places.

    Attributes:
        newest: the newest snapshot that its group knows of; it is part of the state.
        base: the snapshot from which the newest group continued; None for storage.
        generation: the newest group's generation.
        own: snapshots in the memory of nodes that train.
        copies: copies, by holder and source.
        arrived: the newest snapshot of each source that is on another node.
        bringing: the copy modes that the agents of sources show.
        is_exposed: a snapshot was taken though an earlier one could not be copied, or a node with
            rows of it has died.
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
        """Start without runs; `nodes` returns all nodes, dead ones too: they have no rows."""
        self._timeline, self._checkers, self._nodes = timeline, checkers, nodes
        self.runs: dict[JobId, Run] = {}

    # ------------------------------------------------------------ training

    def forms(
        self, job_id: JobId, generation: Generation, nodes: Iterable[NodeId], holders: set[NodeId]
    ) -> int:
        """Continue a group from the rows of its nodes and these holders; return its steps.

        The holders' own rows count too, while the last snapshot is recent enough to be kept.
        """
        run = self.runs.setdefault(job_id, Run())
        is_kept = self._timeline.now_ns - run.taken_ns < replication.KEPT_S * S
        found = self._complete(run, {*nodes, *(holders if is_kept else ())}, holders)
        best = max(found, key=lambda one: (one.steps, one.generation), default=None)
        run.base, run.generation, run.is_exposed = best, generation, False
        run.newest = best or Snapshot(0, 0, run.newest.number, ())
        return best.steps if best is not None else 0

    def from_storage(self, job_id: JobId, steps: int) -> None:
        """Continue the group from storage, whose checkpoint is newer."""
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
        """Take a snapshot after a step of a group, if one is due.

        A group that is over but does not know it yet is ignored: no group continues from its rows.
        """
        run, sources = self.runs[job_id], tuple(sorted(set(nodes)))
        if generation != run.generation:
            return
        is_due = step - first == FIRST_AT or step // every > run.newest.steps // every
        if not is_due or any(self._is_awaited(run, node) for node in sources):
            return
        before = self._worth(run)
        if run.newest.generation == run.generation:
            # A source whose holder has died does not know it, and continues.
            lying = {key[1] for key, slots in run.copies.items() if run.newest in slots.values()}
            left = [node for node in run.newest.sources if node not in lying]
            # A source that does not copy is not awaited; a loss is then no violation.
            is_excused = any(run.bringing.get(node) is not CopyMode.ON for node in left)
            run.is_exposed = is_excused or (run.is_exposed and bool(left))
        run.newest = Snapshot(run.generation, step, run.newest.number + 1, sources)
        run.taken_ns = self._timeline.now_ns
        for node in sources:
            run.own.setdefault(node, {})[run.newest.number % SNAPSHOT_SLOTS] = run.newest
        self._check(job_id, before, "a snapshot")

    def _is_awaited(self, run: Run, node: NodeId) -> bool:
        """Call the real policy as a worker on this node does."""
        if run.newest.generation != run.generation:
            return False
        waited_s = (self._timeline.now_ns - run.taken_ns) / S
        mode = run.bringing.get(node, CopyMode.UNKNOWN)
        if run.arrived.get(node) == run.newest:
            return False
        return replication.is_awaited(mode, is_whole=True, waited_s=waited_s).value

    # ------------------------------------------------------------ nodes

    def died(self, node_id: NodeId) -> None:
        """Drop a dead node's rows and copies."""
        self.lost(node_id)
        for run in self.runs.values():
            run.is_exposed = run.is_exposed or node_id in run.own
            run.own.pop(node_id, None)
            run.arrived.pop(node_id, None)
            run.bringing.pop(node_id, None)

    def lost(self, holder: NodeId) -> None:
        """Drop the copies that a node held."""
        for run in self.runs.values():
            held = [key for key in run.copies if key[0] == holder]
            # Until all copies are elsewhere again, one more death may cost more than this one.
            run.is_exposed = run.is_exposed or bool(held)
            for key in held:
                del run.copies[key]

    def to_push(self, job_id: JobId, node_id: NodeId, generation: Generation) -> Snapshot | None:
        """Return the snapshot that an agent pushes next, of this group or later; None for none."""
        run = self.runs.get(job_id)
        own = run.own.get(node_id, {}).values() if run is not None else ()
        newest = max((one for one in own if one.generation >= generation), default=None)
        return newest

    def taken(self, job_id: JobId, holder: NodeId, source: NodeId, one: Snapshot) -> None:
        """Store a copy on a holder, and check it."""
        run = self.runs[job_id]
        slots = run.copies.setdefault((holder, source), {})
        before = self._worth(run)
        slots.pop(one.number % SNAPSHOT_SLOTS, None)
        self._check(job_id, before, "a copy that comes")
        slots[one.number % SNAPSHOT_SLOTS] = one
        prop, detail = self._checkers.rows.taken(job_id, (holder, source), one[:2], one.sources)
        self._checkers.require(not prop, prop, detail)

    def freed(self, job_id: JobId, holder: NodeId, source: NodeId = ALL_ALIKE) -> bool:
        """Free a holder's rows of a source, or of all; return whether it had any."""
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
        """Yield the newest copies that a node holds."""
        for job_id, run in self.runs.items():
            for (at, source), slots in run.copies.items():
                if at == holder and slots:
                    newest = max(slots.values())
                    yield HeldCopy(job_id, newest.generation, newest.steps, source)

    def is_protected(self, job_id: JobId) -> bool:
        """Return whether a snapshot of the newest group is complete on other nodes."""
        run = self.runs[job_id]
        lying: dict[Snapshot, set[NodeId]] = {}
        for (_, source), slots in run.copies.items():
            for one in slots.values():
                lying.setdefault(one, set()).add(source)
        return any(
            one.generation == run.generation and sources >= set(one.sources)
            for one, sources in lying.items()
        )

    # ------------------------------------------------------------ recoverable steps

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
        """Return the step that the newest group could restore after the death of each node.

        A node that is frozen or cut off is not dead: its rows still exist.
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

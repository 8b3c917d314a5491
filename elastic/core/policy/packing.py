"""Nodes while a plan for several jobs is computed: free capacity, and the next worker's node.

Rule: a plan starts with empty nodes and places all workers again, so that slots which are about to
become free count; nothing here outlives one decision. Slots without a worker are used first, so
that as few workers as possible have to move.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.core.config import JobSpec
from elastic.core.facts import NO_ZONE, Node, NodeId, Resources, Strategy, zone_of


@dataclass(frozen=True)
class NodeCapacity:
    """A node that may take workers.

    Attributes:
        slots: workers that may run here at once.
        free_slots: of these, the ones that no process holds now.
        resources: of the empty node.
        cordoned: its workers may stay, but no new ones may start.
    """

    node_id: NodeId
    slots: int
    resources: Resources
    free_slots: int = 0
    accelerator_type: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    cordoned: bool = False

    @classmethod
    def of(cls, node: Node, *, free_slots: int = 0, cordoned: bool = False) -> NodeCapacity:
        """Return the capacity of a node as it has introduced itself."""
        return cls(
            node.node_id,
            node.num_slots,
            node.resources,
            free_slots,
            node.accelerator_type,
            node.labels,
            cordoned,
        )

    def matches(self, spec: JobSpec) -> bool:
        """Return whether new workers of the job may ever start here."""
        if self.cordoned:
            return False
        if spec.accelerator_type and self.accelerator_type != spec.accelerator_type:
            return False
        return set(spec.label_selector) <= set(self.labels)

    def capacity(self, need: Resources) -> int:
        """Return how many workers fit onto the empty node."""
        return fitting(self.slots, dict(self.resources.milli), need)


def fitting(slots: int, free: Mapping[str, int], need: Resources) -> int:
    """Return how many workers fit into so many slots and free resources (in thousandths)."""
    count = slots
    for name, amount in need.milli:
        count = min(count, free.get(name, 0) // amount)
    return max(0, count)


@dataclass(frozen=True)
class WorkerShape:
    """The nodes usable for workers of one kind.

    Attributes:
        nodes: the nodes that could ever take one of them, by id.
        capacity: how many each of these takes when it is empty.
    """

    nodes: tuple[NodeCapacity, ...]
    capacity: Mapping[NodeId, int]

    def fitting(self, spec: JobSpec) -> int:
        """Return how many of the job's workers would fit if it were alone."""
        return together(spec.strategy, list(self.capacity.values()))


def together(strategy: Strategy, counts: Sequence[int]) -> int:
    """Return how many workers of one job fit onto nodes of which each takes so many."""
    if strategy is Strategy.STRICT_PACK:
        return max(counts, default=0)
    return sum(min(count, 1) if strategy is Strategy.STRICT_SPREAD else count for count in counts)


class FreeCapacity:
    """The free capacity of all nodes.

    Attributes:
        idle: slots of each node that no process holds, minus the new workers placed there.
    """

    def __init__(self, nodes: Sequence[NodeCapacity]) -> None:
        self.nodes = {node.node_id: node for node in sorted(nodes, key=lambda r: r.node_id)}
        self.slots = {node_id: node.slots for node_id, node in self.nodes.items()}
        self.idle = {node_id: node.free_slots for node_id, node in self.nodes.items()}
        self._free = {n: dict(node.resources.milli) for n, node in self.nodes.items()}
        self._shapes: dict[tuple[object, ...], WorkerShape] = {}

    def shape(self, spec: JobSpec) -> WorkerShape:
        """Return the shape for the workers of this job; equal kinds of workers share one."""
        key = (spec.resources_per_worker, spec.accelerator_type, spec.label_selector)
        if key not in self._shapes:
            need = spec.resources_per_worker
            nodes = tuple(r for r in self.nodes.values() if r.matches(spec) and r.capacity(need))
            self._shapes[key] = WorkerShape(nodes, {r.node_id: r.capacity(need) for r in nodes})
        return self._shapes[key]

    def capacity(self, node_id: NodeId, need: Resources) -> int:
        """Return how many more workers fit onto the node."""
        return fitting(self.slots[node_id], self._free[node_id], need)

    def take(self, node_id: NodeId, need: Resources, *, is_new: bool) -> None:
        """Place one worker on the node; `is_new`: it does not run there already."""
        self._change(node_id, need, -1)
        self.idle[node_id] -= int(is_new)

    def give(self, node_id: NodeId, need: Resources, *, is_new: bool) -> None:
        self._change(node_id, need, 1)
        self.idle[node_id] += int(is_new)

    def _change(self, node_id: NodeId, need: Resources, sign: int) -> None:
        self.slots[node_id] += sign
        free = self._free[node_id]
        for name, amount in need.milli:
            free[name] = free.get(name, 0) + sign * amount


Key = tuple[int, int, int]
Ranked = tuple[int, int, int, int, NodeId]


class WorkerPlacer:
    """Chooses the node for the next worker of one job, by its strategy.

    SPREAD goes over zones first, where nodes have that label, and over nodes within a zone.
    Rule of the heaps, one for the nodes of each zone and one for the zones: while others take slots
    a node only becomes a worse choice, so an outdated entry is too early in the heap, never too
    late, and is moved when it is reached.
    """

    def __init__(
        self,
        spec: JobSpec,
        space: FreeCapacity,
        hosting: Mapping[NodeId, int],
        *,
        barred: Mapping[NodeId, object],
        pinned: bool,
    ) -> None:
        """Build the heaps.

        Args:
            spec: needs and strategy.
            space: free capacity.
            hosting: workers of the job that are counted already, by node.
            barred: nodes that are reserved for another job.
            pinned: other workers of the job are on nodes that do not answer.
        """
        self._spec = spec
        self._space = space
        self.hosting = dict(hosting)
        nodes = [r for r in space.shape(spec).nodes if r.node_id not in barred]
        if spec.strategy is Strategy.STRICT_PACK:
            nodes = self._one_node(nodes, pinned=pinned)
        self._usable = frozenset(r.node_id for r in nodes)
        self._spreads = spec.strategy in (Strategy.SPREAD, Strategy.STRICT_SPREAD)
        self._loads: dict[str, int] = {}
        for node_id, count in self.hosting.items():
            zone = self._zone(node_id)
            self._loads[zone] = self._loads.get(zone, 0) + count
        self._heaps: dict[str, list[tuple[Key, NodeId]]] = {}
        for r in nodes:
            self._heaps.setdefault(self._zone(r.node_id), []).append(
                (self._key(r.node_id), r.node_id)
            )
        # Of several entries of a zone only the listed one counts.
        self._listed: dict[str, Ranked] = {}
        for zone, heap in self._heaps.items():
            heapq.heapify(heap)
            self._listed[zone] = self._ranked(zone, *heap[0])
        self._zones = [(ranked, zone) for zone, ranked in self._listed.items()]
        heapq.heapify(self._zones)

    def place(self, count: int) -> list[NodeId]:
        """Take capacity for up to `count` new workers; return their nodes."""
        chosen: list[NodeId] = []
        while len(chosen) < count and (node_id := self._next()) is not None:
            self._space.take(node_id, self._spec.resources_per_worker, is_new=True)
            self.host(node_id)
            chosen.append(node_id)
        return chosen

    def _next(self) -> NodeId | None:
        """Return the node for one more worker, None when there is none."""
        while self._zones:
            before, zone = self._zones[0]
            if self._listed.get(zone) != before:
                heapq.heappop(self._zones)
                continue
            first = self._first(self._heaps[zone])
            if first is None:
                heapq.heappop(self._zones)
                del self._listed[zone]
                continue
            now = self._ranked(zone, *first)
            if now == before:
                return first[1]
            self._listed[zone] = now
            heapq.heapreplace(self._zones, (now, zone))
        return None

    def _first(self, heap: list[tuple[Key, NodeId]]) -> tuple[Key, NodeId] | None:
        """Return the best node of a zone, None if it is full."""
        need = self._spec.resources_per_worker
        while heap:
            key, node_id = heap[0]
            full = self._spec.strategy is Strategy.STRICT_SPREAD and self.hosting.get(node_id, 0)
            if full or not self._space.capacity(node_id, need):
                heapq.heappop(heap)
                continue
            now = self._key(node_id)
            if now == key:
                return key, node_id
            heapq.heapreplace(heap, (now, node_id))
        return None

    def host(self, node_id: NodeId) -> None:
        """Count a worker of the job on a node, perhaps one where no new ones may start."""
        self.hosting[node_id] = self.hosting.get(node_id, 0) + 1
        zone = self._zone(node_id)
        self._loads[zone] = self._loads.get(zone, 0) + 1
        if node_id not in self._usable:
            return  # A worker that was there already is kept.
        # For PACK that makes the node a better choice, which the heaps cannot find by themselves.
        key = self._key(node_id)
        heap = self._heaps[zone]
        heapq.heappush(heap, (key, node_id))
        ranked = self._ranked(zone, *heap[0])
        if zone not in self._listed or ranked < self._listed[zone]:
            self._listed[zone] = ranked
            heapq.heappush(self._zones, (ranked, zone))

    def _zone(self, node_id: NodeId) -> str:
        """Return what counts as the node's zone; for PACK all nodes are in one."""
        node = self._space.nodes.get(node_id)
        return zone_of(node.labels) if self._spreads and node is not None else NO_ZONE

    def _key(self, node_id: NodeId) -> Key:
        load = self.hosting.get(node_id, 0)
        room = self._space.capacity(node_id, self._spec.resources_per_worker)
        return int(self._space.idle[node_id] <= 0), load if self._spreads else -load, -room

    def _ranked(self, zone: str, key: Key, node_id: NodeId) -> Ranked:
        is_taken, load, slots = key
        return is_taken, self._loads.get(zone, 0) if self._spreads else 0, load, slots, node_id

    def _one_node(self, nodes: Sequence[NodeCapacity], *, pinned: bool) -> list[NodeCapacity]:
        """Return the node that hosts the job already, if any, else the one that fits most of it."""
        if self.hosting or pinned:
            # None if it is cordoned.
            return [r for r in nodes if self.hosting.get(r.node_id)][:1]
        need, low = self._spec.resources_per_worker, self._spec.min_workers

        def rank(node: NodeCapacity) -> tuple[int, int, int, NodeId]:
            fits = self._space.capacity(node.node_id, need)
            idle = min(fits, self._space.idle[node.node_id])
            return -min(fits, low), -min(idle, low), -fits, node.node_id

        return sorted(nodes, key=rank)[:1]

"""On which nodes new workers of a job start.

Rule: nothing is started before min fits (counting what the job has already), so that two jobs
never hold half a group each and wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.core.config import KNOWN_ACCELERATORS, JobSpec
from elastic.core.facts import Node, NodeId, Resources, Strategy
from elastic.core.policy.decision import Decision
from elastic.core.policy.demands import workers
from elastic.core.policy.packing import (
    FreeCapacity,
    NodeCapacity,
    WorkerPlacer,
    together,
)


@dataclass(frozen=True)
class NodeOffer:
    """The free capacity of a node.

    Attributes:
        empty: the node as it would be without any worker.
        free_slots: workers that may still start here.
        free: resources that no worker holds.
        hosting: workers of the job that are here already.
    """

    empty: NodeCapacity
    free_slots: int
    free: Resources
    hosting: int = 0


def place(spec: JobSpec, offers: Sequence[NodeOffer], have: int) -> Decision[tuple[NodeId, ...]]:
    """Choose a node for each further worker, up to max.

    Args:
        spec: needs and strategy.
        offers: nodes that may be used (connected, not draining), in any order.
        have: workers of the job that live already, wherever they are.

    Returns:
        One node id per worker to start; empty when none can or need be started, and then the
        reason includes what is missing.

    Guarantees:
        No node gets more workers than slots or resources allow; STRICT strategies hold for old
        and new workers together; the order of `offers` does not matter (test_placement).
    """
    want = spec.max_workers - have
    if want <= 0:
        return Decision((), f"all {spec.max_workers} workers exist")
    chosen = _chosen(spec, offers, want, have)
    if have + len(chosen) < spec.min_workers:
        return Decision((), explain_shortage(spec, offers, len(chosen), have))
    if not chosen:
        how = f"by {spec.strategy.value} would need free slots"
        return Decision((), f"has {have} workers, no fewer than its min; {want} more {how}")
    reason = f"{len(chosen)} workers placed by {spec.strategy.value}"
    if len(chosen) < want:
        reason += f", {want - len(chosen)} more would need free slots"
    return Decision(tuple(chosen), reason)


def _chosen(spec: JobSpec, offers: Sequence[NodeOffer], want: int, have: int) -> list[NodeId]:
    """Return a node for each of so many workers, for as many as fit."""
    hosting = {o.empty.node_id: o.hosting for o in offers if o.hosting}
    if spec.strategy is Strategy.STRICT_PACK and have > sum(hosting.values()):
        return []  # The job's node does not answer now: it must not start on another.
    space = FreeCapacity(
        [
            replace(o.empty, slots=o.free_slots, resources=o.free, free_slots=o.free_slots)
            for o in offers
        ]
    )
    return WorkerPlacer(spec, space, hosting, barred={}, pinned=have > 0).place(want)


def explain_misfit(spec: JobSpec, nodes: Sequence[Node]) -> str:
    """Return why a job would wait for ever with only these nodes, empty; "" if it would not.

    Args:
        spec: needs and strategy.
        nodes: if there are none, the result is "".
    """
    empty = [NodeCapacity.of(node) for node in nodes]
    return (_unlike(spec, empty) or _too_small(spec, empty, 0)) if empty else ""


def explain_shortage(spec: JobSpec, offers: Sequence[NodeOffer], fits: int, have: int) -> str:
    """Return in one line why min workers do not fit, and what would help.

    Args:
        spec: needs and strategy.
        offers: nodes that may be used.
        fits: how many more workers fit now.
        have: workers of the job that live already.
    """
    need = spec.min_workers - have
    if not offers:
        return f"needs {need} more workers, no node is connected: start an elastic-agent"
    empty = [o.empty for o in offers]
    if unlike := _unlike(spec, empty):
        return unlike
    elsewhere = max(0, have - sum(o.hosting for o in offers))
    if small := _too_small(spec, empty, elsewhere):
        return f"{small}; {_what_would_do(spec, empty, elsewhere)}"
    matching = [o for o in offers if o.empty.matches(spec)]
    free = [f"{sum(o.free_slots for o in matching)} free slots"]
    for name, _ in spec.resources_per_worker.milli:
        free.append(f"{name}={sum(o.free.amount(name) for o in matching):g} free")
    return (
        f"needs {need} more workers by {spec.strategy.value}, {fits} fit now "
        f"({', '.join(free)} on {len(matching)} nodes)"
    )


def _unlike(spec: JobSpec, nodes: Sequence[NodeCapacity]) -> str:
    """Return a text that no node is of the kind that a worker needs, "" if one is."""
    matching = [node for node in nodes if node.matches(spec)]
    types = {node.accelerator_type for node in nodes}
    if spec.accelerator_type and spec.accelerator_type not in types:
        found = sorted(types - {""})
        return (
            f"no connected node has accelerator {spec.accelerator_type}; "
            f"there are: {', '.join(found) or 'none'}"
        )
    if not matching:
        wanted = ", ".join(f"{k}={v}" for k, v in spec.label_selector)
        return f"no connected node carries the labels {wanted}"
    for name, amount in spec.resources_per_worker.milli:
        if all(dict(node.resources.milli).get(name, 0) < amount for node in matching):
            largest = max(node.resources.amount(name) for node in matching)
            return f"each worker needs {name}={amount / 1000:g}, the largest node has {largest:g}"
    return ""


def _enough(spec: JobSpec, nodes: Sequence[NodeCapacity]) -> list[dict[str, int]]:
    """Return for each matching node how many workers each of its resources is enough for."""
    need = spec.resources_per_worker.milli
    found = []
    for node in nodes:
        if node.matches(spec):
            total = dict(node.resources.milli)
            enough = {name: total.get(name, 0) // amount for name, amount in need}
            found.append({"slots": node.slots, **enough})
    return found


def _counts(spec: JobSpec, nodes: Sequence[NodeCapacity]) -> list[int]:
    """Return how many workers each matching node could take."""
    return [node.capacity(spec.resources_per_worker) for node in nodes if node.matches(spec)]


def _too_small(spec: JobSpec, nodes: Sequence[NodeCapacity], elsewhere: int) -> str:
    """Return a text that min does not fit onto these nodes even if empty, "" if it does.

    Args:
        spec: needs and strategy.
        nodes: those that may be used, empty.
        elsewhere: workers of the job that live on other nodes, and count.
    """
    need = spec.min_workers - elsewhere
    holds = together(spec.strategy, _counts(spec, nodes))
    if holds >= need:
        return ""
    found = _enough(spec, nodes)
    where = " on one node" if spec.strategy is Strategy.STRICT_PACK else ""
    is_spread = spec.strategy is Strategy.STRICT_SPREAD
    lacks = []
    for name in found[0]:
        enough = together(spec.strategy, [node[name] for node in found])
        if enough < need:
            what = f"on {_nodes(enough)}" if is_spread else f"for {enough}{where}"
            lacks.append(f"{name} (enough {what})")
    shortage = ", ".join(lacks) or f"{' and '.join(found[0])} on the same nodes"
    if is_spread and len(found) < need:
        shortage = "nodes (each takes one worker)"
    beside = f" beside {elsewhere} on others" if elsewhere else ""
    hold, are = ("holds", "it is") if len(found) == 1 else ("hold", "they are")
    return (
        f"needs {workers(spec, need)}{beside} by {spec.strategy.value}, but the "
        f"{_nodes(len(found))} that it may use {hold} only {holds}{where} even when {are} empty; "
        f"what lacks: {shortage}"
    )


def _what_would_do(spec: JobSpec, nodes: Sequence[NodeCapacity], elsewhere: int) -> str:
    """Return what would let a job run for which these nodes are too small."""
    counts = _counts(spec, nodes)
    need, holds = spec.min_workers - elsewhere, together(spec.strategy, counts)
    is_packed = spec.strategy is Strategy.STRICT_PACK
    ways = [f"add a node for {need}" if is_packed else f"add nodes for {need - holds} more"]
    low = (holds + elsewhere) // spec.workers_per_replica * spec.workers_per_replica
    if low:
        ways.append(f"elastic scale {spec.job_id} --min {low}")
    looser = _LOOSER.get(spec.strategy)
    if looser is not None and together(looser, counts) >= need:
        ways.append(f"submit it again with --placement-strategy {looser.value}")
    return ", or ".join(ways)


_LOOSER = {Strategy.STRICT_PACK: Strategy.PACK, Strategy.STRICT_SPREAD: Strategy.SPREAD}


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def refuse_accelerator(spec: JobSpec, present: Sequence[str]) -> str:
    """Return why the accelerator type can never be available, "" if it may.

    A type that no connected node has is accepted if it is a known one: such a node may come.
    """
    wanted = spec.accelerator_type
    if not wanted or wanted in present or wanted in KNOWN_ACCELERATORS:
        return ""
    here = ", ".join(sorted(set(present))) or "none"
    return (
        f"accelerator_type={wanted!r} is unknown; nodes of this cluster have: {here}; "
        f"known types: {', '.join(KNOWN_ACCELERATORS)}"
    )

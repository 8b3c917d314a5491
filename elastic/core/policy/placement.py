"""On which nodes new workers of a job start.

Rule: nothing is started before min fits (counting what the job has already), so that two jobs
never hold half a group each and wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.config import KNOWN_ACCELERATORS, JobSpec
from elastic.core.policy.decision import Decision
from elastic.core.policy.demands import workers
from elastic.core.policy.packing import (
    FreeCapacity,
    NodeCapacity,
    WorkerPlacer,
    fitting,
    together,
)
from elastic.core.world import Node, NodeId, Resources, Strategy


@dataclass(frozen=True)
class NodeOffer:
    """The free capacity of a node.

    Attributes:
        free_slots: workers that may still start here.
        free: resources that no worker holds.
        total, slots: resources of the empty node, and workers that it could take at once.
        hosting: workers of the job that are here already.
    """

    node_id: NodeId
    free_slots: int
    free: Resources
    total: Resources
    slots: int
    accelerator_type: str = ""
    labels: tuple[tuple[str, str], ...] = ()
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
    hosting = {o.node_id: o.hosting for o in offers if o.hosting}
    if spec.strategy is Strategy.STRICT_PACK and have > sum(hosting.values()):
        return []  # The job's node does not answer now: it must not start on another.
    space = FreeCapacity(
        [
            NodeCapacity(
                o.node_id, o.free_slots, o.free, o.free_slots, o.accelerator_type, o.labels
            )
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
    offers = [
        NodeOffer(
            node.node_id, node.num_slots, node.resources, node.resources, node.num_slots,
            accelerator_type=node.accelerator_type, labels=node.labels,
        )
        for node in nodes
    ]  # fmt: skip
    return (_unlike(spec, offers) or _too_small(spec, offers, 0)) if offers else ""


def _matches(spec: JobSpec, offer: NodeOffer) -> bool:
    if spec.accelerator_type and offer.accelerator_type != spec.accelerator_type:
        return False
    return set(spec.label_selector) <= set(offer.labels)


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
    if unlike := _unlike(spec, offers):
        return unlike
    elsewhere = max(0, have - sum(o.hosting for o in offers))
    if small := _too_small(spec, offers, elsewhere):
        return f"{small}; {_what_would_do(spec, offers, elsewhere)}"
    matching = [o for o in offers if _matches(spec, o)]
    free = [f"{sum(o.free_slots for o in matching)} free slots"]
    for name, _ in spec.resources_per_worker.milli:
        free.append(f"{name}={sum(o.free.amount(name) for o in matching):g} free")
    return (
        f"needs {need} more workers by {spec.strategy.value}, {fits} fit now "
        f"({', '.join(free)} on {len(matching)} nodes)"
    )


def _unlike(spec: JobSpec, offers: Sequence[NodeOffer]) -> str:
    """Return a text that no node is of the kind that a worker needs, "" if one is."""
    matching = [o for o in offers if _matches(spec, o)]
    if spec.accelerator_type and not any(
        o.accelerator_type == spec.accelerator_type for o in offers
    ):
        found = sorted({o.accelerator_type for o in offers if o.accelerator_type})
        return (
            f"no connected node has accelerator {spec.accelerator_type}; "
            f"there are: {', '.join(found) or 'none'}"
        )
    if not matching:
        wanted = ", ".join(f"{k}={v}" for k, v in spec.label_selector)
        return f"no connected node carries the labels {wanted}"
    for name, amount in spec.resources_per_worker.milli:
        if all(dict(o.total.milli).get(name, 0) < amount for o in matching):
            largest = max(o.total.amount(name) for o in matching)
            return f"each worker needs {name}={amount / 1000:g}, the largest node has {largest:g}"
    return ""


def _holds(spec: JobSpec, offer: NodeOffer) -> int:
    """Return how many workers an empty node could take."""
    return fitting(offer.slots, dict(offer.total.milli), spec.resources_per_worker)


def _empty(spec: JobSpec, offers: Sequence[NodeOffer]) -> list[dict[str, int]]:
    """Return for each matching node how many workers each of its resources is enough for."""
    need = spec.resources_per_worker.milli
    found = []
    for offer in offers:
        if _matches(spec, offer):
            total = dict(offer.total.milli)
            enough = {name: total.get(name, 0) // amount for name, amount in need}
            found.append({"slots": offer.slots, **enough})
    return found


def _too_small(spec: JobSpec, offers: Sequence[NodeOffer], elsewhere: int) -> str:
    """Return a text that min does not fit onto these nodes even if empty, "" if it does.

    Args:
        spec: needs and strategy.
        offers: nodes that may be used.
        elsewhere: workers of the job that live on other nodes, and count.
    """
    need = spec.min_workers - elsewhere
    holds = together(spec.strategy, [_holds(spec, o) for o in offers if _matches(spec, o)])
    if holds >= need:
        return ""
    nodes = _empty(spec, offers)
    where = " on one node" if spec.strategy is Strategy.STRICT_PACK else ""
    is_spread = spec.strategy is Strategy.STRICT_SPREAD
    lacks = []
    for name in nodes[0]:
        enough = together(spec.strategy, [node[name] for node in nodes])
        if enough < need:
            what = f"on {_nodes(enough)}" if is_spread else f"for {enough}{where}"
            lacks.append(f"{name} (enough {what})")
    shortage = ", ".join(lacks) or f"{' and '.join(nodes[0])} on the same nodes"
    if is_spread and len(nodes) < need:
        shortage = "nodes (each takes one worker)"
    beside = f" beside {elsewhere} on others" if elsewhere else ""
    hold, are = ("holds", "it is") if len(nodes) == 1 else ("hold", "they are")
    return (
        f"needs {workers(spec, need)}{beside} by {spec.strategy.value}, but the "
        f"{_nodes(len(nodes))} that it may use {hold} only {holds}{where} even when {are} empty; "
        f"what lacks: {shortage}"
    )


def _what_would_do(spec: JobSpec, offers: Sequence[NodeOffer], elsewhere: int) -> str:
    """Return what would let a job run for which these nodes are too small."""
    counts = [_holds(spec, o) for o in offers if _matches(spec, o)]
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

"""What an exchange of gradients costs each rank, counted: messages, bytes, connections.

    python bench/exchange_plan.py --workers 64 --workers 1024

Runs the planner that workers run, for every rank of a world, and counts. Nothing is sent. Beside
each world a ring over the same buckets; below, what is new after a node is lost.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from elastic.core.policy.exchange_plan import (
    MESSAGE_BYTES,
    ExchangePlan,
    bucket_bytes_for,
    partners,
    shape_of,
    tree_plan,
)

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class World:
    """Workers on nodes, some of which may be lost.

    Attributes:
        nodes: slot of each rank's node.
        num_slots: of nodes.
        num_micro_batches: V.
    """

    nodes: tuple[int, ...]
    num_slots: int
    num_micro_batches: int

    @staticmethod
    def of(workers: int, on_node: int, more: int = 0) -> World:
        """Return a world whose nodes have so many workers each, the last one what is left."""
        nodes = tuple(rank // on_node for rank in range(workers))
        return World(nodes, nodes[-1] + 1, workers + more)

    def without(self, slot: int) -> World:
        """Return what is left when a node is lost."""
        left = tuple(node for node in self.nodes if node != slot)
        return World(left, self.num_slots, self.num_micro_batches)

    def plans(self, size: int) -> list[ExchangePlan]:
        """Return the plan of each rank for a bucket of so many elements."""
        shape, grain = shape_of(self.nodes, self.num_slots), MESSAGE_BYTES // ELEMENT_BYTES
        return [
            tree_plan(rank, self.num_micro_batches, shape, size, grain)
            for rank in range(len(self.nodes))
        ]

    def edges(self, plans: list[ExchangePlan]) -> list[set[tuple[int, int]]]:
        """Return whom each rank talks to, by slot of the node and place on it."""
        names = [(node, rank - self.nodes.index(node)) for rank, node in enumerate(self.nodes)]
        return [{names[other] for other in partners(plan)} for plan in plans]


def row(world: World, parameters: int) -> list[str]:
    """Count one world."""
    workers = len(world.nodes)
    bucket = min(bucket_bytes_for(workers), parameters * ELEMENT_BYTES)
    size = bucket // ELEMENT_BYTES
    buckets = -(-parameters // size)
    plans = world.plans(size)
    ring_bytes = 2 * (workers - 1) / workers
    sent = [plan.elements_sent / size / ring_bytes for plan in plans]
    between = [
        sum(move.elements for one in rounds if not one.is_local for move in one.sends) / size
        for rounds in ((*plan.reduce, *plan.gather) for plan in plans)
    ]
    messages = [
        sum(len(one.sends) for one in (*plan.reduce, *plan.gather)) * buckets for plan in plans
    ]
    smallest = min(
        move.elements * ELEMENT_BYTES
        for plan in plans
        for one in (*plan.reduce, *plan.gather)
        for move in one.sends
    )
    talks = world.edges(plans)
    fresh = ""
    if world.num_slots > 1:
        after = world.without(world.num_slots // 3)
        names = [
            (node, place)
            for node in sorted(set(after.nodes))
            for place in range(after.nodes.count(node))
        ]
        before = {
            (node, rank - world.nodes.index(node)): talks[rank]
            for rank, node in enumerate(world.nodes)
        }
        new = [
            len(now - before[name])
            for name, now in zip(names, after.edges(after.plans(size)), strict=True)
        ]
        fresh = f"{max(new)} / {statistics.mean(new):.1f}"
    counts = [len(one) for one in talks]
    return [
        f"{workers:,}",
        f"{world.num_micro_batches:,}",
        f"{bucket >> 20} MB",
        f"{max(messages):,} ({2 * (workers - 1) * buckets:,})",
        f"{smallest >> 10} KB",
        f"{max(sent):.2f} / {statistics.mean(sent):.2f}",
        f"{max(between):.2f} / {statistics.mean(between):.2f}",
        f"{max(counts)} / {statistics.mean(counts):.1f}",
        fresh,
    ]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, action="append", help="again for several")
    parser.add_argument("--on-node", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=7_000_000_000)
    args = parser.parse_args()
    console = Console(highlight=False, width=150)
    console.print(
        f"{args.parameters / 1e9:g} B parameters of {ELEMENT_BYTES} bytes, {args.on_node} workers "
        f"on a node; of all ranks the most, or most / mean"
    )
    table = Table()
    for name in (
        "workers", "V", "bucket", "messages (ring)", "smallest", "bytes to ring's",
        "between nodes, of gradient", "connections", "new after a node's loss",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for workers in args.workers or [8, 64, 512, 1024]:
        table.add_row(*row(World.of(workers, args.on_node), args.parameters))
        uneven = workers - args.on_node
        for fewer in sorted({workers - 1, uneven, workers * 49 // 50}, reverse=True):
            if 1 < fewer < workers:
                world = World.of(fewer, args.on_node, more=workers - fewer)
                table.add_row(*row(world, args.parameters))
    console.print(table)


if __name__ == "__main__":
    main()

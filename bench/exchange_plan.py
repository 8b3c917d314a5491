"""What an exchange of gradients costs each rank, counted: messages, bytes, connections.

    python bench/exchange_plan.py --workers 64 --workers 1024

Runs the planner that workers run, for every rank of a world, and counts. Nothing is sent. Beside
each world a ring over the same buckets; at the right, whom else a rank exchanges with after a node
is lost, the most of up to 31 that are tried in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from elastic.core.facts import NodeId, WorkerId
from elastic.core.policy.exchange_plan import (
    MESSAGE_BYTES,
    ExchangePlan,
    GroupShape,
    bucket_bytes_for,
    partners,
    shape_of,
    tree_plan,
)
from elastic.core.policy.ranks import assign_ranks

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class World:
    """Workers on nodes.

    Attributes:
        nodes: of each worker, by rank.
        num_micro_batches: V.
    """

    nodes: Mapping[WorkerId, NodeId]
    num_micro_batches: int

    @staticmethod
    def of(workers: int, on_node: int, more: int = 0) -> World:
        """Return a world whose nodes have so many workers each, the last one what is left."""
        nodes = {WorkerId(f"w{one}"): NodeId(f"n{one // on_node}") for one in range(workers)}
        return World(nodes, workers + more)

    def without(self, node: NodeId) -> World:
        """Return what is left when a node is lost, in the ranks that the coordinator assigns."""
        left = [one for one, where in self.nodes.items() if where != node]
        places = assign_ranks(left, self.nodes, self.nodes)
        nodes = {place.worker_id: place.node_id for place in places}
        return World(nodes, self.num_micro_batches)

    def shape(self) -> GroupShape:
        """Return how the ranks are joined; the same object for nodes of the same sizes."""
        numbers = {node: number for number, node in enumerate(dict.fromkeys(self.nodes.values()))}
        return shape_of([numbers[node] for node in self.nodes.values()])

    def plans(self, size: int) -> list[ExchangePlan]:
        """Return the plan of each rank for a bucket of so many elements."""
        shape, grain = self.shape(), MESSAGE_BYTES // ELEMENT_BYTES
        return [
            tree_plan(rank, self.num_micro_batches, shape, size, grain)
            for rank in range(len(self.nodes))
        ]


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
    counts = [len(partners(plan)) for plan in plans]
    return [
        f"{workers:,}",
        f"{world.num_micro_batches:,}",
        f"{bucket >> 20} MB",
        f"{max(messages):,} ({2 * (workers - 1) * buckets:,})",
        f"{smallest >> 10} KB",
        f"{max(sent):.2f} / {statistics.mean(sent):.2f}",
        f"{max(between):.2f} / {statistics.mean(between):.2f}",
        f"{max(counts)} / {statistics.mean(counts):.1f}",
        *new_partners(world, plans, size),
    ]


def new_partners(world: World, plans: list[ExchangePlan], size: int) -> tuple[str, str]:
    """Count whom ranks exchange with after a node's loss and did not before, for up to 31 nodes.

    Returns:
        Most and mean of the workers that keep their rank, and most of those that get another.
    """
    nodes = list(dict.fromkeys(world.nodes.values()))
    if len(nodes) == 1:
        return "", ""
    known = {world.shape(): [partners(plan) for plan in plans]}
    ranks = {worker: rank for rank, worker in enumerate(world.nodes)}
    keep, change = [], []
    for node in nodes[:: -max(1, len(nodes) // 16)]:
        after = world.without(node)
        if after.shape() not in known:
            known[after.shape()] = [partners(plan) for plan in after.plans(size)]
        old = [ranks[worker] for worker in after.nodes]
        for rank, (was, found) in enumerate(zip(old, known[after.shape()], strict=True)):
            new = {old[other] for other in found} - known[world.shape()][was]
            (keep if was == rank else change).append(len(new))
    return f"{max(keep)} / {statistics.mean(keep):.1f}", f"{max(change, default=0)}"


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
        f"on a node; of all ranks the most, or most / mean; between nodes, of the gradient's bytes"
    )
    table = Table()
    for name in (
        "workers", "V", "bucket", "messages (ring)", "smallest", "bytes to ring's",
        "between nodes", "partners", "new after a node's loss", "for who moves",
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

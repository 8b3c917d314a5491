"""Assigns ranks: node-contiguous, a total order that changes as little as it can.

Rank 0 of a later group is always a survivor if there is one, so that the member that leads the
rendezvous and writes reports has taken part before.

Nodes with survivors come first, in their old order, and on each its survivors before those that
join it. Where a node is lost, the last one of its size takes its place, and all others keep theirs:
with their ranks they keep their micro-batches, what they have loaded ahead, their rows of a sharded
model, and most of the ranks that they exchange gradients with. The next node to join comes last,
where one is missing now. Where one worker of several on a node is lost, or no later node has the
size of a lost one, all later ranks move down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elastic.core.facts import NodeId, WorkerId
from elastic.errors import check


class RankPlace(NamedTuple):
    """One worker's place in the group; a tuple, because a group may have ten thousand."""

    worker_id: WorkerId
    node_id: NodeId
    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int


def assign_ranks(
    members: Sequence[WorkerId],
    node_of: Mapping[WorkerId, NodeId],
    previous: Mapping[WorkerId, NodeId] | None = None,
) -> tuple[RankPlace, ...]:
    """Return the members' places, sorted by rank.

    Nodes with survivors come in their old order, except that the last of a lost node's size comes
    where that was; then those without, by id. Inside a node survivors come in their old order,
    then the others by id.

    Args:
        members: of the group, in any order, without duplicates.
        node_of: the node of each member.
        previous: the members of the previous group, by rank, and their nodes; None for no such.

    Guarantees:
        Ranks are a permutation of 0..n-1, nodes are contiguous, and the order of `members` does
        not matter (test_ranks).
    """
    left, before = set(members), previous or {}
    if len(left) != len(members):  # Not `check`: the text alone would take as long as the rest.
        check(False, f"a worker is a member twice: {list(members)}")
    by_node: dict[NodeId, list[WorkerId]] = {node_id: [] for node_id in before.values()}
    for worker_id, node_id in before.items():
        if worker_id in left:
            by_node[node_id].append(worker_id)
    new_nodes: dict[NodeId, list[WorkerId]] = {}
    for worker_id in sorted(left.difference(before)):
        node_id = node_of[worker_id]
        known = by_node if by_node.get(node_id) else new_nodes
        known.setdefault(node_id, []).append(worker_id)
    old = _without_gaps(list(by_node.items()), Counter(before.values()))
    by_node = {**dict(old), **{node_id: new_nodes[node_id] for node_id in sorted(new_nodes)}}

    places: list[RankPlace] = []
    for node_rank, (node_id, local) in enumerate(by_node.items()):
        for local_rank, worker_id in enumerate(local):
            places.append(
                RankPlace(worker_id, node_id, len(places), local_rank, len(local), node_rank)
            )
    return tuple(places)


def _without_gaps(
    nodes: list[tuple[NodeId, list[WorkerId]]], sizes: Mapping[NodeId, int]
) -> list[tuple[NodeId, list[WorkerId]]]:
    """Return the nodes that have members, each lost one replaced by the last of its size."""
    last: dict[int, list[int]] = {}
    for place, (_, local) in enumerate(nodes):
        last.setdefault(len(local), []).append(place)
    for place, (node_id, local) in enumerate(nodes):
        alike = last.get(sizes[node_id], [])
        if not local and alike and alike[-1] > place:
            other = alike.pop()
            nodes[place], nodes[other] = nodes[other], nodes[place]
    return [(node_id, local) for node_id, local in nodes if local]

"""Assigns ranks: node-contiguous, survivors first and in their old order, a total order.

Rank 0 of a later group is always a survivor if there is one, so that the member that leads the
rendezvous and writes reports has taken part before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elastic.core.world import NodeId, WorkerId
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
    previous: Sequence[WorkerId] = (),
) -> tuple[RankPlace, ...]:
    """Return the members' places, sorted by rank.

    Nodes come in the order of their lowest-ranked survivor, then nodes without survivors by id;
    inside a node survivors come in their old order, then the others by id.

    Args:
        members: of the group, in any order, without duplicates.
        node_of: the node of each member.
        previous: the members of the previous group, by rank.

    Guarantees:
        Ranks are a permutation of 0..n-1, nodes are contiguous, and the order of `members` does
        not matter (test_ranks).
    """
    left = set(members)
    if len(left) != len(members):  # Not `check`: the text alone would take as long as the rest.
        check(False, f"a worker is a member twice: {list(members)}")
    # In the order of their old ranks, so that their nodes come in that order too.
    survivors = [worker_id for worker_id in previous if worker_id in left]
    by_node: dict[NodeId, list[WorkerId]] = {}
    for worker_id in survivors:
        by_node.setdefault(node_of[worker_id], []).append(worker_id)
    new_nodes: dict[NodeId, list[WorkerId]] = {}
    for worker_id in sorted(left.difference(survivors)):
        node_id = node_of[worker_id]
        (by_node if node_id in by_node else new_nodes).setdefault(node_id, []).append(worker_id)
    by_node.update((node_id, new_nodes[node_id]) for node_id in sorted(new_nodes))

    places: list[RankPlace] = []
    for node_rank, (node_id, local) in enumerate(by_node.items()):
        for local_rank, worker_id in enumerate(local):
            places.append(
                RankPlace(worker_id, node_id, len(places), local_rank, len(local), node_rank)
            )
    return tuple(places)

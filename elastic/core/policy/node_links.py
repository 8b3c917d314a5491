"""Which nodes are excluded from a group because they and others of it cannot reach each other.

Rule: a link counts as cut when both ends report it repeatedly: one end alone may be wrong, or be
the fault. As few nodes as possible are excluded, chosen greedily: the true minimum is hard to find,
and with one cut link or one isolated node, the usual case, the greedy choice is the minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from elastic.core.config import NS_PER_S
from elastic.core.facts import NodeId

ROUNDS = 2
"""Failed probes in a row, at each end, for a link to count as cut: one failure may be chance."""

TRIAL_NS = 5 * NS_PER_S
"""A link that was cut twice counts as restored after working for so long, and for twice as long
each further time: a relapse costs two groups, and each group without progress is charged."""
TRIAL_NS_MAX = 8 * TRIAL_NS
"""Longer than the healthy time after which a job's losses are forgiven."""
FORGET_NS = 600 * NS_PER_S
"""After so long without a cut, a link's earlier cuts do not count."""

Pair = tuple[NodeId, NodeId]


def cut_pairs(failed: Mapping[Pair, int]) -> tuple[Pair, ...]:
    """Return the links that are cut, each once, in order.

    Args:
        failed: by prober and target, how many probes in a row failed.
    """
    return tuple(
        sorted(
            (one, other)
            for (one, other), times in failed.items()
            if one < other and times >= ROUNDS and failed.get((other, one), 0) >= ROUNDS
        )
    )


def trial_ns(cuts: int) -> int:
    """Return how long a link must work until it counts as restored, after so many cuts."""
    return min(TRIAL_NS << min(cuts - 2, 8), TRIAL_NS_MAX) if cuts >= 2 else 0


def who_stays_out(
    cut: Sequence[Pair], out: Collection[NodeId], workers: Mapping[NodeId, int]
) -> dict[NodeId, NodeId]:
    """Return the nodes to exclude, and for each one that it does not reach.

    Args:
        cut: links that are cut.
        out: nodes excluded already: they stay so while a link of theirs is cut, because each
            change costs a group; unless another choice excludes fewer, and keeps a node of the
            group, which has its state.
        workers: how many members of the group are on each of its nodes, by rank: the node with
            the fewest is excluded first, of several the last one.
    """
    found = _greedily(cut, out, workers)
    fewest = _greedily(cut, (), workers)
    has_state = not fewest.keys() >= workers.keys()
    return fewest if len(fewest) < len(found) and has_state else found


def _greedily(
    cut: Sequence[Pair], out: Collection[NodeId], workers: Mapping[NodeId, int]
) -> dict[NodeId, NodeId]:
    left = list(cut)
    found: dict[NodeId, NodeId] = {}
    places = {node_id: place for place, node_id in enumerate(workers)}

    def weight(node_id: NodeId) -> tuple[bool, int, int, int, NodeId]:
        place = places.get(node_id, len(places))
        return node_id in out, counts[node_id], -workers.get(node_id, 0), place, node_id

    while left:
        counts = Counter(node_id for pair in left for node_id in pair)
        worst = max(counts, key=weight)
        mine = [pair for pair in left if worst in pair]
        one, other = mine[0]
        found[worst] = other if worst == one else one
        left = [pair for pair in left if worst not in pair]
    return found

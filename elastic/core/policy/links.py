"""Which nodes stay out of a group because they and others of it cannot reach each other.

Rule: a link counts as cut when both ends say so, again and again: one of them alone may lie, or
be what is wrong. As few nodes as possible stay out, found greedily; the least is hard to find, and
with one cut link or one node that is cut off, which is nearly always, this is the least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from elastic.core.config import NS_PER_S
from elastic.core.world import NodeId

ROUNDS = 2
"""So many times in a row each end could not reach the other: what is lost once may be chance."""

TRIAL_NS = 5 * NS_PER_S
"""A link that was cut twice is there again when it has been for so long, and for twice as long each
further time: that costs two groups, and each group that gets nowhere counts against the job."""
TRIAL_NS_MAX = 8 * TRIAL_NS
"""Longer than a group trains until what it counted against its job is forgiven."""
FORGET_NS = 600 * NS_PER_S
"""Of a link that has not been cut for so long the earlier times do not count."""

Pair = tuple[NodeId, NodeId]


def cut_pairs(failed: Mapping[Pair, int]) -> tuple[Pair, ...]:
    """Return the links that are cut, each once, in order.

    Args:
        failed: of who tried and whom, how many times in a row that failed.
    """
    return tuple(
        sorted(
            (one, other)
            for (one, other), times in failed.items()
            if one < other and times >= ROUNDS and failed.get((other, one), 0) >= ROUNDS
        )
    )


def trial_ns(cuts: int) -> int:
    """Return for how long a link must be there until it counts, that was found cut so often."""
    return min(TRIAL_NS << min(cuts - 2, 8), TRIAL_NS_MAX) if cuts >= 2 else 0


def who_stays_out(
    cut: Sequence[Pair], out: Collection[NodeId], workers: Mapping[NodeId, int]
) -> dict[NodeId, NodeId]:
    """Return the nodes that stay out, and for each one that it does not reach.

    Args:
        cut: links that are cut.
        out: nodes that are out already: they stay so while a link of theirs is cut, because each
            change costs a group; unless fewer are out without them, and one of the group is left,
            who knows how far it has come.
        workers: how many members of the group are on each of its nodes, by rank: who has fewest
            goes first, of those the last one.
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

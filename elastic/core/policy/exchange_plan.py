"""The plan of an all-reduce: which rank sends which slices of which subtree sums to which rank.

The order of addition is the tree's over the V micro-batches (see `microbatch`), and need not be
done by one rank per slice. Ranks hold contiguous micro-batches. Groups of ranks are joined
repeatedly, the ranks of a node first. Before a join each group holds the sums of its own subtrees,
cut into a slice for each of its ranks; the join cuts them into the slices of the larger group, and
adds siblings as they meet. At the top each rank holds 1/W of the total; the gather distributes it
back over the same edges. With two groups in each join this is recursive halving, for any W and in
the tree's order; with all ranks in one join it is an all-to-all.

Rule: a plan is a function of (V, the node of each rank, size), the same on all ranks. Neither the
shape nor the slices are part of the result: every plan gives the plain tree's bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from elastic.core.policy.microbatch import Span, additions_to, deal, subtrees
from elastic.errors import check

AT_ONCE = 4
"""Nodes joined in one round: as many bytes as with halving, in fewer rounds."""
MESSAGE_BYTES = 64 << 10
"""Below this size the cost per message exceeds the cost of its bytes."""
BUCKET_BYTES = 4 << 20
"""Size of a bucket, as long as its slices are no shorter than `MESSAGE_BYTES`."""


@dataclass(frozen=True, eq=False)
class GroupShape:
    """A group of ranks, and its subgroups; compared by identity, as it is large.

    Attributes:
        ranks: its first rank, and the one after its last.
        groups: two or more, in order; none for a single rank.
        is_local: all of its ranks are on one node.
    """

    ranks: Span
    groups: tuple[GroupShape, ...] = ()
    is_local: bool = True

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.ranks[1] - self.ranks[0]


@dataclass(frozen=True)
class PlannedMessage:
    """A message, from or to one other rank.

    Attributes:
        rank: the other one.
        first, last: elements of the bucket.
        parts: subtrees whose sums of these elements are sent, one after the other.
    """

    rank: int
    first: int
    last: int
    parts: tuple[Span, ...]

    @property
    def elements(self) -> int:
        """Return how many are sent."""
        return (self.last - self.first) * len(self.parts)


@dataclass(frozen=True)
class ExchangeRound:
    """Messages sent at the same time, and the additions after their arrival.

    Attributes:
        sends, receives: at most one to, and from, each rank.
        additions: (left, right, total) of the subtrees, in order; none if we keep no elements.
        first, last: elements whose sums this rank holds afterwards.
        is_local: all of it is among the ranks of one node.
        depth: in how many larger groups the joined one is; distinguishes messages of two ranks.
    """

    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]
    additions: tuple[tuple[Span, Span, Span], ...]
    first: int
    last: int
    is_local: bool
    depth: int


@dataclass(frozen=True)
class ExchangePlan:
    """The rounds of one rank for one bucket.

    Attributes:
        reduce: rounds after which we hold the total of a slice.
        gather: rounds after which we hold all of it.
        first, last: elements whose total we have in between.
    """

    reduce: tuple[ExchangeRound, ...]
    gather: tuple[ExchangeRound, ...]
    first: int
    last: int

    @property
    def elements_sent(self) -> int:
        """Return how many elements we send to others."""
        return sum(move.elements for one in (*self.reduce, *self.gather) for move in one.sends)


@dataclass(frozen=True)
class RowsRound:
    """A round in which a few numbers of each rank are passed on.

    Attributes:
        held: ranks whose numbers this rank has before, including its own.
        sends: ranks to which it sends all of those.
        receives: (sender, ranks whose numbers it sends).
    """

    held: Span
    sends: tuple[int, ...]
    receives: tuple[tuple[int, Span], ...]


def bucket_bytes_for(world_size: int) -> int:
    """Return the size of buckets for which a rank's slice has at least `MESSAGE_BYTES`.

    It grows by doubling, so that few changes of the group change it.
    """
    size = BUCKET_BYTES
    while size < world_size * MESSAGE_BYTES:
        size *= 2
    return size


def shape_of(
    nodes: Sequence[int], num_slots: int | None = None, *, at_once: int = AT_ONCE
) -> GroupShape:
    """Return how a group is joined: the ranks of each node at once, nodes by halves.

    Halves are of the slots, not of the present nodes: a lost node leaves a hole, and does not move
    the middle.

    Args:
        nodes: the slot of each rank's node, ascending by rank.
        num_slots: how many slots there are, holes at the end included; None for no such holes.
        at_once: nodes that are joined in one round.
    """
    check(
        len(nodes) > 0 and nodes[0] >= 0 and all(a <= b for a, b in pairwise(nodes)),
        f"slots of nodes by rank, expected in ascending order: {list(nodes)[:20]}",
    )
    return _shape_of(tuple(nodes), num_slots or nodes[-1] + 1, at_once)


@lru_cache(maxsize=64)
def flat_shape(world_size: int) -> GroupShape:
    """Return the shape of a group whose ranks are all joined at once, wherever they are."""
    if world_size == 1:
        return GroupShape((0, 1))
    ranks = tuple(GroupShape((rank, rank + 1)) for rank in range(world_size))
    return GroupShape((0, world_size), ranks, is_local=False)


@lru_cache(maxsize=8)
def _shape_of(nodes: tuple[int, ...], num_slots: int, at_once: int) -> GroupShape:
    starts = [rank for rank, node in enumerate(nodes) if not rank or node != nodes[rank - 1]]
    ends = [*starts[1:], len(nodes)]
    locals_ = [_node_shape((first, last)) for first, last in zip(starts, ends, strict=True)]
    slots = [nodes[first] for first in starts]

    def join(low: int, high: int, a: int, b: int) -> GroupShape:
        """Return the shape of nodes low to high, which have slots a to b."""
        ranks = locals_[low].ranks[0], locals_[high - 1].ranks[1]
        if high - low == 1:
            return locals_[low]
        if b - a <= at_once or high - low == 2:
            return GroupShape(ranks, tuple(locals_[low:high]), is_local=False)
        slot = (a + b) // 2
        middle = next((n for n in range(low, high) if slots[n] >= slot), high)
        if not low < middle < high:  # One half is empty.
            return join(low, high, *((slot, b) if middle == low else (a, slot)))
        if 3 * min(middle - low, high - middle) < high - low:
            # Mostly holes on one side: the few nodes there would have to send to all others.
            middle = (low + high) // 2
            slot = slots[middle]
        return GroupShape(ranks, (join(low, middle, a, slot), join(middle, high, slot, b)), False)

    return join(0, len(locals_), 0, num_slots)


def _node_shape(ranks: Span) -> GroupShape:
    if ranks[1] - ranks[0] == 1:
        return GroupShape(ranks)
    return GroupShape(ranks, tuple(GroupShape((rank, rank + 1)) for rank in range(*ranks)))


@lru_cache(maxsize=4096)
def _owners(shape: GroupShape) -> tuple[int, ...]:
    """Return the ranks of a group in the order of their slices.

    Ranks whose slices have the same place in their groups are adjacent, so that each keeps as much
    as possible of what it holds.
    """
    if not shape.groups:
        return (shape.ranks[0],)
    placed = [
        (Fraction(2 * place + 1, group.world_size), rank)
        for group in shape.groups
        for place, rank in enumerate(_owners(group))
    ]
    return tuple(rank for _, rank in sorted(placed))


@lru_cache(maxsize=4096)
def _places(shape: GroupShape) -> dict[int, int]:
    """Return which slice of a group each of its ranks owns."""
    return {rank: place for place, rank in enumerate(_owners(shape))}


@dataclass(frozen=True)
class _Cuts:
    """Boundaries of slices: at whole blocks, so that different cuts leave no tiny pieces."""

    size: int
    blocks: int

    def slice(self, place: int, slices: int) -> Span:
        first = self.blocks * place // slices
        last = self.blocks * (place + 1) // slices
        return self.size * first // self.blocks, self.size * last // self.blocks


@lru_cache(maxsize=1024)
def tree_plan(
    rank: int, num_micro_batches: int, shape: GroupShape, size: int, grain: int
) -> ExchangePlan:
    """Return what a rank does in an exchange by slices.

    Args:
        rank: ours.
        num_micro_batches: V, at least the ranks of the group.
        shape: of the whole group.
        size: elements of the bucket.
        grain: least number of elements that a message should have.
    """
    world = shape.world_size
    cuts = _Cuts(size, max(world, size // grain))
    held, reduce = (0, size), []
    joins = list(_joins_of(rank, shape))
    for index, group in enumerate(joins):
        depth = len(joins) - 1 - index
        reduce.append(_join(rank, num_micro_batches, world, group, cuts, depth))
        held = reduce[-1].first, reduce[-1].last
    whole = ((0, num_micro_batches),)
    gather, before = [], [(0, size), *((one.first, one.last) for one in reduce)]
    for one, (first, last) in zip(reversed(reduce), reversed(before[:-1]), strict=True):
        gather.append(
            ExchangeRound(
                sends=tuple(PlannedMessage(m.rank, m.first, m.last, whole) for m in one.receives),
                receives=tuple(PlannedMessage(m.rank, m.first, m.last, whole) for m in one.sends),
                additions=(),
                first=first,
                last=last,
                is_local=one.is_local,
                depth=one.depth,
            )
        )
    return ExchangePlan(tuple(reduce), tuple(gather), *held)


@lru_cache(maxsize=1024)
def whole_plan(rank: int, world_size: int, num_micro_batches: int, size: int) -> ExchangePlan:
    """Return what a rank does in an exchange of a small bucket: an all-to-all of whole buckets.

    Args:
        rank: ours.
        world_size: W.
        num_micro_batches: V.
        size: elements of the bucket.
    """
    if world_size == 1:
        return ExchangePlan((), (), 0, size)
    parts = [_parts((one, one + 1), num_micro_batches, world_size) for one in range(world_size)]
    others = [one for one in range(world_size) if one != rank]
    once = ExchangeRound(
        sends=tuple(PlannedMessage(one, 0, size, parts[rank]) for one in others),
        receives=tuple(PlannedMessage(one, 0, size, parts[one]) for one in others),
        additions=_additions(((0, num_micro_batches),), [p for some in parts for p in some]),
        first=0,
        last=size,
        is_local=False,
        depth=0,
    )
    return ExchangePlan((once,), (), 0, size)


def rows_plan(rank: int, shape: GroupShape) -> tuple[RowsRound, ...]:
    """Return the rounds of an all-gather of a few numbers per rank, over the same edges.

    Args:
        rank: ours.
        shape: of the whole group.
    """
    rounds = []
    for group in _joins_of(rank, shape):
        mine = _group_with(rank, group)
        place, size = _places(mine)[rank], mine.world_size
        others = [one for one in group.groups if one is not mine]
        rounds.append(
            RowsRound(
                held=mine.ranks,
                sends=tuple(
                    other
                    for one in others
                    for index, other in enumerate(_owners(one))
                    if index * size // one.world_size == place
                ),
                receives=tuple(
                    (_owners(one)[place * one.world_size // size], one.ranks) for one in others
                ),
            )
        )
    return tuple(rounds)


def partners(plan: ExchangePlan) -> frozenset[int]:
    """Return the ranks that we send to or receive from."""
    rounds = (*plan.reduce, *plan.gather)
    return frozenset(move.rank for one in rounds for move in (*one.sends, *one.receives))


def _joins_of(rank: int, shape: GroupShape) -> Iterator[GroupShape]:
    """Yield the groups that contain a rank, smallest first."""
    if shape.groups:
        yield from _joins_of(rank, _group_with(rank, shape))
        yield shape


def _group_with(rank: int, shape: GroupShape) -> GroupShape:
    return next(one for one in shape.groups if one.ranks[0] <= rank < one.ranks[1])


def _join(
    rank: int, num_micro_batches: int, world: int, group: GroupShape, cuts: _Cuts, depth: int
) -> ExchangeRound:
    mine, slices = _group_with(rank, group), group.world_size
    held = cuts.slice(_places(mine)[rank], mine.world_size)
    kept = cuts.slice(_places(group)[rank], slices)
    parts = {one.ranks: _parts(one.ranks, num_micro_batches, world) for one in group.groups}
    sends = [
        PlannedMessage(_owners(group)[place], first, last, parts[mine.ranks])
        for place, first, last in _overlaps(
            held, _places(mine)[rank], mine.world_size, slices, cuts
        )
    ]
    receives = [
        PlannedMessage(_owners(one)[place], first, last, parts[one.ranks])
        for one in group.groups
        for place, first, last in _overlaps(
            kept, _places(group)[rank], slices, one.world_size, cuts
        )
    ]
    known = [part for one in group.groups for part in parts[one.ranks]]
    return ExchangeRound(
        sends=tuple(move for move in sends if move.rank != rank),
        receives=tuple(move for move in receives if move.rank != rank),
        additions=(
            _additions(_parts(group.ranks, num_micro_batches, world), known)
            if kept[0] < kept[1]
            else ()
        ),
        first=kept[0],
        last=kept[1],
        is_local=group.is_local,
        depth=depth,
    )


def _overlaps(
    held: Span, place: int, slices: int, others: int, cuts: _Cuts
) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first, last) of those of `others` slices that have a part of `held`."""
    low, high = place * others // slices - 1, -(-(place + 1) * others // slices) + 1
    for other in range(max(0, low), min(others, high)):
        first, last = cuts.slice(other, others)
        first, last = max(first, held[0]), min(last, held[1])
        if first < last:
            yield other, first, last


@lru_cache(maxsize=8192)
def _parts(ranks: Span, num_micro_batches: int, world_size: int) -> tuple[Span, ...]:
    """Return the subtrees whose sums these ranks can make of their micro-batches."""
    first = deal(ranks[0], world_size, num_micro_batches)[0]
    last = deal(ranks[1] - 1, world_size, num_micro_batches)[1]
    return subtrees((first, last), num_micro_batches)


def _additions(trees: Sequence[Span], parts: Sequence[Span]) -> tuple[tuple[Span, Span, Span], ...]:
    return tuple((one.left, one.right, one.total) for one in additions_to(trees, parts))

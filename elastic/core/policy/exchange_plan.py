"""The plan of an all-reduce: which rank sends which slices of which subtree sums to which rank.

The order of addition is the tree's over the V micro-batches (see `microbatch`), and need not be
done by one rank per slice. Ranks hold contiguous micro-batches. Groups of ranks are joined
repeatedly, the ranks of a node first. Before a join each group holds the sums of its own subtrees,
cut into a slice for each of its ranks; the join cuts them into the slices of the larger group, and
adds siblings as they meet. At the top each rank holds a slice of the total; the gather distributes
it back over the same edges. With two groups in each join this is recursive halving, for any W and
in the tree's order; with all ranks in one join it is an all-to-all.

Where a slice lies follows from its rank's place in a tree of nodes that lacks none: halves again
and again. What a lacking rank would own goes to another one on each level, so that nobody meets
the partners of two, groups of different sizes have few in each other, and a node less at the end
changes few (docs/explain/exchange.md counts them).

Rule: a plan is a function of (V, the node of each rank, size), the same on all ranks. Neither the
shape nor the slices are part of the result: every plan gives the plain tree's bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

from elastic.core.policy.microbatch import Span, additions_to, deal, split, subtrees

AT_ONCE = 8
"""Nodes joined in one round: as many bytes as with halving, in fewer rounds. Also how many times
larger than a group these may be: so many partners has each rank of the smaller one."""
LARGER = 3
"""How many times larger than a group the one on its left may be otherwise. When a node is lost, the
partners of its ranks become those of others, so many for each of them."""
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


def shape_of(nodes: Sequence[int], *, at_once: int = AT_ONCE) -> GroupShape:
    """Return how a group is joined: the ranks of each node at once, then nodes as the tree is.

    Args:
        nodes: a number for each rank, the same for the ranks of one node, which are adjacent.
        at_once: see `AT_ONCE`.
    """
    starts = [rank for rank in range(len(nodes)) if not rank or nodes[rank] != nodes[rank - 1]]
    return _shape_of((*starts, len(nodes)), at_once)


@lru_cache(maxsize=64)
def flat_shape(world_size: int) -> GroupShape:
    """Return the shape of a group whose ranks are all joined at once, wherever they are."""
    return _at_once((0, world_size), is_local=False)


@lru_cache(maxsize=8)
def _shape_of(starts: tuple[int, ...], at_once: int) -> GroupShape:
    """Do so for nodes that begin at these ranks; the last number is that of all ranks."""

    def join(low: int, high: int) -> GroupShape:
        """Return the shape of nodes low to, not including, high."""
        ranks = first, last = starts[low], starts[high]
        if high - low == 1:
            return _at_once(ranks, is_local=True)
        sizes = {end - start for start, end in pairwise(starts[low : high + 1])}
        if high - low <= at_once and len(sizes) == 1:
            nodes = tuple(join(node, node + 1) for node in range(low, high))
            return GroupShape(ranks, nodes, is_local=False)
        middle = split((low, high))
        larger = at_once if middle - low <= at_once else LARGER
        if larger * (last - starts[middle]) < starts[middle] - first:
            # Each of the few on the right would have many partners.
            middle = max(low + 1, (low + middle) // 2)
        return GroupShape(ranks, (join(low, middle), join(middle, high)), is_local=False)

    return join(0, len(starts) - 1)


def _at_once(ranks: Span, *, is_local: bool) -> GroupShape:
    first, last = ranks
    if last - first == 1:
        return GroupShape(ranks)
    each = tuple(GroupShape((rank, rank + 1)) for rank in range(first, last))
    return GroupShape(ranks, each, is_local)


@dataclass(frozen=True)
class _Slices:
    """Which rank of a group holds what after its join.

    Attributes:
        owners: ranks, in the order of their slices.
        ends: where their slices begin, from 0, and the end of the last one, which is the whole.
        place: of each rank in that order.
        homes: where their slices after the next join begin or, if shared, lie; the first at 0.
        grid: the end of the whole, as homes are counted.
    """

    owners: tuple[int, ...]
    ends: tuple[int, ...]
    place: dict[int, int]
    homes: tuple[int, ...]
    grid: int

    def of(self, rank: int) -> Span:
        return self.ends[self.place[rank]], self.ends[self.place[rank] + 1]

    def owner(self, end: int) -> int:
        """Return the rank whose slice begins there or has this within."""
        return self.owners[bisect_right(self.ends, end) - 1]


@lru_cache(maxsize=4096)
def _slices(shape: GroupShape, whole: int = 0) -> _Slices:
    """Return the slices of a group.

    What is between two homes of the groups is divided evenly among the ranks whose home is at its
    beginning: their new homes are in there, each in the part of its group. So no home depends on
    what other groups lack.

    Args:
        shape: of the group.
        whole: what ends are to be counted in parts of, a multiple of that of a group within it;
            0 for the least in which all are integers.
    """
    if whole:
        own = _slices(shape)
        factor = whole // own.ends[-1]
        return replace(own, ends=tuple(end * factor for end in own.ends))
    if not shape.groups:
        return _Slices((shape.ranks[0],), (0, 1), {shape.ranks[0]: 0}, (0,), 1)
    groups, turns = [_slices(group) for group in shape.groups], _turns(shape)
    # Seven ranks of a node hold sevenths; beside nodes of eight, their homes are at eighths.
    grid = max(one.grid for one in groups)
    at_home: dict[int, list[tuple[int, int]]] = {}
    for one, turn in zip(groups, turns, strict=False):
        for rank, home in zip(one.owners, one.homes, strict=True):
            at_home.setdefault(home * grid // one.grid, []).append((turn, rank))
    whole = lcm(*(grid * len(one) for one in at_home.values()), *(one.ends[-1] for one in groups))
    owners, ends, homes = [], [], []
    for begin, end in pairwise((*sorted(at_home), grid)):
        width = whole // grid * (end - begin) // len(at_home[begin])
        for index, (turn, rank) in enumerate(sorted(at_home[begin])):
            owners.append(rank)
            ends.append(whole // grid * begin + width * index)
            homes.append(begin * len(turns) + (end - begin) * turn * bool(index))
    place = {rank: place for place, rank in enumerate(owners)}
    return _Slices(tuple(owners), (*ends, whole), place, tuple(homes), grid * len(turns))


def _turns(shape: GroupShape) -> Sequence[int]:
    """Return which part of a common slice each group gets: for nodes, as if joined by twos."""
    if shape.is_local:
        return range(len(shape.groups))
    turns = [0]
    while len(turns) < len(shape.groups):
        turns = [2 * turn for turn in turns] + [2 * turn + 1 for turn in turns]
    return turns


@dataclass(frozen=True)
class _Cuts:
    """Boundaries of slices: at whole blocks, so that different cuts leave no tiny pieces."""

    size: int
    blocks: int

    def span(self, ends: Span, whole: int) -> Span:
        """Return the elements between two ends."""
        first, last = (self.size * (self.blocks * end // whole) // self.blocks for end in ends)
        return first, last

    def pieces(self, ends: Span, slices: _Slices) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, first, last) of the slices that have a part of what is between two ends."""
        whole = slices.ends[-1]
        first, last = self.span(ends, whole)
        for place in range(
            bisect_right(slices.ends, ends[0]) - 1, bisect_left(slices.ends, ends[1])
        ):
            low, high = self.span((slices.ends[place], slices.ends[place + 1]), whole)
            if max(low, first) < min(high, last):
                yield slices.owners[place], max(low, first), min(high, last)


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
    """Return the rounds of an all-gather of a few numbers per rank, over the same edges."""
    rounds = []
    for group in _joins_of(rank, shape):
        mine, kept = _group_with(rank, group), _slices(group)
        whole, (begins, _) = kept.ends[-1], kept.of(rank)
        first, last = _slices(mine, whole).of(rank)
        begin_here = kept.owners[bisect_left(kept.ends, first) : bisect_left(kept.ends, last)]
        rounds.append(
            RowsRound(
                held=mine.ranks,
                sends=tuple(one for one in begin_here if one not in range(*mine.ranks)),
                receives=tuple(
                    (_slices(one, whole).owner(begins), one.ranks)
                    for one in group.groups
                    if one is not mine
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
    mine, slices = _group_with(rank, group), _slices(group)
    whole = slices.ends[-1]
    kept = cuts.span(slices.of(rank), whole)
    parts = {one.ranks: _parts(one.ranks, num_micro_batches, world) for one in group.groups}
    sends = [
        PlannedMessage(*piece, parts[mine.ranks])
        for piece in cuts.pieces(_slices(mine, whole).of(rank), slices)
    ]
    receives = [
        PlannedMessage(*piece, parts[one.ranks])
        for one in group.groups
        for piece in cuts.pieces(slices.of(rank), _slices(one, whole))
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


@lru_cache(maxsize=8192)
def _parts(ranks: Span, num_micro_batches: int, world_size: int) -> tuple[Span, ...]:
    """Return the subtrees whose sums these ranks can make of their micro-batches."""
    first = deal(ranks[0], world_size, num_micro_batches)[0]
    last = deal(ranks[1] - 1, world_size, num_micro_batches)[1]
    return subtrees((first, last), num_micro_batches)


def _additions(trees: Sequence[Span], parts: Sequence[Span]) -> tuple[tuple[Span, Span, Span], ...]:
    return tuple((one.left, one.right, one.total) for one in additions_to(trees, parts))

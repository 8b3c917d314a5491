"""Which rank computes which micro-batches of a step, and in which order gradients are added.

Rule: the contents of a micro-batch depend on the run alone, its rank on the group alone, and the
sum of all of them on neither: it follows one binary tree over the V micro-batches, which every
group cuts into the subtrees that its ranks hold.

Adding floating point numbers in a fixed order is the idea of EasyScale (SC'23), which keeps as
many virtual ranks as there were at the start; here the order is the tree's, so that ranks add up
what they hold first, and any number of ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic.errors import ConfigError, check

Span = tuple[int, int]
"""Micro-batches from the first number up to, not including, the second."""


def deal(rank: int, world_size: int, num_micro_batches: int) -> Span:
    """Return the micro-batches of a step that a rank computes, as even as it goes.

    An even number of smaller shares comes first, then the larger ones, then the odd smaller one:
    V=8 on 3 ranks has one smaller share, so 3, 3 and 2. So where V is near W, a rank with two
    micro-batches has one subtree of the sum, and most of the groups that ranks are joined in for
    the exchange (see `exchange_plan`) have one, and send one sum instead of several. Spread over
    all ranks, the larger shares would leave hardly a group with a whole one.

    Args:
        rank: 0 to world_size - 1.
        world_size: 1 to `num_micro_batches`, dividing it or not.
        num_micro_batches: V, of the run.

    Raises:
        ConfigError: more ranks than micro-batches.
    """
    check_world_size(world_size, num_micro_batches)
    check(0 <= rank < world_size, f"rank {rank} of {world_size}")
    least, larger = divmod(num_micro_batches, world_size)
    smaller = world_size - larger
    before = smaller - smaller % 2
    first, last = (one * least + min(max(0, one - before), larger) for one in (rank, rank + 1))
    return first, last


def check_world_size(world_size: int, num_micro_batches: int) -> None:
    """Refuse a group in which a rank would have nothing to compute.

    Raises:
        ConfigError: more ranks than micro-batches.
    """
    if not 1 <= world_size <= num_micro_batches:
        raise ConfigError(
            f"{world_size} workers share {num_micro_batches} micro-batches of a step: expected 1 "
            f"to {num_micro_batches} workers; lower max_workers, or make the global batch a larger "
            f"multiple of the loader's batch_size (prepare_data_loader(..., global_batch_size=N))"
        )


def split(span: Span) -> int:
    """Return where the tree divides a span: its left part is the largest power of two below it."""
    first, last = span
    check(last - first >= 2, f"a span of {last - first} is not divided")
    return first + (1 << ((last - first - 1).bit_length() - 1))


def subtrees(held: Span, num_micro_batches: int) -> tuple[Span, ...]:
    """Return the largest subtrees that lie within what a rank holds, from left to right.

    A rank adds up each of them by itself. There are at most 2 * log2(V) of them.
    """
    return tuple(_within(held, (0, num_micro_batches)))


def _within(held: Span, tree: Span) -> Iterator[Span]:
    if held[0] <= tree[0] and tree[1] <= held[1]:
        yield tree
    elif held[0] < tree[1] and tree[0] < held[1]:
        middle = split(tree)
        yield from _within(held, (tree[0], middle))
        yield from _within(held, (middle, tree[1]))


@dataclass(frozen=True)
class Addition:
    """Add the sum of `right` to the sum of `left`; it is then the sum of both.

    The left one is always the first operand, although it makes no difference to IEEE addition.
    """

    left: Span
    right: Span

    @property
    def total(self) -> Span:
        """Return the span that the result stands for."""
        return self.left[0], self.right[1]


def additions_in(tree: Span) -> tuple[Addition, ...]:
    """Return the additions that make the sum of a subtree out of its leaves.

    In the order in which leaves come, one by one from the left: after each leaf all that can be
    added is added, so that at most log2 partial sums wait at a time.
    """
    if tree[1] - tree[0] == 1:
        return ()
    middle = split(tree)
    left, right = (tree[0], middle), (middle, tree[1])
    return (*additions_in(left), *additions_in(right), Addition(left, right))


def additions_to(trees: Iterable[Span], parts: Iterable[Span]) -> tuple[Addition, ...]:
    """Return the additions that make the sums of some subtrees out of those of others.

    Args:
        trees: subtrees to sum, from left to right.
        parts: subtrees with known sums; together they cover `trees`.
    """
    known = set(parts)

    def add(tree: Span) -> Iterator[Addition]:
        if tree in known:
            return
        check(tree[1] - tree[0] > 1, f"micro-batch {tree[0]} is held by no rank")
        middle = split(tree)
        yield from add((tree[0], middle))
        yield from add((middle, tree[1]))
        yield Addition((tree[0], middle), (middle, tree[1]))

    return tuple(one for tree in trees for one in add(tree))


def additions_over(parts: tuple[Span, ...], num_micro_batches: int) -> tuple[Addition, ...]:
    """Return the additions that make the sum of all V micro-batches out of these subtrees.

    Args:
        parts: the subtrees of all ranks, from left to right; together they are all of the tree.
        num_micro_batches: V, of the run.
    """
    return additions_to([(0, num_micro_batches)], parts)


def all_parts(world_size: int, num_micro_batches: int) -> tuple[tuple[Span, ...], ...]:
    """Return the subtrees that each rank of a group holds, by rank."""
    return tuple(
        subtrees(deal(rank, world_size, num_micro_batches), num_micro_batches)
        for rank in range(world_size)
    )

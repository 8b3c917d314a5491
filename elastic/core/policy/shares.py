"""Which worker copies or writes which part of a state: of replicated and of sharded tensors.

Rule: every row of every tensor belongs to exactly one part: a function of the tensors' shapes, of
how they are sharded, and of the number of parts alone. Parts of replicated tensors differ by at
most one row in size; of a sharded tensor each rank is responsible for rows that it holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.errors import check


@dataclass(frozen=True)
class TensorRows:
    """Rows of one tensor, along its first dimension.

    Attributes:
        tensor: its number in the state.
        first: the first of these rows.
        rows: how many; a tensor without dimensions has one.
    """

    tensor: int
    first: int
    rows: int


@dataclass(frozen=True)
class TensorExtent:
    """The size of a tensor.

    Attributes:
        rows: along its first dimension; 1 without dimensions.
        row_bytes: of each.
    """

    rows: int
    row_bytes: int


class RowRange(NamedTuple):
    """Some rows of a tensor, one after the other.

    Attributes:
        rows: how many, 0 or more.
    """

    first: int
    rows: int

    @property
    def end(self) -> int:
        return self.first + self.rows

    def with_both(self, other: RowRange) -> RowRange:
        """Return the rows that are in both; none begin where the later one does."""
        first = max(self.first, other.first)
        return RowRange(first, max(0, min(self.end, other.end) - first))


Spread = tuple[RowRange, ...]
"""The rows of a sharded tensor that each rank is responsible for, by rank: all rows, each once."""


def chunk(rows: int, parts: int, part: int) -> RowRange:
    """Return one part of so many rows, as `torch.chunk` cuts them: all but the last are alike.

    The last ones may be smaller, or have no rows at all.
    """
    check(0 <= part < parts, f"part {part} of {parts}")
    size = -(-rows // parts)
    first = min(rows, part * size)
    return RowRange(first, min(rows, first + size) - first)


def merged(parts: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Return the same rows in as few stretches as possible, in order; empty ones are left out."""
    found: list[RowRange] = []
    for part in sorted(one for one in parts if one.rows):
        if found and part.first <= found[-1].end:
            last = found.pop()
            part = RowRange(last.first, max(last.end, part.end) - last.first)
        found.append(part)
    return tuple(found)


def cover(held: list[RowRange], more: RowRange) -> bool:
    """Add rows to those that are held; return whether any of them is new.

    Args:
        held: as `merged` returns them; changed in place, in the time of a search.
        more: the rows to add.
    """
    if not more.rows:
        return False
    first = bisect_left(held, more.first, key=lambda one: one.end)
    last = bisect_right(held, more.end, lo=first, key=lambda one: one.first)
    beside = held[first:last]
    if len(beside) == 1 and beside[0].first <= more.first and more.end <= beside[0].end:
        return False
    low = min([more.first, *(one.first for one in beside)])
    high = max([more.end, *(one.end for one in beside)])
    held[first:last] = [RowRange(low, high - low)]
    return True


def share_of(
    extents: Sequence[TensorExtent],
    spreads: Sequence[Spread | None],
    *,
    rank: int,
    part: int,
    parts: int,
) -> tuple[TensorRows, ...]:
    """Return what one worker copies or writes of a state, in the order of its tensors.

    Args:
        extents: of all tensors.
        spreads: of all tensors; None for those that every member has whole.
        rank: whose rows of the sharded tensors are meant.
        part: 0 to parts - 1: the part of the others, see `cut`.
        parts: >= 1.
    """
    whole = [number for number, spread in enumerate(spreads) if spread is None]
    pieces = [
        replace(piece, tensor=whole[piece.tensor])
        for piece in cut([extents[number] for number in whole], part, parts)
    ]
    for number, spread in enumerate(spreads):
        # One part has to list a tensor without rows.
        if spread is not None and (spread[rank].rows or (not extents[number].rows and not rank)):
            pieces.append(TensorRows(number, *spread[rank]))
    return tuple(sorted(pieces, key=lambda piece: piece.tensor))


def cut(extents: Sequence[TensorExtent], part: int, parts: int) -> tuple[TensorRows, ...]:
    """Return one part of a state, in the order of its tensors.

    The state's bytes are laid end to end and cut evenly; a row belongs where it begins. Tensors
    without bytes are the first part's.

    Args:
        extents: of all tensors.
        part: 0 to parts - 1.
        parts: >= 1.
    """
    check(0 <= part < parts, f"part {part} of {parts}")
    total = sum(extent.rows * extent.row_bytes for extent in extents)
    # Part p begins at ceil(p * total / parts).
    low, high = (-(-number * total // parts) for number in (part, part + 1))
    pieces, base = [], 0
    for number, extent in enumerate(extents):
        if not extent.rows * extent.row_bytes:
            if part == 0:
                pieces.append(TensorRows(number, 0, extent.rows))
            continue
        first, last = (_row_from(at - base, extent) for at in (low, high))
        if last > first:
            pieces.append(TensorRows(number, first, last - first))
        base += extent.rows * extent.row_bytes
    return tuple(pieces)


def _row_from(offset: int, extent: TensorExtent) -> int:
    """Return the first row that begins at an offset into its tensor, or behind it."""
    return min(extent.rows, max(0, -(-offset // extent.row_bytes)))


class RowSources:
    """Which rank provides which rows of a tensor: the taker itself, else the first that has them.

    The sources are determined once for all takers, so that a group of many nodes does not search
    all of them for each.
    """

    def __init__(
        self, held: Sequence[tuple[int, Sequence[RowRange]]], wanted: Iterable[RowRange]
    ) -> None:
        """Assign the rows to sources.

        Args:
            held: (rank, rows that it has), possibly several for one rank, in order of preference.
            wanted: the rows that any rank needs.
        """
        self._held = held
        self._own: dict[int, list[int]] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        requested = [one for one in wanted if one.rows]
        low, high = (
            min((r.first for r in requested), default=0),
            max((r.end for r in requested), default=0),
        )
        left = [RowRange(low, high - low)] if requested else []
        found = []
        for number, (rank, stretches) in enumerate(held):
            self._own.setdefault(rank, []).append(number)
            for at, stretch in enumerate(stretches) if left else ():
                for part in _take(left, stretch):
                    found.append((part, number, at))
                    span = self._spans.get(rank, (part.first, part.end))
                    self._spans[rank] = min(span[0], part.first), max(span[1], part.end)
        self._found = sorted(found)

    def may_give(self, rank: int, wanted: RowRange) -> bool:
        """Return whether a rank may have to provide some of the rows to another one."""
        low, high = self._spans.get(rank, (0, 0))
        return low < wanted.end and wanted.first < high

    def of(self, taker: int, wanted: RowRange) -> tuple[tuple[int, RowRange], ...]:
        """Return (index in `held`, rows) for these rows; fewer if some are held by no rank."""
        left = [wanted] if wanted.rows else []
        given = [
            (number, part)
            for number in self._own.get(taker, ())
            for stretch in self._held[number][1]
            for part in _take(left, stretch)
        ]
        others = []
        for need in left:
            first = bisect_right(self._found, need.first, key=lambda one: one[0].end)
            for index in range(first, len(self._found)):
                part, number, at = self._found[index]
                if part.first >= need.end:
                    break
                others.append((number, at, need.with_both(part)))
        return (*given, *((number, part) for number, _, part in sorted(others)))


def _take(left: list[RowRange], stretch: RowRange) -> list[RowRange]:
    """Remove the rows of a stretch from those that are left, and return them.

    Args:
        left: in order, with gaps; changed in place, in the time of a search.
        stretch: any rows.
    """
    if not stretch.rows:
        return []
    first = bisect_right(left, stretch.first, key=lambda one: one.end)
    last = bisect_left(left, stretch.end, lo=first, key=lambda one: one.first)
    if first == last:
        return []
    taken = [one.with_both(stretch) for one in left[first:last]]
    low, high = left[first].first, left[last - 1].end
    around = RowRange(low, taken[0].first - low), RowRange(taken[-1].end, high - taken[-1].end)
    left[first:last] = [one for one in around if one.rows]
    return taken

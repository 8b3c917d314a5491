"""Who copies, or writes, which part of a state: of tensors that all have, and of sharded ones.

Rule: every row of every tensor is somebody's, once: a function of the tensors' shapes, of how they
are sharded, and of the number of parts alone. Parts of what all members have differ by at most one
row in size; of a sharded tensor each answers for rows that it holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.errors import check


@dataclass(frozen=True)
class Piece:
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
class Extent:
    """How large a tensor is.

    Attributes:
        rows: along its first dimension; 1 without dimensions.
        row_bytes: of each.
    """

    rows: int
    row_bytes: int


class Rows(NamedTuple):
    """Some rows of a tensor, one after the other.

    Attributes:
        first: of them.
        rows: how many, 0 or more.
    """

    first: int
    rows: int

    @property
    def end(self) -> int:
        """Return the row behind the last one."""
        return self.first + self.rows

    def with_both(self, other: Rows) -> Rows:
        """Return the rows that are in both; none begin where the later one does."""
        first = max(self.first, other.first)
        return Rows(first, max(0, min(self.end, other.end) - first))


Spread = tuple[Rows, ...]
"""The rows of a sharded tensor that each rank answers for, by rank: all rows, each once."""


def chunk(rows: int, parts: int, part: int) -> Rows:
    """Return one part of so many rows, as `torch.chunk` cuts them: all but the last are alike.

    The last ones may be smaller, or have no rows at all.
    """
    check(0 <= part < parts, f"part {part} of {parts}")
    size = -(-rows // parts)
    first = min(rows, part * size)
    return Rows(first, min(rows, first + size) - first)


def merged(parts: Iterable[Rows]) -> tuple[Rows, ...]:
    """Return the same rows in as few stretches as possible, in order; empty ones are left out."""
    found: list[Rows] = []
    for part in sorted(one for one in parts if one.rows):
        if found and part.first <= found[-1].end:
            last = found.pop()
            part = Rows(last.first, max(last.end, part.end) - last.first)
        found.append(part)
    return tuple(found)


def cover(held: list[Rows], more: Rows) -> bool:
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
    held[first:last] = [Rows(low, high - low)]
    return True


def share_of(
    extents: Sequence[Extent], spreads: Sequence[Spread | None], *, rank: int, part: int, parts: int
) -> tuple[Piece, ...]:
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
        # Somebody has to say that a tensor without rows is there.
        if spread is not None and (spread[rank].rows or (not extents[number].rows and not rank)):
            pieces.append(Piece(number, *spread[rank]))
    return tuple(sorted(pieces, key=lambda piece: piece.tensor))


def cut(extents: Sequence[Extent], part: int, parts: int) -> tuple[Piece, ...]:
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
                pieces.append(Piece(number, 0, extent.rows))
            continue
        first, last = (_row_from(at - base, extent) for at in (low, high))
        if last > first:
            pieces.append(Piece(number, first, last - first))
        base += extent.rows * extent.row_bytes
    return tuple(pieces)


def _row_from(offset: int, extent: Extent) -> int:
    """Return the first row that begins at an offset into its tensor, or behind it."""
    return min(extent.rows, max(0, -(-offset // extent.row_bytes)))


def givers(
    wanted: Rows, held: Sequence[tuple[int, Sequence[Rows]]]
) -> tuple[tuple[int, Rows], ...]:
    """Return who gives which of the wanted rows, or fewer of them if nobody has the others.

    Args:
        wanted: rows of a tensor.
        held: (rank, rows that it has) in the order in which they are to be asked.
    """
    given: list[tuple[int, Rows]] = []
    left = [wanted] if wanted.rows else []
    for rank, stretches in held:
        if not left:
            break
        for stretch in stretches:
            still: list[Rows] = []
            for need in left:
                both = need.with_both(stretch)
                if not both.rows:
                    still.append(need)
                    continue
                given.append((rank, both))
                around = (
                    Rows(need.first, both.first - need.first),
                    Rows(both.end, need.end - both.end),
                )
                still += [one for one in around if one.rows]
            left = still
    return tuple(given)

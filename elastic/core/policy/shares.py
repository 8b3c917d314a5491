"""Who copies, or writes, which part of a state that all members have.

Rule: every row of every tensor is somebody's, once, and parts differ by at most one row in size:
a function of the tensors' shapes and the number of parts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

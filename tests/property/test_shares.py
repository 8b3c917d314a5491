"""How a state that all members have is cut: each row once, evenly, whatever the tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.shares import TensorExtent, cut

EXTENTS = st.lists(st.builds(TensorExtent, st.integers(0, 40), st.integers(0, 64)), max_size=12)


@given(EXTENTS, st.integers(1, 9))
def test_every_row_is_in_one_part(extents: list[TensorExtent], parts: int) -> None:
    rows = [
        (piece.tensor, row)
        for part in range(parts)
        for piece in cut(extents, part, parts)
        for row in range(piece.first, piece.first + piece.rows)
    ]
    expected = [(n, row) for n, extent in enumerate(extents) for row in range(extent.rows)]
    assert sorted(rows) == expected


@given(EXTENTS, st.integers(1, 9))
def test_every_tensor_is_somebodys(extents: list[TensorExtent], parts: int) -> None:
    """Also one without rows: a reader must know that it is there."""
    found = {piece.tensor for part in range(parts) for piece in cut(extents, part, parts)}
    assert found == set(range(len(extents)))


@given(EXTENTS, st.integers(1, 9))
def test_parts_are_even(extents: list[TensorExtent], parts: int) -> None:
    sizes = [
        sum(piece.rows * extents[piece.tensor].row_bytes for piece in cut(extents, part, parts))
        for part in range(parts)
    ]
    largest = max((extent.row_bytes for extent in extents), default=0)
    assert max(sizes) - min(sizes) <= 2 * largest

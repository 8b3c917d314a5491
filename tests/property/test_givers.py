"""Who gives which rows to whom, against one that asks everybody for each taker."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.shares import RowRange, RowSources, chunk

ROWS = st.builds(RowRange, st.integers(0, 20), st.integers(0, 9))
Held = list[tuple[int, list[RowRange]]]
HELD = st.lists(st.tuples(st.integers(0, 5), st.lists(ROWS, max_size=4)), max_size=6)
WANTED = st.lists(ROWS, min_size=1, max_size=6)


@given(HELD, WANTED)
def test_the_same_rows_are_given_in_the_same_order(held: Held, wanted: list[RowRange]) -> None:
    """Both ends of a connection find the order of what goes over it by themselves."""
    givers = RowSources(held, wanted)
    for taker, rows in enumerate(wanted):
        expected = asking_all(taker, rows, held)
        assert givers.of(taker, rows) == expected
        for rank in range(6):
            gives = any(held[number][0] == rank != taker for number, _ in expected)
            assert givers.may_give(rank, rows) or not gives


@given(HELD, WANTED)
def test_whatever_somebody_has_is_given_once(held: Held, wanted: list[RowRange]) -> None:
    givers = RowSources(held, wanted)
    there = {n for _, many in held for one in many for n in range(one.first, one.end)}
    for taker, rows in enumerate(wanted):
        given_rows = givers.of(taker, rows)
        numbers = [n for _, one in given_rows for n in range(one.first, one.end)]
        assert sorted(numbers) == sorted(there & set(range(rows.first, rows.end)))
        for number, one in given_rows:
            assert any(stretch.with_both(one) == one for stretch in held[number][1])


def test_of_many_nodes_each_looks_at_its_neighbours_alone() -> None:
    size, rows = 1000, 999 * 1000
    held = [(rank, [chunk(rows, size, rank)]) for rank in range(size)]
    wanted = [chunk(rows, size - 1, rank) for rank in range(size - 1)]
    givers = RowSources(held, wanted)
    for taker, taken in enumerate(wanted):
        assert [held[number][0] for number, _ in givers.of(taker, taken)] == [taker, taker + 1]
    assert sum(givers.may_give(500, taken) for taken in wanted) == 2


def asking_all(taker: int, wanted: RowRange, held: Held) -> tuple[tuple[int, RowRange], ...]:
    """Ask first what the taker has itself, then the others in their order."""
    given_rows: list[tuple[int, RowRange]] = []
    left = [wanted] if wanted.rows else []
    for number, (_, stretches) in sorted(enumerate(held), key=lambda one: one[1][0] != taker):
        for stretch in stretches:
            given_rows += [(number, both) for one in left if (both := one.with_both(stretch)).rows]
            left = [rest for one in left for rest in without(one, stretch)]
    return tuple(given_rows)


def without(rows: RowRange, stretch: RowRange) -> Sequence[RowRange]:
    both = rows.with_both(stretch)
    if not both.rows:
        return [rows]
    around = RowRange(rows.first, both.first - rows.first), RowRange(both.end, rows.end - both.end)
    return [one for one in around if one.rows]

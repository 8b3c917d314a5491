"""Who together has all rows of a snapshot, against one that looks at all rows each time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.shares import RowRange, cover, merged
from elastic.worker.engine.sharded_choice import (
    SnapshotInfo,
    SnapshotKey,
    SnapshotOffer,
    SnapshotSource,
    Stretches,
    sources_of,
)

KEY = SnapshotKey(5, 1, 2, 7)
ROWS = st.builds(RowRange, st.integers(0, 9), st.integers(0, 5))
STRETCHES = st.dictionaries(
    st.integers(0, 2), st.tuples(st.sampled_from([0, 6, 9]), st.lists(ROWS, max_size=3).map(tuple))
)
OFFERS = st.lists(
    st.builds(
        SnapshotOffer,
        st.just(KEY),
        st.sampled_from("abc"),
        st.sampled_from(["x:1", "y:1"]),
        STRETCHES,
    ),
    max_size=5,
).map(tuple)
TOLD = st.lists(
    st.builds(
        SnapshotInfo,
        st.dictionaries(st.sampled_from([KEY, KEY._replace(number=3)]), STRETCHES),
        st.none(),
        OFFERS,
    ),
    max_size=4,
)


@given(st.lists(ROWS, max_size=12))
def test_rows_that_are_added_one_by_one_are_those_that_are_merged_at_once(
    rows: list[RowRange],
) -> None:
    held: list[RowRange] = []
    for number, one in enumerate(rows):
        is_new = cover(held, one)
        assert is_new == (merged(rows[: number + 1]) != merged(rows[:number]))
        assert tuple(held) == merged(rows[: number + 1])


@given(TOLD, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_the_same_sources_are_found_as_by_who_looks_at_all_each_time(
    told: list[SnapshotInfo], failed: set[tuple[int, int]]
) -> None:
    """Also of rows that overlap, that are none, or that nobody could have."""
    assert sources_of(KEY, told, failed) == checking_at_all(told, failed)


def checking_at_all(
    told: Sequence[SnapshotInfo], failed: set[tuple[int, int]]
) -> list[SnapshotSource]:
    found = [
        SnapshotSource(rank, -1, one.snapshots[KEY])
        for rank, one in enumerate(told)
        if KEY in one.snapshots
    ]
    offered = sorted(
        (offer.source, offer.address, rank, number)
        for rank, one in enumerate(told)
        for number, offer in enumerate(one.offers)
        if offer.key == KEY and (rank, number) not in failed
    )
    for _, _, rank, number in offered:
        if is_complete(found):
            break
        more = SnapshotSource(rank, number, told[rank].offers[number].stretches)
        if not found or covered([*found, more]) != covered(found):
            found.append(more)
    return found if is_complete(found) else []


def covered(sources: Sequence[SnapshotSource]) -> Stretches:
    totals = sources[0].stretches if sources else {}
    return {
        number: (total, merged(r for s in sources for r in s.stretches.get(number, (0, ()))[1]))
        for number, (total, _) in totals.items()
    }


def is_complete(sources: Sequence[SnapshotSource]) -> bool:
    return bool(sources) and all(
        not total or found == (RowRange(0, total),) for total, found in covered(sources).values()
    )

"""The order of rows: each once in every epoch, the same at every world size, after any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.microbatch import deal
from elastic.data.lanes import (
    Lanes,
    batch_sizes,
    left_after,
    num_batches,
    places_of,
    share_of,
)
from elastic.data.nodes import Read, in_memory, table_of
from elastic.data.rows import LaneOrder, Rows
from elastic.data.sources import Memory
from elastic.data.table import Table
from elastic.worker.data.loader import MicroBatchLoader
from tests.effort import examples


@st.composite
def orders(draw: st.DrawFn) -> Lanes:
    blocks = draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    return Lanes(
        tuple(blocks),
        num_lanes=draw(st.integers(1, 6)),
        micro_batch_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**32)),
        window=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
    )


@settings(max_examples=examples(30), deadline=None)
@given(orders(), st.integers(0, 3))
def test_every_row_stands_once_in_an_epoch_and_in_the_window_that_is_read(
    lanes: Lanes, epoch: int
) -> None:
    order = lanes.of(epoch)
    found = order.find(np.arange(lanes.rows))
    begins = np.cumsum([0, *lanes.blocks[:-1]])
    assert sorted((begins[found.block] + found.row).tolist()) == list(range(lanes.rows))
    for place in range(lanes.rows):
        assert found.block[place] in order.windows_at(place)[0]
    # A rank reads what its lanes have, and one block more at each end of each.
    for lane in range(lanes.num_lanes):
        mine = np.unique(found.block[found.lane == lane])
        assert len(mine) <= -(-lanes.rows // lanes.num_lanes) + 2


TURNS = st.tuples(st.integers(1, 6), st.integers(1, 7), st.floats(0, 1))
"""World size, rows of a batch, and how much of what is left is read so."""


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 120), st.lists(TURNS, min_size=1, max_size=4))
def test_a_pass_by_rank_goes_on_at_another_world_size_with_each_row_once(
    rows: int, history: list[tuple[int, int, float]]
) -> None:
    left, seen = [(0, rows)], []
    for turn, (world, size, part) in enumerate(history):
        batches = num_batches(left, world, size)
        done = batches if turn == len(history) - 1 else int(part * batches)
        for rank in range(world):
            mine = share_of(left, rank, world)
            own = sum(stop - start for start, stop in mine)
            sizes = batch_sizes(own, batches, size)
            assert len(sizes) == batches
            assert max(sizes, default=0) <= size
            assert sum(sizes) == own
            assert 0 not in sizes[:own]  # Without gradients an empty one is passed over.
            if size > 1 and own:  # Others wait for nobody who has rows at all.
                assert min(sizes) > 0
            seen += places_of(mine, 0, sum(sizes[:done])).tolist()
        left = left_after(left, done, world, size)
    assert left == []
    assert sorted(seen) == list(range(rows))


def table_with(blocks: tuple[int, ...], shuffle: bool) -> Table:
    ids = np.arange(sum(blocks))
    ends = np.cumsum(blocks)
    batches = [{"id": part} for part in np.split(ids, ends[:-1])]
    (part,) = table_of(Read((), Memory("rows", batches=batches)), in_memory).parts
    # Too large to be shuffled as a whole.
    large = tuple(replace(block, size=2**30) for block in part.blocks)
    return Table((replace(part, blocks=large),), shuffle)


def ids_of(batch: Any) -> list[int]:
    return [int(one) for one in batch["id"]]


@settings(max_examples=examples(12), deadline=None)
@given(orders(), st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_steps_have_the_same_rows_whatever_the_group_was(lanes: Lanes, sizes: list[int]) -> None:
    rows = Rows(table_with(lanes.blocks, lanes.shuffle), lanes)

    def loader() -> MicroBatchLoader:
        inner = DataLoader(
            rows, batch_size=lanes.micro_batch_size, sampler=LaneOrder(rows), collate_fn=ids_of
        )
        return MicroBatchLoader(inner, num_micro_batches=lanes.num_lanes, seed=0)

    alone = loader()
    steps, v = alone.plan.steps, lanes.num_lanes
    expected: dict[tuple[int, int, int], list[int]] = {}
    alone.take_span(Cursor(), (0, v))
    for _ in range(2 * steps * v):
        batch = alone.next()
        if batch.count:
            key = (batch.cursor.epoch, batch.cursor.step, batch.number)
            expected[key] = batch.value
    for epoch in (0, 1):
        ids = [one for key, some in expected.items() if key[0] == epoch for one in some]
        assert sorted(ids) == list(range(lanes.rows))
    # A group that changes its size at every step.
    found: dict[tuple[int, int, int], list[int]] = {}
    for number in range(2 * steps):
        cursor, world = Cursor(*divmod(number, steps)), min(v, sizes[number % len(sizes)])
        for rank in range(world):
            member, held = loader(), deal(rank, world, v)
            member.take_span(cursor, held)
            for _ in range(*held):
                batch = member.next()
                if batch.count:
                    found[cursor.epoch, cursor.step, batch.number] = batch.value
    assert found == expected
    rows.close()

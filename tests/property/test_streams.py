"""Streams against a plain second reading: whatever happens to a group, the samples are the same."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.microbatch import deal
from elastic.core.policy.streams import StreamCut, StreamPlan, StreamPosition, nearest
from elastic.errors import UsageError
from elastic.worker.data.stream_book import StreamBook
from tests.effort import examples
from tests.unit.streams_under_test import (
    ByWorker,
    Numbers,
    Placed,
    Sharded,
    loader_of,
    steps_of,
    streams_of,
)

KINDS = [
    (Numbers, None),
    (ByWorker, StreamCut.WORKER),
    (ByWorker, None),
    (Sharded, None),
    (Placed, None),
    (Placed, StreamCut.COUNT),
]


class Member:
    """One rank: a loader, and what it knows."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        self.book = StreamBook()
        self.loader = loader_of(dataset, book=self.book, **options)

    def step(self, cursor: Cursor, rank: int, world_size: int) -> tuple[Any, dict[int, list[int]]]:
        """Take our micro-batches of a step; return our share and the ids of each."""
        found = {}
        share: Any = None
        held = deal(rank, world_size, self.loader.plan.num_micro_batches)
        for number in range(*held):
            batch = self.loader.next()
            assert (batch.cursor, batch.number) == (cursor, number)
            share = self.loader.share(batch, rank, world_size)
            found[number] = [int(one) for one in batch.value] if batch.count else []
        return share, found


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    v, micro = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind, cut = draw(st.sampled_from(KINDS))
    return {
        "v": v, "micro": micro, "kind": kind, "cut": cut, "drop_last": draw(st.booleans()),
        "size": draw(st.integers(1, 70)), "seed": draw(st.integers(0, 2**32)),
    }  # fmt: skip


@settings(deadline=None, max_examples=examples(60))
@given(run=runs())
def test_any_history_of_world_sizes_trains_with_the_same_samples(run: dict[str, Any]) -> None:
    """Members die, join, redo a step and share what they know, at random, over two epochs."""
    draw, v = random.Random(run["seed"]), run["v"]
    ids = list(range(run["size"]))
    options = {name: run[name] for name in ("micro", "v", "cut", "drop_last")}
    plan = steps_of(streams_of(ids, v), run["micro"], run["drop_last"])
    members: list[Member] = []
    for epoch in range(2):
        step, ends = 0, 0
        is_dealt = False
        while not ends:
            if not members or draw.random() < 0.3:
                members = draw.sample(members, draw.randint(0, len(members)))
                told = [one.book.sent(Cursor(epoch, step)) for one in members]
                while not members or (len(members) < v and draw.random() < 0.5):
                    members.append(Member(run["kind"](ids), **options))
                for one in members if draw.random() < 0.5 else ():
                    one.book.receive(told)
                draw.shuffle(members)
                is_dealt = False
            cursor, world_size = Cursor(epoch, step), len(members)
            if not is_dealt:
                for rank, one in enumerate(members):
                    one.loader.take_span(cursor, deal(rank, world_size, v))
            is_dealt = True
            try:
                done = [one.step(cursor, rank, world_size) for rank, one in enumerate(members)]
                rows = [share.own_row() for share, _ in done]
                assert len({share.take_rows(rows) for share, _ in done}) == 1
            except UsageError:
                assert not plan  # Not a single full step.
                return
            found = {number: some for _, part in done for number, some in part.items()}
            expected = [[1000 * epoch + one for one in some] for some in plan[step]]
            assert [found[number] for number in range(v)] == expected
            assert {one.loader.has_step(Cursor(epoch, step + 1)) for one in members} == {
                step + 1 < len(plan)
            }
            if draw.random() < 0.15 and step + 1 < len(plan):
                is_dealt = False  # It turned void: the same step once more.
                continue
            step += 1
            ends = members[0].loader.steps_of(epoch)
        assert step == ends == len(plan)
    for one in members:
        one.loader.close()


@given(
    v=st.integers(1, 8), micro=st.integers(1, 5), size=st.integers(0, 200),
    cut=st.sampled_from(StreamCut),
)  # fmt: skip
def test_places_cut_a_sequence_without_a_gap(v: int, micro: int, size: int, cut: StreamCut) -> None:
    streams = StreamPlan(micro_batch_size=micro, num_micro_batches=v, cut=cut)
    taken: dict[int, list[int]] = {}
    for step in range(size // (micro * v) + 2):
        for stream in range(v):
            places = streams.places(step, stream)
            assert len(places) == micro
            assert streams.reporting_place(step, stream) == streams.places(step + 1, stream)[0]
            assert places[0] >= streams.beginning(step)
            taken.setdefault(streams.sequence_of(stream), []).extend(places)
    assert len(taken) == (1 if cut is StreamCut.COUNT else v)
    for places in taken.values():
        assert sorted(places) == list(range(len(places)))


@given(
    known=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)), max_size=9),
    wanted=st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)),
)
def test_the_nearest_snapshot_is_the_last_one_that_is_not_behind(
    known: list[tuple[int, int, int]], wanted: tuple[int, int, int]
) -> None:
    index = nearest([StreamPosition(*one) for one in known], StreamPosition(*wanted))
    epoch, step, source = wanted
    fits = [one for one in known if one[0] == epoch and one[2] == source and one[1] <= step]
    assert (None if index is None else known[index]) == (max(fits) if fits else None)

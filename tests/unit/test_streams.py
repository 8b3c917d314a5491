"""Streams of a dataset that can only be iterated over: who reads what, from where, how often."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import datasets.distributed
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.streams import Cut, Streams
from elastic.errors import UsageError
from elastic.worker.loader import MicroBatchLoader
from elastic.worker.share import StreamShare
from elastic.worker.stream_book import StreamBook
from elastic.worker.stream_source import mark_of
from elastic.worker.streams import StreamLoader
from tests.unit.streams_under_test import (
    ByWorker,
    Forgetful,
    Noisy,
    Numbers,
    Placed,
    Sharded,
    V,
    loader_of,
    steps_of,
    streams_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
IDS = list(range(100))


def ids_of(value: Any) -> list[int]:
    value = value["id"] if isinstance(value, dict) else value
    return [int(one) for one in value]


def take(loader: StreamLoader, count: int) -> list[list[int]]:
    """Take micro-batches; a stand-in is an empty list."""
    batches = [loader.next() for _ in range(count)]
    return [ids_of(one.value) if one.count else [] for one in batches]


def reads(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "reads").read_text().split("\n")
    return [(int(number), int(pid)) for number, pid in (line.split() for line in lines if line)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dataset", "cut"),
    [
        (Numbers(IDS), None), (Sharded(IDS), None), (Placed(IDS), None), (Placed(IDS), Cut.COUNT),
        (ByWorker(IDS), Cut.WORKER), (ByWorker(IDS), None),
    ],
)  # fmt: skip
def test_every_cut_gives_each_stream_its_samples_in_any_process(
    dataset: Any, cut: Cut | None, num_workers: int
) -> None:
    loader = loader_of(dataset, cut=cut, num_workers=num_workers)
    rows = steps_of(streams_of(IDS), 2)
    try:
        loader.deal(Cursor(), (0, V))
        assert take(loader, V * len(rows)) == [one for row in rows for one in row]
        loader.deal(Cursor(0, 3), (1, 3))
        assert take(loader, 4) == [*rows[3][1:3], *rows[4][1:3]]
        loader.deal(Cursor(1, 0), (1, 4))
        assert take(loader, 3) == [[1000 + one for one in ids] for ids in rows[0][1:4]]
    finally:
        loader.close()


def test_behind_its_end_a_stream_gives_stand_ins_that_do_not_count() -> None:
    loader = loader_of(Sharded(list(range(9))))
    loader.deal(Cursor(), (1, 3))
    found = [loader.next() for _ in range(6)]
    assert [(one.count, one.more, ids_of(one.value)) for one in found] == [
        (2, False, [1, 5]), (2, False, [2, 6]), (0, False, [5, 5]),
        (0, False, [6, 6]), (0, False, [5, 5]), (0, False, [6, 6]),
    ]  # fmt: skip
    # A stream that never has a sample computes with another's.
    empty = loader_of(Sharded([7]))
    empty.deal(Cursor(), (2, 3))
    one = empty.next()
    assert (one.count, one.more, ids_of(one.value)) == (0, False, [7, 7])


def test_drop_last_tells_of_full_steps_only() -> None:
    loader = loader_of(Numbers(list(range(23))), drop_last=True)
    loader.deal(Cursor(), (0, V))
    assert [loader.next().more for _ in range(8)] == [True] * 7 + [False]


def test_an_empty_dataset_is_refused() -> None:
    for dataset in (Numbers([]), Sharded([])):
        loader = loader_of(dataset)
        loader.deal(Cursor(), (0, 2))
        with pytest.raises(UsageError, match=r"yields no sample in epoch 0.*at least 1"):
            loader.next()


# ------------------------------------------------------------------- processes


def test_each_stream_stays_in_its_process_and_nothing_is_read_twice(tmp_path: Path) -> None:
    loader = loader_of(Sharded(IDS * 4, tmp_path), num_workers=2)
    try:
        loader.deal(Cursor(), (0, V))
        take(loader, 6)
        for cursor, held in (
            (Cursor(0, 1), (1, 4)),
            (Cursor(0, 3), (1, 4)),
            (Cursor(0, 5), (2, 4)),
        ):
            loader.deal(cursor, held)
            take(loader, 5)
        found = reads(tmp_path)
        assert len({pid for _, pid in found}) == 2
        streams = {number % V: set() for number, _ in found}
        for number, pid in found:
            streams[number % V].add(pid)
        assert all(len(pids) == 1 for pids in streams.values())
        # Streams 2 and 3 were held all the time, over steps that were done again, too.
        kept = Counter(number for number, _ in found if number % V in (2, 3))
        assert set(kept.values()) == {1}
        assert all(psutil.pid_exists(pid) for _, pid in found)
    finally:
        loader.close()
    assert not any(psutil.pid_exists(pid) for _, pid in found)


def test_one_process_reads_what_is_one_sequence_once(tmp_path: Path) -> None:
    loader = loader_of(Numbers(IDS, tmp_path), num_workers=2)
    try:
        loader.deal(Cursor(), (0, 2))
        take(loader, 6)
        # A survivor takes over streams whose samples it has seen on the way.
        loader.deal(Cursor(0, 3), (0, 4))
        assert take(loader, 4) == steps_of(streams_of(IDS), 2)[3]
    finally:
        loader.close()
    found = reads(tmp_path)
    assert len({pid for _, pid in found}) == 1
    assert set(Counter(number for number, _ in found).values()) == {1}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_comes_out_and_reading_goes_on(
    tmp_path: Path, num_workers: int
) -> None:
    torn = tmp_path / "fails-9"
    torn.touch()
    loader = loader_of(Sharded(IDS, tmp_path), num_workers=num_workers)
    try:
        loader.deal(Cursor(), (0, V))
        rows = steps_of(streams_of(IDS), 2)
        assert take(loader, 1) == [rows[0][0]]
        # Whether there is a sample behind them is asked with the first two: number 9 is.
        for _ in range(2):
            with pytest.raises(ValueError, match="sample 9 is torn"):
                loader.next()
        torn.unlink()
        assert take(loader, 6) == [*rows[0][1:], *rows[1][:3]]
    finally:
        loader.close()


def test_what_is_random_depends_on_the_place_alone() -> None:
    def drawn(num_workers: int, deals: list[tuple[int, tuple[int, int]]]) -> dict[Any, Any]:
        loader = loader_of(Noisy(IDS), num_workers=num_workers)
        found: dict[Any, Any] = {}
        try:
            for step, held in deals:
                loader.deal(Cursor(0, step), held)
                for _ in range(4):
                    torch.rand(3)
                    one = loader.next()
                    key = one.cursor.step, one.micro_batch
                    values = one.value[1].tolist()
                    assert found.setdefault(key, values) == values
        finally:
            loader.close()
        return found

    quiet = drawn(0, [(step, (0, V)) for step in range(6)])
    for num_workers in (0, 2):
        moved = drawn(num_workers, [(0, (0, 2)), (5, (1, 4)), (2, (2, 4)), (1, (0, 4))])
        assert {key: quiet[key] for key in moved if key in quiet} == {
            key: value for key, value in moved.items() if key in quiet
        }
    assert len({value for values in quiet.values() for value in values}) == 6 * V * 2


# ------------------------------------------------------------------- snapshots


def test_a_snapshot_spares_the_samples_before_it(tmp_path: Path) -> None:
    first = loader_of(Placed(IDS, tmp_path))
    first.deal(Cursor(), (0, V))
    take(first, 10 * V)
    states = first.stream_states(Cursor(0, 9))
    assert [one["at"] for one in states["snapshots"]] == [[0, 8, number] for number in range(V)]
    assert [one["state"] for one in states["snapshots"]] == [{"at": 16}] * V
    (tmp_path / "reads").unlink()
    heir = loader_of(Placed(IDS, tmp_path))
    heir.put_stream_states(states)
    heir.deal(Cursor(0, 9), (0, 2))
    assert take(heir, 4) == [row for step in steps_of(streams_of(IDS), 2)[9:11] for row in step[:2]]
    assert min(number for number, _ in reads(tmp_path)) >= 8 * V * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_fails_late_begins_at_a_snapshot_again(tmp_path: Path, num_workers: int) -> None:
    torn = tmp_path / "fails-88"
    torn.touch()
    loader = loader_of(Placed(IDS, tmp_path), num_workers=num_workers)
    try:
        loader.deal(Cursor(), (0, 1))
        take(loader, 10)
        (tmp_path / "reads").unlink()
        with pytest.raises(ValueError, match="sample 88 is torn"):
            take(loader, 2)
        torn.unlink()
        assert take(loader, 2) == [row[0] for row in steps_of(streams_of(IDS), 2)[10:12]]
        assert min(number for number, _ in reads(tmp_path)) >= 8 * V * 2
    finally:
        loader.close()


def test_a_snapshot_that_leads_elsewhere_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    first = loader_of(Forgetful(IDS))
    first.deal(Cursor(), (0, V))
    take(first, 10 * V)
    heir = loader_of(Forgetful(IDS))
    heir.put_stream_states(first.stream_states(Cursor(0, 9)))
    heir.deal(Cursor(0, 9), (0, 1))
    with caplog.at_level(logging.WARNING):
        assert take(heir, 1) == [steps_of(streams_of(IDS), 2)[9][0]]
    assert "stream_state_refused" in caplog.text


def test_snapshots_of_another_cut_or_a_later_step_are_passed_over(tmp_path: Path) -> None:
    first = loader_of(Placed(IDS))
    first.deal(Cursor(), (0, V))
    take(first, 10 * V)
    states = first.stream_states(Cursor(0, 9))
    other = loader_of(Placed(IDS, tmp_path), micro=4)
    other.put_stream_states(states)
    other.deal(Cursor(0, 4), (0, 1))
    assert take(other, 1) == [steps_of(streams_of(IDS), 4)[4][0]]
    early = loader_of(Placed(IDS))
    early.put_stream_states(states)
    early.deal(Cursor(0, 7), (0, 1))
    assert take(early, 1) == [steps_of(streams_of(IDS), 2)[7][0]]
    assert first.stream_states(Cursor(0, 7))["snapshots"] == []
    assert first.stream_states(Cursor(1, 9))["snapshots"] == []


def test_a_loader_that_says_how_often_is_obeyed() -> None:
    loader = loader_of(Placed(IDS), cls=StatefulDataLoader, snapshot_every_n_steps=3)
    loader.deal(Cursor(), (0, 1))
    take(loader, 8)
    assert [one["at"] for one in loader.stream_states(Cursor(0, 8))["snapshots"]] == [[0, 6, 0]]


def test_members_hear_of_each_others_streams_and_of_the_end() -> None:
    mine, theirs = StreamBook(), StreamBook()
    loader = loader_of(Placed(IDS), book=mine)
    loader.deal(Cursor(), (0, 2))
    take(loader, 20)
    mine.end(0, 13)
    theirs.receive([b"", mine.sent(Cursor(0, 9))])
    assert theirs.take(Cursor(0, 9)) == mine.take(Cursor(0, 9))
    assert theirs.steps_of(0) == 13
    # What was heard is told again only to whoever knows nothing.
    assert theirs.take(Cursor(0, 9))["snapshots"]
    assert len(theirs.sent(Cursor(0, 9))) < len(theirs.sent(Cursor(0, 9), all_of_it=True))
    assert StreamBook().sent(Cursor()) == b""


class Opaque(Placed):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "what": object()}


def test_states_that_cannot_be_sent_are_kept_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    book = StreamBook()
    loader = loader_of(Opaque(IDS), book=book)
    loader.deal(Cursor(), (0, 1))
    take(loader, 10)
    with caplog.at_level(logging.WARNING):
        other = StreamBook()
        other.receive([book.sent(Cursor(0, 9)), book.sent(Cursor(0, 9))])
    assert caplog.text.count("stream_states_kept") == 1
    assert other.take(Cursor(0, 9))["snapshots"] == []


def test_marks_tell_samples_apart() -> None:
    samples = [
        1, 2, "1", None, torch.zeros(2), torch.ones(2), np.ones(2), {"a": 1}, {"b": 1}, [1], (1,),
        {"a": [torch.ones(3), "x"]}, {"a": [torch.ones(3), "y"]}, torch.empty(0),
    ]  # fmt: skip
    assert len({mark_of(one) for one in samples}) == len(samples)
    assert mark_of(object()) == mark_of(object())


# ------------------------------------------------------------------- counts and ends


def share_of(streams: Streams, rank: int, world_size: int, ends: list[Any]) -> StreamShare:
    def end(epoch: int, steps: int) -> None:
        ends.append((rank, epoch, steps))

    return StreamShare(streams, Cursor(2, 5), end, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("drop_last", "counts", "more", "ends"),
    [
        (False, (2, 2, 1, 0), (True, False, False, False), False),
        (False, (2, 2, 1, 0), (False, False, False, False), True),
        (True, (2, 2, 2, 2), (True, True, False, True), True),
        (True, (2, 2, 2, 2), (True, True, True, True), False),
    ],
)
def test_all_ranks_conclude_the_same_from_what_each_has_read(
    drop_last: bool, counts: tuple[int, ...], more: tuple[bool, ...], ends: bool
) -> None:
    streams = Streams(micro_batch=2, num_micro_batches=V, drop_last=drop_last)
    for world_size in (1, 2, 3, 4):
        heard: list[Any] = []
        shares = [share_of(streams, rank, world_size, heard) for rank in range(world_size)]
        for share in shares:
            for number in range(*share.held):
                share.note(number, counts[number], more[number])
                assert share.weight(number) == (counts[number] / 2 or None)
        told = [share.told() for share in shares]
        assert {share.hear(told) for share in shares} == {sum(counts) / 2}
        assert {share.samples for share in shares} == {sum(counts)}
        assert heard == ([(rank, 2, 6) for rank in range(world_size)] if ends else [])


@pytest.mark.parametrize(("drop_last", "count"), [(False, 0), (True, 1)])
def test_a_step_without_samples_is_refused(drop_last: bool, count: int) -> None:
    streams = Streams(micro_batch=2, num_micro_batches=2, drop_last=drop_last)
    share = share_of(streams, 0, 1, [])
    for number in range(2):
        share.note(number, count, False)
    with pytest.raises(UsageError, match=r"step 5 of epoch 2 has . samples of 4 in 2 streams"):
        share.hear([share.told()])


# ------------------------------------------------------------------- others' datasets


def hugging_face(num_shards: int, *, shuffled: bool = False) -> Any:
    whole = datasets.Dataset.from_dict({"id": IDS}).to_iterable_dataset(num_shards=num_shards)
    return whole.shuffle(seed=1, buffer_size=7) if shuffled else whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("num_shards", "shuffled", "cut", "states"),
    [
        (8, False, Cut.SHARD, True), (8, True, Cut.SHARD, False), (3, False, Cut.COUNT, True),
        (1, True, Cut.COUNT, False),
    ],
)  # fmt: skip
def test_hugging_faces_streams_are_read_once_and_can_be_continued(
    num_shards: int, shuffled: bool, cut: Cut, states: bool, num_workers: int
) -> None:
    def one_pass(held: tuple[int, int], start: int = 0, state: Any = None) -> tuple[Any, Any]:
        dataset = hugging_face(num_shards, shuffled=shuffled)
        loader = loader_of(dataset, micro=1, num_workers=num_workers)
        assert loader.epochs.cut is cut
        try:
            loader.put_stream_states(state or {})
            loader.deal(Cursor(1, start), held)
            # Shards differ by a few samples: one stream is over before another.
            found = take(loader, (28 - start) * (held[1] - held[0]))
            return found, loader.stream_states(Cursor(1, 18))
        finally:
            loader.close()

    found, state = one_pass((0, V))
    assert sorted(one for ids in found for one in ids) == IDS
    assert bool(state["snapshots"]) is states
    again, _ = one_pass((2, V), 18, state)
    assert again == [ids for n, ids in enumerate(found[18 * V :]) if n % V >= 2]


def test_a_dataset_that_is_split_already_is_refused() -> None:
    split = datasets.distributed.split_dataset_by_node(hugging_face(8), rank=0, world_size=2)
    with pytest.raises(UsageError, match=r"split by node already.*pass the whole dataset"):
        loader_of(split)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_over_numbers_is_as_torchs_own(shuffle: bool, num_workers: int) -> None:
    whole = datasets.Dataset.from_dict({"id": IDS[:96]})
    orders = []
    for cls in (DataLoader, StatefulDataLoader):
        plain: Any = cls(whole, batch_size=2, shuffle=shuffle, num_workers=num_workers)
        loader = MicroBatchLoader(plain, num_micro_batches=V, seed=1)
        try:
            loader.deal(Cursor(), (0, V))
            orders.append([ids_of(loader.next().value) for _ in range(48)])
        finally:
            loader.close()
    assert orders[0] == orders[1]
    assert sorted(one for ids in orders[0] for one in ids) == IDS[:96]


# ------------------------------------------------------------------- what is said


class Itself(Numbers):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return 1


class OtherShard(Numbers):
    def shard(self, where: str) -> None:
        """Be something else of that name."""


class Uncopied(Placed):
    def __deepcopy__(self, _: Any) -> Any:
        raise OSError("a connection")


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Numbers(IDS), {"micro": None}, "batch_size=None"),
        (Numbers(IDS), {"cut": Cut.SHARD}, r"the Numbers has no shard\(num_shards=, index=\)"),
        (OtherShard(IDS), {"cut": Cut.SHARD}, r"the OtherShard has no shard"),
        (Itself(IDS), {}, "returns the dataset itself"),
        (Uncopied(IDS), {"cut": Cut.COUNT}, "Uncopied has state_dict, and cannot be copied"),
    ],
)
def test_what_cannot_be_streams_is_refused(dataset: Any, options: Any, says: str) -> None:
    def read() -> None:
        loader = loader_of(dataset, **options)
        loader.deal(Cursor(), (0, 1))
        loader.next()

    with pytest.raises(UsageError, match=says):
        read()


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Numbers(IDS), {"streams_counted", "streams_without_state"}),
        (Sharded(IDS), {"streams_without_state"}),
        (Placed(IDS), set()),
        (hugging_face(3), {"streams_counted"}),
        (hugging_face(8, shuffled=True), {"streams_without_state"}),
    ],
)
def test_what_costs_more_than_it_must_is_said(
    dataset: Any, says: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    loader_of(dataset)
    assert {record.getMessage().split(":")[0] for record in caplog.records} == says

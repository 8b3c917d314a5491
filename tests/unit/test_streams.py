"""Streams of a dataset that can only be iterated over: who reads what, from where, how often."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets.distributed
import numpy as np
import pytest
import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.streams import StreamCut
from elastic.errors import UsageError
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.data.stream_source import mark_of
from elastic.worker.data.streams import StreamLoader
from tests.unit.streams_under_test import (
    Forgetful,
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


def test_an_empty_dataset_is_refused() -> None:
    for dataset in (Numbers([]), Sharded([])):
        loader = loader_of(dataset)
        loader.take_span(Cursor(), (0, 2))
        with pytest.raises(UsageError, match=r"yields no sample in epoch 0.*at least 1"):
            loader.next()


# ------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_fails_late_begins_at_a_snapshot_again(tmp_path: Path, num_workers: int) -> None:
    torn = tmp_path / "fails-88"
    torn.touch()
    loader = loader_of(Placed(IDS, tmp_path), num_workers=num_workers)
    try:
        loader.take_span(Cursor(), (0, 1))
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
    first.take_span(Cursor(), (0, V))
    take(first, 10 * V)
    heir = loader_of(Forgetful(IDS))
    heir._book.put(first._book.take(Cursor(0, 9)))
    heir.take_span(Cursor(0, 9), (0, 1))
    with caplog.at_level(logging.WARNING):
        assert take(heir, 1) == [steps_of(streams_of(IDS), 2)[9][0]]
    assert "stream_state_refused" in caplog.text


def test_members_hear_of_each_others_streams_and_of_the_end() -> None:
    mine, theirs = StreamBook(), StreamBook()
    loader = loader_of(Placed(IDS), book=mine)
    loader.take_span(Cursor(), (0, 2))
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
    loader.take_span(Cursor(), (0, 1))
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


# ------------------------------------------------------------------- others' datasets


def hugging_face(num_shards: int, *, shuffled: bool = False) -> Any:
    whole = datasets.Dataset.from_dict({"id": IDS}).to_iterable_dataset(num_shards=num_shards)
    return whole.shuffle(seed=1, buffer_size=7) if shuffled else whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("num_shards", "shuffled", "cut", "states"),
    [
        (8, False, StreamCut.SHARD, True),
        (8, True, StreamCut.SHARD, False),
        (3, False, StreamCut.COUNT, True),
        (1, True, StreamCut.COUNT, False),
    ],
)
def test_hugging_faces_streams_are_read_once_and_can_be_continued(
    num_shards: int, shuffled: bool, cut: StreamCut, states: bool, num_workers: int
) -> None:
    def one_pass(held: tuple[int, int], start: int = 0, state: Any = None) -> tuple[Any, Any]:
        dataset = hugging_face(num_shards, shuffled=shuffled)
        loader = loader_of(dataset, micro=1, num_workers=num_workers)
        assert loader.plan.cut is cut
        try:
            loader._book.put(state or {})
            loader.take_span(Cursor(1, start), held)
            # Shards differ by a few samples: one stream is over before another.
            found = take(loader, (28 - start) * (held[1] - held[0]))
            return found, loader._book.take(Cursor(1, 18))
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
        (
            Numbers(IDS),
            {"cut": StreamCut.SHARD},
            r"the Numbers has no shard\(num_shards=, index=\)",
        ),
        (OtherShard(IDS), {"cut": StreamCut.SHARD}, r"the OtherShard has no shard"),
        (Itself(IDS), {}, "returns the dataset itself"),
        (Uncopied(IDS), {"cut": StreamCut.COUNT}, "Uncopied has state_dict, and cannot be copied"),
    ],
)
def test_what_cannot_be_streams_is_refused(dataset: Any, options: Any, says: str) -> None:
    def read() -> None:
        loader = loader_of(dataset, **options)
        loader.take_span(Cursor(), (0, 1))
        loader.next()

    with pytest.raises(UsageError, match=says):
        read()

"""Datasets that can only be iterated over, and what must come of them, written down plainly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic.core.policy.streams import StreamCut
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.data.streams import StreamLoader

V = 4


class Numbers(IterableDataset[int]):
    """Yields numbers; without state, and without a thought of shards."""

    def __init__(self, ids: list[int], folder: Path | None = None) -> None:
        self.ids = ids
        self.folder = folder
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, number: int) -> int:
        """Return a number of this epoch, and leave a line that says who has read it."""
        if self.folder is not None:
            record = os.open(self.folder / "reads", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.write(record, f"{number} {os.getpid()}\n".encode())
            os.close(record)
            if (self.folder / f"fails-{number}").exists():
                raise ValueError(f"sample {number} is torn")
        return 1000 * self.epoch + number

    def __iter__(self) -> Iterator[int]:
        for number in self.ids:
            yield self.sample(number)


class Sharded(Numbers):
    """Cuts itself, into shards that differ by one at most."""

    def shard(self, num_shards: int, index: int) -> Sharded:
        return type(self)(self.ids[index::num_shards], self.folder)


class Placed(Sharded):
    """Has a place that can be set, and keeps it in itself, as many do."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.ids):
            self.at += 1
            yield self.sample(self.ids[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Placed):
    """Loses a sample whenever its place is set, as a shuffle buffer does."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class ByWorker(Numbers):
    """Deals itself out as torch's documentation says."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in self.ids[first::step]:
            yield self.sample(number)


def loader_of(
    dataset: Any,
    *,
    micro: int = 2,
    v: int = V,
    cut: StreamCut | None = None,
    book: StreamBook | None = None,
    **kept: Any,
) -> StreamLoader:
    """Return a loader of such a dataset; torch's own, unless `cls` names another."""
    cls = kept.pop("cls", DataLoader)
    plain = cls(dataset, batch_size=micro, **kept)
    return StreamLoader(plain, num_micro_batches=v, seed=3, cut=cut, book=book)


def streams_of(ids: list[int], v: int = V) -> list[list[int]]:
    """Return the ids of each stream; all our datasets deal them out like cards."""
    return [ids[number::v] for number in range(v)]


Steps = list[list[list[int]]]


def steps_of(streams: list[list[int]], micro: int, drop_last: bool = False) -> Steps:
    """Return the ids of each micro-batch of each step of an epoch."""
    rows = []
    for start in range(0, max(map(len, streams)), micro):
        row = [stream[start : start + micro] for stream in streams]
        if drop_last and any(len(one) < micro for one in row):
            break
        rows.append(row)
    return rows

"""A micro-batch loader with worker processes: they live on, read nothing in vain, and may fail."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.worker.data.loader import MicroBatchLoader
from tests.patience import wait_for

pytestmark = [
    # Python 3.12 remarks on every fork of a process that has used torch.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
V = 4
MICRO = 2


class Recorded(Dataset[tuple[int, int]]):
    """Samples are (number, pid of the reader); every read leaves a line in a file.

    A number that has a file of its own fails, or waits until that file is gone.
    """

    def __init__(self, folder: Path, size: int = 4000) -> None:
        self.folder = folder
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[int, int]:
        record = os.open(self.folder / "reads", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(record, f"{number}\n".encode())
        os.close(record)
        if (self.folder / f"fails-{number}").exists():
            raise ValueError(f"sample {number} is torn")
        wait_until_gone(self.folder / f"waits-{number}")
        return number, os.getpid()

    def reads(self) -> Counter[int]:
        return Counter(int(line) for line in (self.folder / "reads").read_text().split())


def wait_until_gone(path: Path) -> None:
    wait_for(lambda: not path.exists())


@contextmanager
def loading(data: Dataset[Any], **kept: Any) -> Iterator[MicroBatchLoader]:
    kept = {"num_workers": 2, **kept}
    plain = DataLoader(data, batch_size=MICRO, **kept)
    loader = MicroBatchLoader(plain, num_micro_batches=V, seed=3)
    try:
        yield loader
    finally:
        loader.close()


def ids(epoch_step: Cursor, number: int, loader: MicroBatchLoader) -> list[int]:
    return list(loader.plan.samples(epoch_step.epoch, epoch_step.step, number))


def take(loader: MicroBatchLoader, count: int) -> Iterator[tuple[list[int], set[int]]]:
    """Micro-batches, each checked against its number: sample ids and readers."""
    for _ in range(count):
        batch = loader.next()
        numbers, pids = (part.tolist() for part in batch.value)
        assert numbers[: batch.count] == ids(batch.cursor, batch.number, loader)
        yield numbers, set(pids)


def test_processes_outlive_deals_and_epochs_and_end_with_the_loader(tmp_path: Path) -> None:
    draw = random.Random(7)
    with loading(Recorded(tmp_path, 50), shuffle=True, prefetch_factor=3) as loader:
        readers: set[int] = set()
        for _ in range(40):
            first = draw.randrange(V)
            cursor = Cursor(draw.randrange(3), draw.randrange(loader.plan.steps))
            loader.take_span(cursor, (first, draw.randrange(first, V) + 1))
            for _, pids in take(loader, draw.randrange(12)):
                readers |= pids
        assert len(readers) == 2
        assert all(psutil.pid_exists(pid) for pid in readers)
    assert not any(psutil.pid_exists(pid) for pid in readers)


class Scaled(Dataset[tuple[float, int]]):
    def __init__(self) -> None:
        self.numbers, self.parts = list(range(24)), {"factor": [1.0, torch.ones(1)]}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> tuple[float, int]:
        factor, tensor = self.parts["factor"]
        return number * factor * float(tensor), os.getpid()


@pytest.mark.parametrize("change", ["nothing", "number", "tensor", "sampler", "length"])
def test_a_pass_reads_what_dataset_and_sampler_are_when_it_begins(change: str) -> None:
    data = Scaled()
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    with loading(data, sampler=sampler) as loader:
        loader.refresh(0)
        loader.take_span(Cursor(), (0, V))
        before = [loader.next().value for _ in range(3 * V)]  # What follows is read ahead by now.
        assert {float(x) for batch in before for x in batch[0]} <= {*map(float, range(24))}
        match change:
            case "number":
                data.parts["factor"][0] = 100.0
            case "tensor":
                data.parts["factor"][1] *= 100.0  # type: ignore[operator]
            case "sampler":
                sampler.weights = torch.tensor([0.0] * 23 + [1.0])
            case "length":
                sampler.num_samples = 30
        if change == "length":
            with pytest.raises(UsageError, match="had 24 samples, and has 30 in epoch 1"):
                loader.refresh(1)
            return
        loader.refresh(1)
        loader.take_span(Cursor(1), (0, V))
        after = [loader.next().value for _ in range(3 * V)]
        found = {float(x) for batch in after for x in batch[0]}
        pids = [{int(x) for batch in part for x in batch[1]} for part in (before, after)]
    assert (pids[0] == pids[1]) is (change == "nothing")
    right = {"nothing": range(24), "sampler": [23]}.get(change, range(0, 2400, 100))
    assert found <= {*map(float, right)}


def test_a_timeout_is_an_error_after_which_the_same_is_tried_again(tmp_path: Path) -> None:
    slow = tmp_path / "waits-6"
    slow.touch()
    with loading(Recorded(tmp_path), timeout=0.3) as loader:
        loader.take_span(Cursor(), (0, 4))
        assert len(list(take(loader, 3))) == 3
        with pytest.raises(RuntimeError, match="timed out"):
            loader.next()
        slow.unlink()
        assert [numbers for numbers, _ in take(loader, 2)] == [[6, 7], [8, 9]]


class Leaving(BaseException):
    """Stands for what takes a training loop out of whatever it does."""


class Interrupted(Recorded):
    def __getitem__(self, number: int) -> tuple[int, int]:
        if (self.folder / f"leaves-{number}").exists():
            raise Leaving
        return super().__getitem__(number)


def test_after_an_interrupt_of_the_dataset_itself_the_same_is_tried_again(tmp_path: Path) -> None:
    leaves = tmp_path / "leaves-3"
    leaves.touch()
    with loading(Interrupted(tmp_path), num_workers=0) as loader:
        loader.take_span(Cursor(), (0, 4))
        assert len(list(take(loader, 1))) == 1
        with pytest.raises(Leaving):
            loader.next()
        leaves.unlink()
        assert [numbers for numbers, _ in take(loader, 2)] == [[2, 3], [4, 5]]

"""Augmentation depends on (seed, epoch, sample) alone, whoever reads, and however often."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from elastic.core.policy.cursor import Cursor
from elastic.worker.data.loader import MicroBatchLoader

pytestmark = [
    # Python 3.12 remarks on every fork of a process that has used torch.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
V = 4
SIZE = 24


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Augmented(Dataset[Any]):
    """Samples are their number and what was drawn for them, more for some than for others."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Any:
        for _ in range(number % 3):
            draws()
        return number, torch.tensor(draws(), dtype=torch.float64)


class ReadAtOnce(Augmented):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [(number, torch.tensor(draws(), dtype=torch.float64)) for number in numbers]


class Marked(Dataset[Any]):
    """Samples are what worker_init_fn has left in the dataset of its process."""

    mark = -1

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.mark


def mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Marked)
    info.dataset.mark = 100 + worker_id


def mask(samples: list[Any]) -> Any:
    """A collate_fn that draws."""
    return [*default_collate(samples), torch.tensor(draws(), dtype=torch.float64)]


@contextmanager
def loading(data: Dataset[Any], *, seed: int = 9, **kept: Any) -> Iterator[MicroBatchLoader]:
    loader = MicroBatchLoader(
        DataLoader(data, batch_size=2, shuffle=True, **kept), num_micro_batches=V, seed=seed
    )
    try:
        yield loader
    finally:
        loader.close()


Seen = dict[tuple[int, int], list[float]]


def seen(loader: MicroBatchLoader, held: tuple[int, int], count: int) -> Seen:
    """What was drawn, by (epoch, sample)."""
    loader.take_span(Cursor(), held)
    found: Seen = {}
    for _ in range(count):
        batch = loader.next()
        random.random()  # The training loop draws, too.
        for number, values in zip(*batch.value, strict=True):
            found[batch.cursor.epoch, int(number)] = values.tolist()
    return found


@pytest.fixture(scope="module")
def whole() -> Seen:
    with loading(Augmented()) as loader:
        return seen(loader, (0, V), 2 * SIZE // 2)


@pytest.mark.parametrize("data", [Subset(Augmented(), range(SIZE)), ConcatDataset([Augmented()])])
def test_a_view_of_a_dataset_is_augmented_as_the_dataset(whole: Seen, data: Any) -> None:
    with loading(data) as loader:
        assert seen(loader, (0, V), 2 * SIZE // 2) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (ReadAtOnce(), None),
        (Subset(ReadAtOnce(), range(SIZE)), None),
        (TensorDataset(torch.arange(SIZE)), mask),
        (Augmented(), mask),
    ],
)
def test_what_is_drawn_for_a_whole_micro_batch_depends_on_its_samples_alone(
    data: Any, collate: Any, num_workers: int
) -> None:
    kept = {"collate_fn": collate} if collate else {}
    found: list[dict[Any, str]] = []
    for held, workers in (((0, V), 0), ((1, 3), num_workers)):
        with loading(data, num_workers=workers, **kept) as loader:
            loader.take_span(Cursor(), held)
            batches = [loader.next() for _ in range(5 * (held[1] - held[0]))]
        found.append({(one.cursor, one.number): str(one.value) for one in batches})
    everything, part = found
    assert part == {key: everything[key] for key in part}
    assert len(set(everything.values())) == len(everything)

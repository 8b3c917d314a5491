"""What a dataset is asked for: samples one by one, many at once, or the batches of a sampler.

A loader with a batch sampler of the user's is read as one whose samples are its batches: what cuts
data into micro-batches, deals them out and reads them again needs to know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset


def reads_many(dataset: Any) -> bool:
    """Return whether a dataset reads many samples in one call of its own making.

    Subset has such a method only to pass it on; what it reads one by one is seeded one by one.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def read_samples(dataset: Any, indices: Sequence[Any]) -> Any:
    """Return these samples of a dataset, as a DataLoader gives them to its `collate_fn`."""
    if reads_many(dataset):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


@dataclass(frozen=True)
class BatchDataset:
    """A dataset whose samples are batches of the user's."""

    dataset: Any

    def __getitem__(self, batch: Sequence[Any]) -> Any:
        return read_samples(self.dataset, batch)


@dataclass(frozen=True)
class BatchCollate:
    """The user's `collate_fn` for the one batch that a micro-batch of such samples has."""

    collate: Callable[[Any], Any]

    def __call__(self, batches: Sequence[Any]) -> Any:
        (batch,) = batches
        return self.collate(batch)


def users_dataset(dataset: Any) -> Any:
    """Return what the user's loader reads."""
    return dataset.dataset if isinstance(dataset, BatchDataset) else dataset

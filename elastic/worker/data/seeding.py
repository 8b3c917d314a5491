"""Random states that depend on the run and on nothing else: of a process, and of reading samples.

Rule: a sample after augmentation is a function of (seed, epoch, sample), whatever process
reads it: any worker process of a DataLoader, any rank, for the first time or once more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate, get_worker_info

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.seeds import AUGMENT, MASK_32, derive, sample_seed, step_seed
from elastic.core.policy.streams import Data
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.reading import read_samples, reads_many, users_dataset

FIRST_SEED = 0
"""What is random before the first step is seeded with this, unless the train function does."""
COLLATE = 1
"""So that a micro-batch of one sample is not collated with the numbers that the sample had."""


def seed_like_a_process(rank: int) -> None:
    """Seed NumPy and random by rank, for scripts that rely on ranks to draw differently.

    In processes that are started by themselves only torch begins alike. What a script draws (its
    batches, a split of its data) is the same each time that this rank runs it.
    """
    seed = derive(FIRST_SEED, rank)
    np.random.seed(seed & MASK_32)
    random.seed(seed)


def seed_step(data: Data | None, cursor: Cursor, shard: int) -> None:
    """Have optimizers that draw (noise, stochastic rounding) do so alike on all ranks.

    Each comes from another micro-batch, and there are as many ranks as there happen to be. `shard`
    is the number of our part of the weights, 0 where all ranks have all of them.
    """
    seed_everything(step_seed(data.seed if data is not None else FIRST_SEED, cursor, shard))


@dataclass(frozen=True)
class ReadRequest:
    """What a DataLoader is asked to read: the samples of one micro-batch.

    Attributes:
        tag: comes back with the batch.
        epoch: passes over the data before this one.
        indices: what the dataset is asked for.
        numbers: the samples' numbers, which their seeds depend on; mostly the indices.
    """

    tag: int
    epoch: int
    indices: Sequence[Any]
    numbers: Sequence[int]


@dataclass(frozen=True)
class ReadSamples:
    """Samples as the dataset gave them, on their way to be collated."""

    request: ReadRequest
    samples: Any


@dataclass(frozen=True)
class SeededDataset:
    """A dataset that reads requests, with the random state set for each sample.

    Afterwards the process's random state is anything: a reader in the training process has
    to seed it again, as the step engine does before each micro-batch.
    """

    dataset: Any
    seed: int

    def __getitems__(self, request: ReadRequest) -> ReadSamples:
        epoch, numbers = request.epoch, request.numbers
        if _draws_nothing(self.dataset):
            samples = read_samples(self.dataset, request.indices)
        elif reads_many(self.dataset):
            seed_everything(_seed_of_all(self.seed, epoch, numbers))
            samples = self.dataset.__getitems__(request.indices)
        else:
            samples = []
            for index, number in zip(request.indices, numbers, strict=True):
                seed_everything(sample_seed(self.seed, epoch, number))
                samples.append(self.dataset[index])
        return ReadSamples(request, samples)


@dataclass(frozen=True)
class SeededCollate:
    """The user's collate_fn; one that draws (as to mask words) does so from a state set for it."""

    collate: Callable[[Any], Any]
    seed: int

    def __call__(self, read: ReadSamples) -> tuple[int, Any]:
        request = read.request
        if self.collate is not default_collate:
            seed = _seed_of_all(self.seed, request.epoch, request.numbers)
            seed_everything(derive(seed, COLLATE))
        return request.tag, self.collate(read.samples)


@dataclass(frozen=True)
class EvaluationRequest:
    """What a DataLoader is asked to read of an evaluation: one batch, or one sample.

    Attributes:
        seed: of what is random while it is read and collated, None to let that be.
        what: indices, or an index.
    """

    seed: int | None
    what: Any

    def seed_process(self) -> None:
        if self.seed is not None:
            seed_everything(self.seed)


@dataclass(frozen=True)
class EvaluationDataset:
    """A dataset that reads such requests, in whichever process.

    Those of a loader read the batches of one rank, as many as there are at this number of ranks, so
    that what they would draw on from batch to batch is no batch's own.
    """

    dataset: Any

    def __getitem__(self, request: EvaluationRequest) -> Any:
        request.seed_process()
        return self.dataset[request.what]

    def __getitems__(self, request: EvaluationRequest) -> Any:
        request.seed_process()
        return read_samples(self.dataset, request.what)


@dataclass(frozen=True)
class LoaderWorkerInit:
    """What runs first in each worker process of a DataLoader."""

    user: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        """Let get_worker_info() return the user's dataset, then run the user's function."""
        info = get_worker_info()
        if info is not None:
            # It forbids assignments, in each version of torch in another way.
            users = getattr(info.dataset, "dataset", info.dataset)
            object.__setattr__(info, "dataset", users_dataset(users))
        if self.user is not None:
            self.user(worker_id)


def _seed_of_all(seed: int, epoch: int, numbers: Sequence[int]) -> int:
    """Return the seed of what is done to all samples of a micro-batch at once."""
    return derive(seed, AUGMENT, epoch, *numbers)


def _draws_nothing(dataset: Any) -> bool:
    """Return whether a dataset is known to be free of randomness, so that seeding is a waste."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset

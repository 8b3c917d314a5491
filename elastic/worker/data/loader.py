"""Micro-batches out of the user's DataLoader, by number: from anywhere, in the order asked for.

Rule: which samples a micro-batch has is asked of `DataPlan` alone; `SampleFeed` reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan, Permutation
from elastic.core.policy.microbatch import Span
from elastic.core.policy.seeds import shuffle_seed
from elastic.errors import UsageError, check
from elastic.worker.data.feed import Key, SampleFeed, check_prefetch
from elastic.worker.data.randomness import permuted
from elastic.worker.data.reading import BatchDataset, users_dataset
from elastic.worker.data.sampler_order import OrderedSampler, SamplerOrders
from elastic.worker.data.seeding import ReadRequest, SeededCollate, SeededDataset
from elastic.worker.reduce.step_share import MicroBatch, StepShare, WeighedShare

BLOCK_SAMPLES = 1024
BLOCK_PIECES = 64
"""Sample ids are computed for this much at once: NumPy's calls cost more than the numbers."""


Weigh = Callable[[Any], Any]
"""Returns the weight of a micro-batch's value, such as its number of tokens."""
BY_SAMPLES = object()
"""What adapters return for a micro-batch that counts by its samples."""
WEIGHT_PARTS, WEIGHT_MAX = 2.0**20, 2.0**32
"""Weights are multiples of 1 / WEIGHT_PARTS: sums of a step's are exact, in whatever order."""


def weight_of(weigh: Weigh | None, value: Any, count: int) -> float:
    """Return what a micro-batch counts: its samples, or what the user's function says.

    UsageError if that returns no such number. Without samples it counts nothing.
    """
    if weigh is None or not count:
        return float(count)
    found = weigh(value)
    if found is BY_SAMPLES:
        return float(count)
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < WEIGHT_MAX:
        raise UsageError(
            f"prepare_data_loader(weigh=...): weigh returned {found!r} for a micro-batch; expected "
            f"one number, from 0 to 2**32, such as its count of tokens that the loss is a mean of"
        )
    return round(number * WEIGHT_PARTS) / WEIGHT_PARTS


class MicroBatchLoader:
    """Yields the micro-batches that a rank holds, step after step, over the ends of epochs.

    What was prefetched before the span changed and is wanted after it is kept. What was handed out
    already, and is wanted again because its step is done again, is read again: the training loop
    may have changed its tensors.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        num_micro_batches: int,
        seed: int,
        weigh: Weigh | None = None,
    ) -> None:
        """Take over what the user's loader does; nothing is started before the first `next`.

        Args:
            loader: the user's; it is not read itself.
            num_micro_batches: V, of a step.
            seed: of the shuffle and of augmentation; 0 <= seed < 2**63.
            weigh: returns the weight of a micro-batch, None to count samples.

        Raises:
            UsageError: its samples cannot be asked for by number, or there are none.
        """
        size, shuffle, sampler = _order_of(loader, seed)
        self.plan = DataPlan(
            num_samples=size,
            micro_batch_size=int(loader.batch_size or 0),
            num_micro_batches=num_micro_batches,
            seed=seed,
            shuffle=shuffle,
            drop_last=loader.drop_last,
        )
        self._order: _Order | None = None
        self._users, self._seed = loader, seed
        self._weigh = weigh
        self._share: WeighedShare | None = None
        self._sampler, self._subset = sampler, _subset_print(loader.dataset)
        self._reads_batches = isinstance(loader.dataset, BatchDataset)
        self._feed = SampleFeed(loader, _ByNumber(loader, seed, sampler), seed=seed)

    def take_span(self, cursor: Cursor, held: Span) -> None:
        """Let `next` continue here: these micro-batches of this step, then those of the next step.

        Args:
            cursor: any step of any epoch, also one before the present.
            held: the micro-batches of each step; at least one.
        """
        check(0 <= cursor.step < self.plan.steps, f"{cursor} of {self.plan.steps} steps")
        check(
            0 <= held[0] < held[1] <= self.plan.num_micro_batches,
            f"micro-batches {held} of {self.plan.num_micro_batches}",
        )
        if self._order is not None and self._order.is_at(cursor, held):
            return  # As at the beginning of each epoch.
        self._order = _Order(self.plan, cursor, held)
        self._feed.follow(self._order)

    def refresh(self, epoch: int) -> None:
        """A pass begins: see what the script has changed in dataset and sampler.

        UsageError if it is the length.
        """
        size = _order_of(self._users, self._seed)[0]
        if size != self.plan.num_samples:
            raise UsageError(
                f"prepare_data_loader: an epoch had {self.plan.num_samples} samples, and has "
                f"{size} in epoch {epoch}: their number, which the steps of an epoch follow from, "
                f"must stay; let a sampler of that length choose among all samples, or prepare a "
                f"loader for each epoch"
            )
        self._subset = _subset_print(self._users.dataset)
        is_stale = isinstance(self._sampler, SamplerOrders) and self._sampler.refresh(epoch)
        self._feed.refresh(is_stale=is_stale)
        self.plan = replace(self.plan, order=self.order_print(epoch))

    def next(self) -> MicroBatch:
        """Return the next micro-batch; there always is one.

        The process's random state is anything afterwards if there are no worker processes: seed it,
        as the step engine does. Raises what the dataset or the collate_fn raised; the next call
        tries the same once more.
        """
        value, order = self._feed.take(), self._order
        check(order is not None, "a loader was read before micro-batches were dealt")
        epoch, step, number = order.key  # type: ignore[union-attr]
        order.advance()  # type: ignore[union-attr]
        count = self._samples_of(Cursor(epoch, step), number)
        weight = weight_of(self._weigh, value, count)
        return MicroBatch(Cursor(epoch, step), number, count, value, weight)

    def _samples_of(self, cursor: Cursor, number: int) -> int:
        """Return the samples of a micro-batch; of one of the user's batches, its length."""
        first, last = self.plan.positions(cursor.step, number)
        if not self._reads_batches:
            return last - first
        return sum(map(len, self._sampler.of(cursor.epoch)[first:last]))

    def close(self) -> None:
        self._feed.close()

    def has_step(self, cursor: Cursor) -> bool:
        return cursor.step < self.plan.steps

    def steps_of(self, epoch: int) -> int:
        del epoch
        return self.plan.steps

    def order_print(self, epoch: int) -> int:
        """Return a number that differs where an epoch has other samples, or in another order.

        As far as a subset, or a sampler of the user's, chooses them.
        """
        sampler = self._sampler
        number = sampler.print(epoch) if isinstance(sampler, OrderedSampler) else 0
        return number ^ self._subset

    def share(self, batch: MicroBatch, rank: int, world_size: int) -> StepShare | WeighedShare:
        plan, order = self.plan, self._order
        if self._weigh is None and not self._reads_batches:
            return StepShare.of(plan, batch.cursor.step, rank=rank, world_size=world_size)
        if self._share is None or order is None or batch.number == order.first:
            size = plan.micro_batch_size
            if self._reads_batches:
                size = max(1, self._samples_of(batch.cursor, 0))
            self._share = WeighedShare(
                batch.cursor,
                size,
                rank=rank,
                world_size=world_size,
                num_micro_batches=plan.num_micro_batches,
            )
        self._share.note(batch.number, batch.count, batch.weight)
        return self._share


class _ByNumber:
    """What the inner loader reads."""

    def __init__(self, loader: DataLoader[Any], seed: int, sampler: Any) -> None:
        self.dataset = SeededDataset(loader.dataset, seed)
        self.collate = SeededCollate(loader.collate_fn, seed)
        self._sampler = sampler

    def processes(self, allowed: int) -> int:
        return allowed

    def request(self, tag: int, piece: _Piece) -> ReadRequest:
        numbers = piece.numbers
        sampler = self._sampler
        order = sampler.of(piece.key[0]) if isinstance(sampler, OrderedSampler) else sampler
        indices = numbers if order is None else [order[place] for place in numbers]
        return ReadRequest(tag, piece.key[0], indices, numbers)

    def turn_of(self, key: Key) -> int | None:
        del key
        return None


# --------------------------------------------------------------------------- what is wanted


class _Piece(NamedTuple):
    """A micro-batch to be read."""

    key: Key
    numbers: list[int]
    """Sample ids; places in the sampler if the user has one."""


class _Order:
    """The endless order in which a rank with one span wants micro-batches.

    Attributes:
        key: the one that is wanted now.
    """

    def __init__(self, plan: DataPlan, cursor: Cursor, held: Span) -> None:
        self._plan = plan
        self._held = held
        self.key: Key = (cursor.epoch, cursor.step, held[0])

    @property
    def first(self) -> int:
        """Return the number of a step's first micro-batch that is wanted."""
        return self._held[0]

    def is_at(self, cursor: Cursor, held: Span) -> bool:
        return self._held == held and self.key == (cursor.epoch, cursor.step, held[0])

    def wants(self, key: Key) -> bool:
        return self._held[0] <= key[2] < self._held[1] and key >= self.key

    def advance(self) -> None:
        """The present micro-batch was handed out."""
        self.key = self._after(self.key)

    def _after(self, key: Key) -> Key:
        epoch, step, number = key
        if number + 1 < self._held[1]:
            return epoch, step, number + 1
        if step + 1 < self._plan.steps:
            return epoch, step + 1, self._held[0]
        return epoch + 1, 0, self._held[0]

    def pieces(self, key: Key) -> Iterator[_Piece]:
        while True:
            keys: list[Key] = []
            spans: list[range] = []
            epoch, size = key[0], 0
            while key[0] == epoch and len(keys) < BLOCK_PIECES and size < BLOCK_SAMPLES:
                keys.append(key)
                spans.append(self._positions(key))
                size += len(spans[-1])
                key = self._after(key)
            numbers = self._numbers(epoch, spans)
            end = 0
            for one, span in zip(keys, spans, strict=True):
                begin, end = end, end + len(span)
                yield _Piece(one, numbers[begin:end])

    def _positions(self, key: Key) -> range:
        _, step, number = key
        first, last = self._plan.positions(step, number)
        if first == last:
            first, last = self._plan.stand_in(step)
        return range(first, last)

    def _numbers(self, epoch: int, spans: Sequence[range]) -> list[int]:
        """Return the sample ids at these places of an epoch's order."""
        if not self._plan.shuffle:
            return [place for span in spans for place in span]
        positions = np.concatenate([np.arange(one.start, one.stop) for one in spans])
        seed = shuffle_seed(self._plan.seed, epoch)
        permutation = Permutation(self._plan.num_samples, seed)
        numbers: list[int] = permuted(permutation, positions.astype(np.uint64)).tolist()
        return numbers


# --------------------------------------------------------------------------- what is refused


def _order_of(loader: DataLoader[Any], seed: int) -> tuple[int, bool, Any]:
    """Return the length of an epoch, whether we shuffle, and the user's sampler if that orders it.

    UsageError if the samples have no numbers, or no order that we could know.
    """
    _check_batches(loader)
    check_prefetch(loader)
    sampler: Any = loader.sampler
    own = _is_indexed(sampler) or isinstance(sampler, OrderedSampler)
    of_all = is_dealt(sampler)  # It knows of ranks; we deal out by ourselves.
    is_torchs = of_all or is_plain(sampler, RandomSampler) or type(sampler) is SequentialSampler
    size = _length_of(loader.dataset) if is_torchs else 0
    if not of_all:
        size = _length_of(sampler, "sampler")
    if size < 1:
        what = f"sampler ({type(sampler).__name__})" if own else "dataset"
        raise UsageError(
            f"prepare_data_loader: the {what} is empty, there is nothing to train on; expected "
            f"at least 1 sample"
        )
    if isinstance(loader.dataset, BatchDataset):
        return size, False, SamplerOrders(sampler, seed)
    if own:
        return size, False, sampler
    if is_shuffle(sampler, loader.dataset):
        return size, True, None
    if isinstance(sampler, DistributedSampler) or type(sampler) is SequentialSampler:
        return size, False, None
    return size, False, SamplerOrders(sampler, seed)


def _check_batches(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"prepare_data_loader: {type(loader.dataset).__name__} is an IterableDataset, whose "
            f"samples cannot be asked for by number; use a dataset with __getitem__ and __len__"
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "prepare_data_loader: the loader has batch_size=None; give it the size of a "
            "micro-batch, the samples that one worker computes at a time"
        )


def is_plain(sampler: Any, kind: type) -> bool:
    """Return whether this is torch's own sampler of a kind, or torchdata's of the same name.

    Those of its StatefulDataLoader draw the same; that they have a state is of no account here.
    """
    cls = type(sampler)
    return cls is kind or (is_torchdatas(cls) and cls.__name__ == kind.__name__)


def is_torchdatas(kind: type) -> bool:
    """Return whether a class is torchdata's: those read in torch's order, and count what was."""
    return kind.__module__.startswith("torchdata.")


def is_dealt(sampler: Any) -> bool:
    """Return whether a sampler deals the samples out by rank, as we do in its place.

    UsageError if it has an order of its own, of which it tells each rank only a part.
    """
    kind = type(sampler)
    if not isinstance(sampler, DistributedSampler):
        return False
    if kind.__iter__ is DistributedSampler.__iter__ or is_torchdatas(kind):
        return True
    raise UsageError(
        f"prepare_data_loader: the loader's sampler ({kind.__name__}) is a DistributedSampler with "
        f"an order of its own, and deals it out by rank itself: pass the sampler of one process "
        f"that it stands for, such as WeightedRandomSampler, whose samples are dealt out here; or "
        f"leave it to this one, in a loop without train.epochs(): add_dist_sampler=False"
    )


def is_shuffle(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler draws every sample once, as DataLoader(shuffle=True) does."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if not is_plain(sampler, RandomSampler) or sampler.replacement:
        return False
    return bool(len(sampler) == len(sampler.data_source) == _length_of(dataset))


def _subset_print(dataset: Any) -> int:
    """Return a number of 32 bits that differs where a subset has other samples; 0 for no subset."""
    number, dataset = 0, users_dataset(dataset)
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices)
        number = zlib.crc32(indices.tobytes(), number) if indices.dtype != object else number
        dataset = dataset.dataset
    return number


def _is_indexed(sampler: Any) -> bool:
    kind = type(sampler)
    is_sized = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return is_sized and not isinstance(sampler, Mapping)


def _length_of(dataset: Any, what: str = "dataset") -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"prepare_data_loader: the {what} ({type(dataset).__name__}) does not know its "
            f"length, which the steps of an epoch follow from; give it __len__"
        ) from error

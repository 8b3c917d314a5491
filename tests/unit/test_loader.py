"""Which samples a micro-batch loader yields, after any deals; what it refuses to be made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan
from elastic.errors import InvariantViolation, UsageError
from elastic.worker.data.loader import MicroBatchLoader
from tests.effort import examples

DATA = TensorDataset(torch.arange(10))


class Numbers(Dataset[int]):
    """Each sample is its number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        return number


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


class Unmeasured(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


class MySequence(SequentialSampler):
    pass


class Lying(MySequence):
    def __len__(self) -> int:
        return 12


def expected(
    plan: DataPlan, cursor: Cursor, held: tuple[int, int]
) -> Iterator[tuple[Cursor, int, int, list[int]]]:
    """What comes after a deal, written down the plain way."""
    epoch, step = cursor.epoch, cursor.step
    while True:
        for number in range(*held):
            ids = list(plan.samples(epoch, step, number))
            count = len(ids)
            if not ids:
                whole = (plan.samples(epoch, step, v) for v in range(plan.num_micro_batches))
                ids = [sample for some in whole for sample in some][: min(2, plan.micro_batch_size)]
            yield Cursor(epoch, step), number, count, ids
        epoch, step = (epoch, step + 1) if step + 1 < plan.steps else (epoch + 1, 0)


def taken(loader: MicroBatchLoader) -> tuple[Cursor, int, int, list[int]]:
    batch = loader.next()
    numbers = batch.value.tolist()
    batch.value.fill_(-1)  # A training loop may change what it was given.
    return batch.cursor, batch.number, batch.count, numbers


@st.composite
def deals(draw: st.DrawFn, plan: DataPlan) -> tuple[Cursor, tuple[int, int], int]:
    cursor = Cursor(draw(st.integers(0, 3)), draw(st.integers(0, plan.steps - 1)))
    first = draw(st.integers(0, plan.num_micro_batches - 1))
    last = draw(st.integers(first + 1, plan.num_micro_batches))
    return cursor, (first, last), draw(st.integers(0, 12))


@settings(max_examples=examples(20))
@given(data=st.data())
def test_any_sequence_of_deals_yields_exactly_the_samples_of_the_plan(data: st.DataObject) -> None:
    micro, v = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    drop = data.draw(st.booleans())
    size = data.draw(st.integers(micro * v if drop else 1, 90))
    plain = DataLoader(
        Numbers(size), batch_size=micro, shuffle=data.draw(st.booleans()), drop_last=drop
    )
    seed = data.draw(st.integers(0, 2**63 - 1))
    loader = MicroBatchLoader(plain, num_micro_batches=v, seed=seed)
    for cursor, held, count in data.draw(st.lists(deals(loader.plan), min_size=1, max_size=4)):
        # A step that broke in the middle is done again, then by others.
        for span in (held, held, (held[0], v)):
            loader.take_span(cursor, span)
            plan = expected(loader.plan, cursor, span)
            assert [taken(loader) for _ in range(count)] == list(islice(plan, count))
            # As it stands at the beginning of a step.
            loader.take_span(cursor, span)
    loader.close()


def test_a_sampler_may_be_longer_than_the_data_and_repeat_samples() -> None:
    loader = MicroBatchLoader(
        DataLoader(Numbers(2), batch_size=2, sampler=[1, 1, 0, 1]), num_micro_batches=1, seed=0
    )
    assert loader.plan.steps == 2
    loader.take_span(Cursor(), (0, 1))
    assert [taken(loader)[3] for _ in range(2)] == [[1, 1], [0, 1]]


class Drawing(Sampler[int]):
    """Shuffles by a generator of its own, which is another one with each pass."""

    def __init__(self, generator: Any) -> None:
        self.drawn_by = generator

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        ids = list(range(10))
        self.drawn_by.shuffle(ids)
        return iter(ids)


class Wrapping(Sampler[int]):
    """Gives what another sampler gives."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


@pytest.mark.parametrize(
    ("make", "ids"),
    [
        (lambda: SubsetRandomSampler([1, 2, 5]), {1, 2, 5}),
        (lambda: WeightedRandomSampler([0.0, 1.0, 1.0] + [0.0] * 7, 9), {1, 2}),
        (lambda: WeightedRandomSampler([1.0] * 3, 9, generator=torch.Generator()), {0, 1, 2}),
        (lambda: RandomSampler(DATA, replacement=True), set(range(10))),
        (lambda: RandomSampler(DATA, num_samples=4), set(range(10))),
        (lambda: SequentialSampler(range(3)), {0, 1, 2}),
        (lambda: MySequence(DATA), set(range(10))),
        (lambda: DistributedSampler(DATA, 3, 1), set(range(10))),
        (lambda: Drawing(np.random.default_rng(3)), set(range(10))),
        (lambda: Drawing(np.random.RandomState(3)), set(range(10))),
        (lambda: Drawing(random.Random(3)), set(range(10))),
        (lambda: Wrapping(Drawing(random.Random(3))), set(range(10))),
    ],
)
def test_any_sampler_orders_an_epoch_alike_on_all_ranks_whenever_it_is_asked(
    make: Callable[[], Any], ids: set[int]
) -> None:
    def order(epoch: int, skips: int = 0) -> list[int]:
        sampler = make()
        for _ in range(skips):
            list(sampler)  # It has drawn before, as on a rank that has been there for longer.
        loader = MicroBatchLoader(
            DataLoader(Numbers(10), batch_size=1, sampler=sampler), num_micro_batches=1, seed=5
        )
        loader.take_span(Cursor(epoch, 0), (0, 1))
        return [taken(loader)[3][0] for _ in range(loader.plan.steps)]

    first, second = order(0), order(1)
    assert set(first) <= ids
    assert order(0, skips=2) == first
    assert order(1) == second
    is_shuffled = "Sequen" not in type(make()).__name__
    assert (first != second) is is_shuffled or len(ids) <= 3


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(Endless(), batch_size=2), "Endless is an IterableDataset.*__getitem__"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(Endless(), batch_size=None), "IterableDataset"),
        (
            DataLoader(DATA, sampler=iter([1])),
            r"sampler \(list_iterator\) does not know its length",
        ),
        (DataLoader(DATA, sampler=[]), r"sampler \(list\) is empty"),
        (DataLoader(Unmeasured()), r"Unmeasured\) does not know its length.*__len__"),
        (DataLoader(TensorDataset(torch.zeros(0))), "dataset is empty"),
        (DataLoader(DATA, num_workers=1, prefetch_factor=0), "prefetch_factor=0"),
        (DataLoader(DATA, batch_size=6, drop_last=True), "drop_last leaves no step"),
    ],
)
def test_what_cannot_be_asked_for_by_number_is_refused(loader: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MicroBatchLoader(loader, num_micro_batches=2, seed=0)


def test_a_sampler_whose_length_is_another_is_refused_when_it_is_read() -> None:
    loader = MicroBatchLoader(
        DataLoader(DATA, batch_size=2, sampler=Lying(DATA)), num_micro_batches=2, seed=0
    )
    loader.take_span(Cursor(), (0, 1))
    with pytest.raises(UsageError, match=r"Lying\) gave 10 samples in epoch 0.* was 12"):
        loader.next()


@pytest.mark.parametrize(
    ("cursor", "held"),
    [
        (Cursor(0, 3), (0, 1)),
        (Cursor(0, -1), (0, 1)),
        (Cursor(), (0, 3)),
        (Cursor(), (1, 1)),
        (Cursor(), (-1, 1)),
    ],
)
def test_a_deal_of_what_does_not_exist_is_a_bug(cursor: Cursor, held: tuple[int, int]) -> None:
    loader = MicroBatchLoader(DataLoader(DATA, batch_size=2), num_micro_batches=2, seed=0)
    with pytest.raises(InvariantViolation):
        loader.take_span(cursor, held)


def test_nothing_is_read_before_a_deal_or_after_the_end() -> None:
    loader = MicroBatchLoader(DataLoader(DATA), num_micro_batches=1, seed=0)
    with pytest.raises(InvariantViolation, match="before micro-batches were dealt"):
        loader.next()
    loader.take_span(Cursor(), (0, 1))
    loader.next()
    loader.close()
    loader.close()
    with pytest.raises(InvariantViolation, match="after it was closed"):
        loader.next()


def test_subsets_with_other_samples_are_told_apart() -> None:
    """Such as of `random_split` with a seed of each rank's own."""

    def print_of(dataset: Dataset[Any], epoch: int = 0) -> int:
        loader = DataLoader(dataset, batch_size=2, shuffle=True)
        return MicroBatchLoader(loader, num_micro_batches=1, seed=0).order_print(epoch)

    some, others = Subset(DATA, [1, 2, 3]), Subset(DATA, [1, 2, 4])
    assert print_of(some) == print_of(Subset(DATA, [1, 2, 3]), epoch=1) != print_of(others)
    assert print_of(Subset(some, [0, 1])) not in (print_of(Subset(others, [0, 1])), 0)
    assert print_of(DATA) == 0

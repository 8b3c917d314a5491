"""A plain training loop over a dataset that can only be iterated over, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic import train
from elastic.errors import UsageError
from elastic.train.torch import prepare_data_loader
from elastic.worker.process.local import NoNextGroup
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    STEPS,
    Loop,
    V,
    called,
    data,
    each,
    inside_a_run,
    near,
    network,
    square,
    whole_batches,
)

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)


class Once(IterableDataset[Any]):
    """The samples of the other tests, one after the other."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        samples = data()
        for number in range(self.size):
            yield samples[number]


def loop_of(dataset: Any, **options: Any) -> Loop:
    loop = Loop.make()
    loader = DataLoader(dataset, batch_size=SIZE, **options)
    loop.loader = prepare_data_loader(loader, global_batch_size=GLOBAL)
    return loop


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    loop = loop_of(Once(5), drop_last=True)

    def body(batch: Any) -> None:
        square(loop.model(batch[1]), batch[2]).backward()
        loop.optimizer.step()

    with pytest.raises(UsageError, match="drop_last leaves no such step: step 0 of epoch 0 has 5"):
        each(loop.batches(1), body)


def test_a_loader_that_is_asked_for_its_steps_before_the_loop_knows_of_earlier_calls() -> None:
    resume, seen = None, []
    for generation in (1, 2):
        with called(NoNextGroup(), resume, generation) as engine:
            loop = loop_of(Once())
            assert loop.loader.steps_per_epoch() == (STEPS if resume is not None else 0)
            for _ in train.epochs(1):
                for number, x, y in loop.loader:
                    seen += number.tolist()
                    square(loop.model(x), y).backward()
                    loop.optimizer.step()
                resume = engine.resume_state()
    assert sorted(seen) == [*range(SAMPLES)]


def test_there_is_no_length_before_the_end() -> None:
    loop = loop_of(Once())
    with pytest.raises(TypeError, match=r"has no len\(\); count steps by"):
        len(loop.loader)


@pytest.mark.parametrize(
    ("streams", "dataset", "says"),
    [
        ("card", Once(), r"no such way; expected None, or .* one of count, shard, worker"),
        ("worker", data(), "none to be iterated over"),
    ],
)
def test_ways_to_cut_are_named(streams: str, dataset: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        prepare_data_loader(DataLoader(dataset), streams=streams)


def test_a_plain_loop_computes_what_one_big_batch_would() -> None:
    loop, twin = loop_of(Once()), network()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    ids: list[list[int]] = []
    steps = []
    for number, x, y in loop.batches(2):
        loop.optimizer.zero_grad()
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        ids.append(number.tolist())
        steps.append(train.get_context().get_step())
    for _, x, y in whole_batches() * 2:
        plain.zero_grad()
        square(twin(x), y).backward()
        plain.step()
    assert near(loop.plain, twin)
    assert len(ids) == 2 * STEPS * V
    # 22 samples dealt out like cards: the last step has 6, and the last two streams one of them.
    assert ids[: 2 * V] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert ids[2 * V : 3 * V] == [[16, 20], [17, 21], [18], [19]]
    assert steps[-V:] == [2, 2, 2, 3]
    context = train.get_context()
    assert context.get_global_batch_size() == GLOBAL
    assert context.get_micro_batch_size() == SIZE
    assert context.get_num_micro_batches() == V

"""A plain training loop over a dataset that can only be iterated over, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import Standing, next_places, plan_transfers
from elastic.errors import UsageError
from elastic.train.session import require_engine
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    STEPS,
    Loop,
    V,
    data,
    each,
    inside_a_run,
    inside_again,
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


def test_micro_batches_without_samples_count_for_nothing() -> None:
    size = 2 * GLOBAL + 2

    def trained(dataset: Any) -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = prepare_model(inner)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = DataLoader(dataset, batch_size=1)
        loader = prepare_data_loader(plain, global_batch_size=GLOBAL)
        seen = []
        for _ in train.epochs(1):
            for number, x, y in loader:
                # Of two samples each, so that BatchNorm can train.
                square(model(torch.cat([x, 2 * x])), torch.cat([y, 2 * y])).backward()
                optimizer.step()
                train.log(number=number.float().mean(), one=1.0)
                seen.append(number.tolist())
        assert train.get_logged() == {"number": (size - 1 + size - 2) / 2, "one": 1.0}
        assert len(seen) == 3 * GLOBAL
        return inner

    streamed = trained(Once(size))
    with inside_again():
        # The last step has the same two samples, as other ones of its micro-batches.
        numbered = trained(Subset(data(), range(size)))
    assert near(streamed, numbered)
    for one, other in zip(streamed.buffers(), numbered.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    loop, seen = loop_of(Once(), drop_last=True), []
    for number, x, y in loop.batches(1):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        seen += number.tolist()
    assert sorted(seen) == list(range(2 * GLOBAL))


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    loop = loop_of(Once(5), drop_last=True)

    def body(batch: Any) -> None:
        square(loop.model(batch[1]), batch[2]).backward()
        loop.optimizer.step()

    with pytest.raises(UsageError, match="drop_last leaves no such step: step 0 of epoch 0 has 5"):
        each(loop.batches(1), body)


def test_there_is_no_length_before_the_end() -> None:
    loop = loop_of(Once())
    with pytest.raises(TypeError, match=r"has no len\(\); count steps by"):
        len(loop.loader)


def test_a_run_goes_on_where_states_say() -> None:
    loop, seen = loop_of(Once()), []
    engine = require_engine("this test")
    # As from a checkpoint of the end of an epoch: its loop has no step left, what follows it has.
    engine.cursor = Cursor(0, STEPS)
    engine.streams.put({"ends": [[0, STEPS]], "snapshots": []})
    passes = 0
    for _ in train.epochs(2):
        for number, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            seen += number.tolist()
        passes += 1
    assert passes == 2
    assert sorted(seen) == list(range(SAMPLES))


def test_evaluation_sees_all_of_an_iterable_dataset() -> None:
    loop = loop_of(Once())
    with torch.no_grad():
        for _ in train.epochs(1):
            assert sum(len(number) for number, _, _ in loop.loader) == SAMPLES


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


def at(epoch: int, step: int, steps: int, *, inside: bool = True) -> Standing:
    return Standing(True, Cursor(epoch, step), steps=steps, is_inside=inside)


@pytest.mark.parametrize(
    ("standings", "senders", "expected"),
    [
        # Nobody knows the end: all go on with the next step.
        ([at(1, 4, 0), at(1, 4, 0)], (), [(1, 5), (1, 5)]),
        ([at(1, 4, 0), at(1, 3, 0)], ((1, 0),), [(1, 5), (1, 5)]),
        # One has heard of the end with the last step, the other has missed it.
        ([at(1, 4, 4), at(1, 3, 0)], ((1, 0),), [(1, 4), (1, 4)]),
        ([at(1, 4, 4), at(1, 4, 4)], (), [(1, 4), (1, 4)]),
        # One is in the next epoch, whose end nobody knows.
        ([at(2, 0, 0), at(1, 4, 4)], (), [(2, 1), (1, 4)]),
    ],
)
def test_who_is_how_far_is_clear_without_knowing_the_end(
    standings: list[Standing], senders: tuple[tuple[int, int], ...], expected: list[tuple[int, int]]
) -> None:
    transfers = plan_transfers(standings).value
    assert transfers.sender_of == senders
    places = next_places(standings, transfers)
    assert [(one.epoch, one.step) for one in places] == expected

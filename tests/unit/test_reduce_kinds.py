"""The reducer without a group: types, ragged steps, several optimizers, buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.errors import InvariantViolation
from elastic.worker.reduce.reducer import OWN, ROW
from elastic.worker.reduce.step_share import SHARE_NUMBERS
from tests.unit.reduce_under_test import (
    SIZE,
    Make,
    batch,
    gradients,
    iterations,
    mean_square,
    mlp,
    one_step,
    reducers,
    same,
    share_of,
    unit_of,
    written_out,
)

_make = pytest.fixture(name="make")(reducers)


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("consistency", ["bitwise", "samples"])
@pytest.mark.parametrize("counts", [(4, 4, 3), (1, 2, 1, 2), (0, 1), (0, 1, 0, 0, 1)])
def test_every_sample_counts_the_same_in_a_ragged_step(
    make: Make, consistency: str, counts: tuple[int, ...]
) -> None:
    model = mlp()
    unit = unit_of(model)

    def loss(which: nn.Module, number: int) -> torch.Tensor:
        # An empty micro-batch is a mean over nothing: all gradients are not a number.
        return which(batch(number, counts[number])).square().mean()  # type: ignore[no-any-return]

    found = one_step(make([unit], consistency=consistency), unit, model, loss, counts)
    right = written_out(model, loss, counts)
    if consistency == "bitwise":
        assert same(found, right)
    together = torch.cat([batch(number, count) for number, count in enumerate(counts)])
    twin = mlp()
    twin(together).square().mean().backward()
    for one, other in zip(found, gradients(twin), strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- void, buffers, rows


def test_what_is_abandoned_leaves_no_gradient_and_no_buffer_changed(make: Make) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    unit = unit_of(model)
    reducer = make([unit], [model])
    right = written_out(model, mean_square, (SIZE,) * 2)
    before = [one.clone() for one in model.buffers()]
    for last in (0, 1):
        for number in iterations(reducer, (SIZE,) * 2):
            mean_square(model, number).backward()
            if number == last:
                reducer.abandon()
                assert not any(one is None for one in gradients(model)), "loops look at them"
                mean_square(model, number).backward()
                assert not any(one is None for one in gradients(model))
                assert not reducer.settle(unit)
                assert not reducer.settle_buffers()
                break
        reducer.attach(None)
        assert gradients(model) == [None] * 6
        assert same(list(model.buffers()), before)
    assert same(one_step(reducer, unit, model, mean_square, (SIZE,) * 2), right)


def test_rows_come_back_and_are_limited(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    reducer.begin_step(share_of((4,)), [1.0, 2.5])
    reducer.begin_micro_batch(0)
    mean_square(model, 0).backward()
    assert [row[:3] for row in reducer.rows] == [(1.0, 2.5, 0.0)]
    assert reducer.bytes_sent == 0
    reducer.begin_step(share_of((4,)), [1.0] * ROW)
    reducer.begin_micro_batch(0)
    with pytest.raises(InvariantViolation, match=f"{OWN + SHARE_NUMBERS + ROW} numbers"):
        mean_square(model, 0).backward()

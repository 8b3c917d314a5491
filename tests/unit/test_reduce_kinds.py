"""The reducer without a group: types, ragged steps, several optimizers, buffers."""

from __future__ import annotations

import pytest
from torch import nn

from elastic.errors import InvariantViolation
from elastic.worker.reduce import OWN, ROW
from elastic.worker.share import TOLD
from tests.unit.reduce_under_test import (
    SIZE,
    Make,
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
    with pytest.raises(InvariantViolation, match=f"{OWN + TOLD + ROW} numbers"):
        mean_square(model, 0).backward()

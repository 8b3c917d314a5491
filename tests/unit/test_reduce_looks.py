"""The reducer without a group: what loops find in `p.grad` before a step is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.reduce_under_test import (
    SIZE,
    Make,
    gradients,
    iterations,
    mean_square,
    mlp,
    reducers,
    same,
    unit_of,
    written_out,
)

_make = pytest.fixture(name="make")(reducers)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


LOOKS: list[Callable[[Any], object]] = [
    lambda p: p.grad.norm(),
    lambda p: p.grad.data.clamp_(-0.001, 0.001),
    lambda p: p.grad.add_(torch.nan),
    lambda p: p.grad.div_(p.grad.norm() * 0),
    halve,
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_a_loop_makes_of_gradients_counts_once_they_are_the_steps(
    make: Make, look: Callable[[Any], object], calls: int, set_to_none: bool
) -> None:
    """As in loops that log norms, or clip by hand, without asking whether there is a gradient."""
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=100)
    right = written_out(model, lambda m, n: mean_square(m, n) * calls, (SIZE,) * 3)
    for _ in range(2):
        for number in iterations(reducer, (SIZE,) * 3):
            model.zero_grad(set_to_none)
            reducer.unit_zeroed(unit)
            for _ in range(calls):
                mean_square(model, number).backward()
                if number < 2:
                    for parameter in model.parameters():
                        look(parameter)
            if number < 2:
                reducer.unit_stepped(unit)
        assert reducer.settle(unit)
        assert close(gradients(model), right) if calls > 1 else same(gradients(model), right)
        assert reducer.settle_buffers()


def test_a_micro_batch_shows_its_own_gradient_until_the_step_is_complete(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    for number in iterations(make([unit]), (SIZE,) * 2):
        loss = mean_square(model, number)
        own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        if number == 0:
            assert same(gradients(model), own)


def close(found: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> bool:
    return all(torch.allclose(a, b) for a, b in zip(found, right, strict=True) if a is not None)  # type: ignore[arg-type]


def test_gradients_that_a_loop_has_put_there_itself_are_there_until_the_next_iteration(
    make: Make,
) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    for number in iterations(reducer, (SIZE,) * 2):
        own = torch.autograd.grad(mean_square(model, number), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), own, strict=True):
            parameter.grad = gradient.clone()
        if number == 0:
            reducer.unit_stepped(unit)
            assert same(gradients(model), own)
    assert reducer.settle(unit)
    assert same(gradients(model), written_out(model, mean_square, (SIZE,) * 2))


def test_zeros_of_a_void_step_take_the_memory_of_the_largest_parameter(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    for number in iterations(reducer, (SIZE,)):
        mean_square(model, number).backward()
        model.zero_grad()
        reducer.abandon()
    shown = [p.grad for p in model.parameters() if p.grad is not None]
    assert [one.shape for one in shown] == [p.shape for p in model.parameters()]
    assert not any(one.any() for one in shown)
    assert len({one.untyped_storage().data_ptr() for one in shown}) == 1

"""The gradient engine in one process: what a plain loop finds in `p.grad`, and when.

The oracle is plain autograd: the gradient of each micro-batch by itself, added in the order of the
tree by hand. What W ranks make of the same is in tests/integration/test_reduce_group.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.worker.reduce import Unit
from tests.unit.reducer_under_test import (
    Branches,
    assert_same_bits,
    data,
    gradients_of,
    mean_of,
    mlp,
    plain,
    reducing,
    share_of,
    squares,
    step,
    unit_of,
)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_a_steps_gradient_is_the_sum_in_the_trees_order_over_v(
    num_micro_batches: int, bucket_bytes: int
) -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(num_micro_batches)
    wanted = mean_of(units, squares(model), share)
    with reducing(units, bucket_bytes=bucket_bytes) as reducer:
        for _ in range(3):
            assert_same_bits(step(reducer, units, share, squares(model)), wanted)


@pytest.mark.parametrize("counts", [(4, 4, 4, 1), (3, 3, 2, 3), (1, 0, 1, 0), (0, 0, 0, 1)])
def test_micro_batches_of_a_ragged_step_count_by_their_samples(counts: tuple[int, ...]) -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(4, counts)
    wanted = mean_of(units, squares(model), share)
    with reducing(units) as reducer:
        found = step(reducer, units, share, squares(model))
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_without_samples_counts_zero_whatever_backward_gave(empty: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    units = [Unit("all", [("weight", weight)])]
    share = share_of(3, [0 if number == empty else 4 for number in range(3)])

    def backward(number: int) -> None:
        (weight * (float("inf") if number == empty else 3.0)).sum().backward()

    with reducing(units) as reducer:
        assert_same_bits(step(reducer, units, share, backward), [torch.full((2,), 3.0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_added_in_the_type_of_their_parameters(dtype: torch.dtype) -> None:
    model = mlp(dtype)
    units, share = [unit_of(model)], share_of(3)
    wanted = mean_of(units, squares(model, dtype), share)
    with reducing(units) as reducer:
        found = step(reducer, units, share, squares(model, dtype))
    assert_same_bits(found, wanted)
    assert all(one is not None and one.dtype is dtype for one in found)


def test_samples_consistency_is_the_same_mean() -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(5)
    wanted = mean_of(units, squares(model), share)
    with reducing(units, consistency="samples") as reducer:
        for _ in range(2):
            found = step(reducer, units, share, squares(model))
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)


def test_nothing_is_left_of_a_step_that_was_begun_anew() -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(4)
    wanted = mean_of(units, squares(model), share)
    with reducing(units) as reducer:
        for micro_batches in (1, 2, 4):
            reducer.begin_step(share)
            for number in range(micro_batches):
                reducer.begin_micro_batch(number)
                squares(model)(number + 10)
            reducer.abandon()
            reducer.attach(None)
            assert_same_bits(step(reducer, units, share, squares(model)), wanted)


def test_before_the_last_micro_batch_there_is_no_gradient_to_be_clipped_or_stepped() -> None:
    model = mlp()
    unit, share = unit_of(model), share_of(2)
    with reducing([unit]) as reducer:
        reducer.begin_step(share)
        reducer.begin_micro_batch(0)
        squares(model)(0)
        assert gradients_of([unit]) == [None] * 4
        reducer.begin_micro_batch(1)
        squares(model)(1)
        # Already by the end of backward, so that clipping sees the whole step's.
        assert None not in gradients_of([unit])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_every_iteration_changes_nothing(set_to_none: bool) -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(3)
    wanted = mean_of(units, squares(model), share)

    def zero_grad() -> None:
        model.zero_grad(set_to_none=set_to_none)

    def zero_first(number: int) -> None:
        zero_grad()
        squares(model)(number)

    with reducing(units) as reducer:
        for _ in range(2):
            assert_same_bits(step(reducer, units, share, squares(model), zero_grad), wanted)
            assert_same_bits(step(reducer, units, share, zero_first), wanted)


def test_outside_of_steps_gradients_are_the_users() -> None:
    model = mlp()
    units = [unit_of(model)]
    wanted = plain(units, squares(model), 0)
    with reducing(units) as reducer:
        assert_same_bits(plain(units, squares(model), 0), wanted)
        step(reducer, units, share_of(2), squares(model))
        reducer.rest()
        assert_same_bits(plain(units, squares(model), 0), wanted)
    assert_same_bits(plain(units, squares(model), 0), wanted)


def test_gradients_of_a_unit_that_has_stepped_stay_where_they_are() -> None:
    """The generator's loss of a GAN reaches the discriminator too, after it has stepped."""
    one, other = mlp(), nn.Linear(3, 1)
    units, share = [unit_of(one, "one"), unit_of(other, "other")], share_of(2)
    with reducing(units) as reducer:
        reducer.begin_step(share)
        for number in (0, 1):
            reducer.begin_micro_batch(number)
            other(one(data(number, 4, 5)).detach()).sum().backward()
            if number == 1:
                assert reducer.settle(units[1])
            reducer.unit_stepped(units[1])
            other.zero_grad()
            other(one(data(number, 4, 5))).sum().backward()
            assert None not in gradients_of([units[1]])
            other.zero_grad()
        assert reducer.settle(units[0])
        found = gradients_of([units[0]])

    def backward(number: int) -> None:
        other(one(data(number, 4, 5))).sum().backward()

    assert_same_bits(found, mean_of(units, backward, share)[:4])


def test_an_abandoned_iteration_drops_its_gradients() -> None:
    model = mlp()
    unit = unit_of(model)
    with reducing([unit]) as reducer:
        reducer.begin_step(share_of(2))
        reducer.begin_micro_batch(0)
        squares(model)(0)
        reducer.abandon()
        squares(model)(1)
        assert gradients_of([unit]) == [None] * 4
        assert not reducer.settle(unit)
        assert not reducer.settle_buffers()


def test_control_numbers_come_back_by_rank() -> None:
    model = mlp()
    unit = unit_of(model)
    with reducing([unit]) as reducer:
        reducer.begin_step(share_of(1), [1.0, 2.5])
        reducer.begin_micro_batch(0)
        squares(model)(0)
        assert reducer.settle(unit)
        assert len(reducer.rows) == 1
        assert reducer.rows[0][:2] == (1.0, 2.5)


def test_an_error_in_backward_reaches_the_user_as_it_is() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    model = mlp()
    units = [unit_of(model)]
    wanted = mean_of(units, squares(model), share_of(1))
    with reducing(units) as reducer:
        reducer.begin_step(share_of(1))
        reducer.begin_micro_batch(0)
        hidden = Fails.apply(model[0](data(0, 4, 5)))
        with pytest.raises(RuntimeError, match="mine"):
            model[2](hidden).sum().backward()
        assert reducer.broken is None
        assert_same_bits(step(reducer, units, share_of(1), squares(model)), wanted)


def test_parameters_that_no_micro_batch_has_used_have_no_gradient() -> None:
    model = Branches()
    units, share = [unit_of(model)], share_of(3)
    uses = [(0,), (0, 1), (0,)]

    def backward(number: int) -> None:
        model(data(number, 4, 5), uses[number]).backward()

    wanted: list[torch.Tensor | None] = [*mean_of(units, backward, share)]
    wanted[4:] = [None, None]
    with reducing(units) as reducer:
        for _ in range(2):
            assert_same_bits(step(reducer, units, share, backward), wanted)


def test_what_only_a_micro_batch_without_samples_has_used_has_no_gradient() -> None:
    model = Branches()
    units = [unit_of(model)]
    uses = [(0, 1), (0, 1, 2)]

    def backward(number: int) -> None:
        model(data(number, 4, 5), uses[number]).backward()

    with reducing(units) as reducer:
        found = step(reducer, units, share_of(2, [4, 0]), backward)
    assert [one is None for one in found] == [False] * 4 + [True] * 2


def test_parameters_that_are_frozen_later_have_no_gradient() -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(2)
    with reducing(units) as reducer:
        step(reducer, units, share, squares(model))
        model[0].requires_grad_(False)
        found = step(reducer, units, share, squares(model))
    assert [one is None for one in found] == [True, True, False, False]


def test_a_backward_that_reaches_nothing_leaves_no_gradients() -> None:
    model = mlp()
    units = [unit_of(model)]
    with reducing(units) as reducer:
        found = step(reducer, units, share_of(2), lambda number: None)
    assert found == [None] * 4


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_several_backward_calls_of_an_iteration_add_up(num_micro_batches: int) -> None:
    model = Branches()
    units, share = [unit_of(model)], share_of(num_micro_batches)

    def backward(number: int) -> None:
        model(data(number, 4, 5), (0,)).backward()
        model(data(number + 10, 4, 5), (0, 1)).backward()
        model(data(number + 20, 4, 5), (2,)).backward()

    wanted = mean_of(units, backward, share)
    with reducing(units) as reducer:
        for _ in range(3):
            assert_same_bits(step(reducer, units, share, backward), wanted)

"""The gradient engine in one process: what a plain loop finds in `p.grad`, and when: the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError
from elastic.worker.buckets import lay_out
from elastic.worker.reduce import Share, Unit
from tests.unit.reducer_under_test import (
    Least,
    Replaces,
    assert_same_bits,
    data,
    mean_of,
    mlp,
    normed,
    reducing,
    share_of,
    squares,
    step,
    unit_of,
)


def test_more_backward_calls_than_in_the_first_iterations_are_refused() -> None:
    model = mlp()
    units = [unit_of(model)]
    with reducing(units) as reducer:
        for _ in range(2):
            step(reducer, units, share_of(1), squares(model))
        reducer.begin_step(share_of(1))
        reducer.begin_micro_batch(0)
        squares(model)(0)
        with pytest.raises(UsageError, match="more often"):
            squares(model)(1)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointed_parts_give_the_same_gradients(is_reentrant: bool) -> None:
    model = mlp()

    def backward(number: int) -> None:
        x = data(number, 4, 5).requires_grad_()
        hidden = checkpoint(model[0], x, use_reentrant=is_reentrant)
        checkpoint(model[1:], hidden, use_reentrant=is_reentrant).square().mean().backward()

    units, share = [unit_of(model)], share_of(3)
    wanted = mean_of(units, squares(model), share)
    with reducing(units) as reducer:
        for _ in range(2):
            assert_same_bits(step(reducer, units, share, backward), wanted)


def test_parts_that_share_parameters_can_be_checkpointed_unless_reentrant() -> None:
    shared = nn.Linear(5, 5)

    def backward(number: int, is_reentrant: bool) -> None:
        x = data(number, 4, 5).requires_grad_()
        for _ in range(3):
            x = checkpoint(shared, x, use_reentrant=is_reentrant)
        x.square().mean().backward()

    units, share = [unit_of(shared)], share_of(2)
    wanted = mean_of(units, lambda number: backward(number, False), share)
    with reducing(units) as reducer:
        for _ in range(2):
            found = step(reducer, units, share, lambda number: backward(number, False))
            assert_same_bits(found, wanted)
    with reducing(units) as reducer, pytest.raises(UsageError, match="use_reentrant=False"):
        step(reducer, units, share, lambda number: backward(number, True))


def test_tied_parameters_are_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    units, share = [unit_of(model)], share_of(3)
    wanted = mean_of(units, squares(model), share)
    assert len(wanted) == 1
    with reducing(units) as reducer:
        assert_same_bits(step(reducer, units, share, squares(model)), wanted)


def test_a_compiled_module_gives_its_gradients() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    units, share = [unit_of(model)], share_of(2)
    wanted = mean_of(units, squares(model), share)
    with reducing(units) as reducer:
        for _ in range(2):
            found = step(reducer, units, share, squares(compiled))
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)


def test_a_sparse_gradient_is_refused_by_its_parameters_name() -> None:
    words = nn.Embedding(6, 2, sparse=True)
    units = [unit_of(words)]
    with reducing(units) as reducer, pytest.raises(UsageError, match=r"parameter weight .*sparse"):
        step(reducer, units, share_of(1), lambda _: words(torch.tensor([1])).sum().backward())


def test_gradients_asked_for_by_autograd_grad_are_none_of_ours() -> None:
    model = mlp()
    units, share = [unit_of(model)], share_of(2)
    wanted = mean_of(units, squares(model), share)

    def backward(number: int) -> None:
        x = data(number, 4, 5).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        squares(model)(number)

    with reducing(units) as reducer:
        assert_same_bits(step(reducer, units, share, backward), wanted)


def test_buckets_are_cut_by_unit_and_type_from_the_last_parameter_on() -> None:
    def parameters(*types: torch.dtype) -> list[tuple[str, nn.Parameter]]:
        made = [nn.Parameter(torch.zeros(100, dtype=one)) for one in types]
        return [(str(number), one) for number, one in enumerate(made)]

    half, single = torch.bfloat16, torch.float32
    units = [Unit("a", parameters(single, half, single)), Unit("b", parameters(single))]
    buckets = lay_out(units, bucket_bytes=1000)
    assert [(b.unit, b.dtype, b.names) for b in buckets] == [
        (0, single, ["2", "0"]),
        (0, half, ["1"]),
        (1, single, ["0"]),
    ]
    assert [b.names for b in lay_out(units[:1], bucket_bytes=400)] == [["2"], ["1"], ["0"]]


@pytest.mark.parametrize("counts", [(4, 4, 4), (4, 2, 0)])
def test_batch_norms_statistics_become_the_mean_over_micro_batches(counts: tuple[int, ...]) -> None:
    model, share = normed(), share_of(3, counts)
    units = [unit_of(model)]
    wanted: dict[str, torch.Tensor] = {}
    for number, count in enumerate(counts):
        alone = normed()
        squares(alone)(number)
        for name in ("running_mean", "running_var"):
            value = getattr(alone[1], name).double() * count
            wanted[name] = wanted.get(name, torch.zeros_like(value)) + value
    with reducing(units, [model]) as reducer:
        step(reducer, units, share, squares(model))
        for name, total in wanted.items():
            assert torch.equal(getattr(model[1], name), (total / share.samples).float())
        assert int(model[1].num_batches_tracked) == 1
        step(reducer, units, share, squares(model))
        assert int(model[1].num_batches_tracked) == 2


def test_a_void_step_puts_the_buffers_back() -> None:
    model = normed()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with reducing([unit_of(model)], [model]) as reducer:
        reducer.begin_step(share_of(2))
        for number in (0, 1):
            reducer.begin_micro_batch(number)
            squares(model)(number)
        reducer.abandon()
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_buffers_are_put_back_where_the_group_is_over_before_the_commit() -> None:
    model = normed()
    units = [unit_of(model)]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with reducing(units, [model]) as reducer:
        reducer.begin_step(share_of(1))
        reducer.begin_micro_batch(0)
        squares(model)(0)
        assert reducer.settle(units[0])
        assert not reducer.settle_buffers(lambda: False)
        reducer.abandon()
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_buffers_in_evaluation_stay_as_they_are() -> None:
    model = normed().eval()
    units = [unit_of(model)]
    before = {name: (buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    with reducing(units, [model]) as reducer:
        step(reducer, units, share_of(2), squares(model))
    for name, buffer in model.named_buffers():
        assert torch.equal(before[name][0], buffer)
        assert before[name][1] == buffer._version


def test_small_float16_gradients_survive_a_ragged_step() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    units = [Unit("all", [("weight", weight)])]
    share = Share(0, 1, 4, 256, (255,) * 4)
    with reducing(units) as reducer:
        (found,) = step(reducer, units, share, lambda _: (weight * 3e-5).sum().backward())
    assert found is not None
    assert abs(float(found) / 3e-5 - 1) < 2e-3


@pytest.mark.parametrize("left", [0.0, 1.0])
def test_what_an_earlier_step_left_in_grad_is_not_part_of_this_one(left: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    units, share = [Unit("all", [("weight", weight)])], share_of(2)
    with reducing(units) as reducer:
        weight.grad = torch.full((2,), left)

        def backward(_: int) -> None:
            (weight * torch.tensor([-0.0, 1.0])).sum().backward()

        assert_same_bits(step(reducer, units, share, backward), [torch.tensor([-0.0, 1.0])])


def test_a_buffer_that_forward_replaces_becomes_the_mean_like_any_other() -> None:
    model = Replaces()
    units = [unit_of(model)]

    def backward(number: int) -> None:
        model(torch.full((4, 2), float(number + 1))).sum().backward()

    with reducing(units, [model]) as reducer:
        step(reducer, units, share_of(2), backward)
        assert model.mean.tolist() == [0.75, 0.75]
        step(reducer, units, share_of(2), backward)
        assert model.mean.tolist() == [1.125, 1.125]
    assert len(model.cache) == 4


def test_an_infinite_buffer_of_a_micro_batch_without_samples_counts_zero() -> None:
    model = Least()
    units = [unit_of(model)]

    def backward(number: int) -> None:
        x = torch.full((4, 2), float("inf") if number == 2 else float(number + 1))
        model(x).nan_to_num().sum().backward()

    with reducing(units, [model]) as reducer:
        step(reducer, units, share_of(3, [4, 4, 0]), backward)
    assert model.least.item() == 1.5


@pytest.mark.parametrize("only", [1])
def test_a_buffer_that_only_some_micro_batches_change_is_refused(only: int) -> None:
    model = Least()
    units = [unit_of(model)]

    def backward(number: int) -> None:
        model(torch.ones(4, 2), keeps=number == only).sum().backward()

    with reducing(units, [model]) as reducer, pytest.raises(UsageError, match="in some micro-b"):
        step(reducer, units, share_of(2), backward)

"""The reducer without a group: types, ragged steps, several optimizers, buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from elastic.errors import InvariantViolation
from elastic.worker.reduce import OWN, ROW, Unit
from elastic.worker.share import TOLD
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
    tree_sum,
    unit_of,
    written_out,
)

_make = pytest.fixture(name="make")(reducers)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_add_in_their_own_precision(make: Make, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    unit = unit_of(model)
    for counts in ((SIZE,) * 5, (4, 3, 3)):
        reducer = make([unit])
        right = written_out(model, mean_square, counts)
        assert same(one_step(reducer, unit, model, mean_square, counts), right)
        reducer.close()
        model.zero_grad()


def test_types_may_be_mixed(make: Make) -> None:
    model = mlp()
    model[0].to(torch.bfloat16)

    def loss(which: nn.Sequential, number: int) -> torch.Tensor:
        hidden = which[0](batch(number).to(torch.bfloat16)).float()
        return which[1:](hidden).square().mean()  # type: ignore[no-any-return]

    unit = unit_of(model)
    right = written_out(model, loss, (SIZE,) * 3)
    assert same(one_step(make([unit]), unit, model, loss, (SIZE,) * 3), right)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_gradients_lie_in_memory_as_their_parameters_do(make: Make, bucket_bytes: int) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
        model[2].weight = nn.Parameter(torch.randn(16, 1).t())
        return model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(number))
        return model(x).square().mean()  # type: ignore[no-any-return]

    model = layers()
    unit = unit_of(model)
    right = written_out(model, loss, (SIZE,) * 3)
    assert same(
        one_step(make([unit], bucket_bytes=bucket_bytes), unit, model, loss, (SIZE,) * 3), right
    )
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())
    # It goes through both side by side, and asks for no strides.
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    with torch.no_grad():
        for parameter, before, gradient in zip(
            model.parameters(), layers().parameters(), right, strict=True
        ):
            assert gradient is not None
            assert torch.allclose(parameter, before - 0.1 * gradient)


def test_small_half_precision_gradients_survive_a_ragged_step(make: Make) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    unit = Unit("one", [("weight", weight)])
    reducer = make([unit])
    reducer.begin_step(share_of((500, 499), size=500))
    for number in range(2):
        reducer.begin_micro_batch(number)
        (weight * 1e-4).sum().backward()
    assert reducer.settle(unit)
    assert weight.grad is not None
    assert torch.allclose(weight.grad.float(), torch.full((3,), 1e-4), rtol=1e-2)


def test_a_compiled_model_gives_the_same(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    compiled = torch.compile(model, backend="aot_eager")

    def loss(_: nn.Module, number: int) -> torch.Tensor:
        return compiled(batch(number)).square().mean()  # type: ignore[no-any-return]

    right = written_out(model, mean_square, (SIZE,) * 3)
    found = one_step(make([unit]), unit, model, loss, (SIZE,) * 3)
    for one, other in zip(found, right, strict=True):
        assert one is not None
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


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


# ---------------------------------------------------------------- several units


class Gan:
    """Two models with an optimizer each; either may be stepped first."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.maker, self.judge = nn.Linear(5, 5), nn.Linear(5, 1)

    def judge_loss(self, number: int) -> torch.Tensor:
        x = batch(number)
        fake = self.maker(x).detach()
        return softplus(-self.judge(x)).mean() + softplus(self.judge(fake)).mean()

    def maker_loss(self, number: int) -> torch.Tensor:
        return softplus(-self.judge(self.maker(batch(number)))).mean()


def gan_written_out(size: int) -> list[torch.Tensor]:
    """Return the gradients of both, with the other one left alone."""
    plain = Gan()
    leaves = []
    for number in range(size):
        of_judge = torch.autograd.grad(plain.judge_loss(number), list(plain.judge.parameters()))
        of_maker = torch.autograd.grad(plain.maker_loss(number), list(plain.maker.parameters()))
        leaves.append([*of_judge, *of_maker])
    return [tree_sum(column) / size for column in zip(*leaves, strict=True)]


@pytest.mark.parametrize("size", [1, 3])
def test_what_reaches_a_unit_after_its_step_is_left_in_place(make: Make, size: int) -> None:
    gan = Gan()
    judge, maker = unit_of(gan.judge, "judge"), unit_of(gan.maker, "maker")
    reducer = make([judge, maker])
    for _ in range(3):
        for number in iterations(reducer, (SIZE,) * size):
            is_last = number == size - 1
            gan.judge.zero_grad()
            gan.judge_loss(number).backward()
            if is_last:
                assert reducer.settle(judge)
                found = gradients(gan.judge)
            reducer.unit_stepped(judge)
            own = gradients(gan.judge)
            gan.maker.zero_grad()
            gan.maker_loss(number).backward()
            if is_last:
                assert reducer.settle(maker)
                found += gradients(gan.maker)
            reducer.unit_stepped(maker)
            if not is_last:
                right = torch.autograd.grad(gan.maker_loss(number), list(gan.judge.parameters()))
                together = [a + b for a, b in zip(own, right, strict=True) if a is not None]
                assert same(gradients(gan.judge), together)
        assert same(found, gan_written_out(size))


@pytest.mark.parametrize("size", [1, 3])
def test_what_was_zeroed_before_its_step_does_not_count(make: Make, size: int) -> None:
    gan = Gan()
    judge, maker = unit_of(gan.judge, "judge"), unit_of(gan.maker, "maker")
    reducer = make([judge, maker])
    for _ in range(3):
        for number in iterations(reducer, (SIZE,) * size):
            is_last = number == size - 1
            gan.maker_loss(number).backward()  # Reaches the judge, too.
            if is_last:
                assert reducer.settle(maker)
                of_maker = gradients(gan.maker)
            reducer.unit_stepped(maker)
            gan.judge.zero_grad()
            reducer.unit_zeroed(judge)
            gan.judge_loss(number).backward()
            if is_last:
                assert reducer.settle(judge)
            reducer.unit_stepped(judge)
            reducer.unit_zeroed(judge)  # After its step this is the usual thing to do.
            reducer.unit_zeroed(maker)
        assert same([*gradients(gan.judge), *of_maker], gan_written_out(size))


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


@pytest.mark.parametrize("counts", [(4,), (4, 4, 4), (4, 2), (0, 3)])
def test_statistics_become_the_mean_of_what_each_micro_batch_made_of_them(
    make: Make, counts: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    unit = unit_of(model)
    reducer = make([unit], [model])

    def loss(which: nn.Sequential, number: int) -> torch.Tensor:
        out = which(batch(number)).square().mean()
        if not counts[number]:
            assert which[1].running_var is not None
            which[1].running_var.data.fill_(float("nan"))  # type: ignore[operator]
        return out  # type: ignore[no-any-return]

    for step in range(1, 4):
        base = copy.deepcopy(model)
        made = []
        for number, count in enumerate(counts):
            twin = copy.deepcopy(base)
            loss(twin, number)
            assert twin[1].running_mean is not None
            made.append((count, twin[1]))
        one_step(reducer, unit, model, loss, counts)
        for name in ("running_mean", "running_var"):
            weighted = [getattr(one, name).double() * n for n, one in made if n]
            right = (sum(weighted) / sum(counts)).float()  # type: ignore[union-attr]
            assert torch.allclose(getattr(model[1], name), right, rtol=1e-6)
        assert int(model[1].num_batches_tracked) == step  # type: ignore[arg-type]


def test_statistics_in_evaluation_mode_stay(make: Make) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval()
    unit = unit_of(model)
    before = [one.clone() for one in model.buffers()]
    one_step(make([unit], [model]), unit, model, mean_square)
    assert same(list(model.buffers()), before)


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

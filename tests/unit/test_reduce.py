"""The reducer without a group: its gradients against the same sum written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError
from elastic.worker.reduce import reducer as reduce_module
from elastic.worker.reduce.bucket_exchanges import BucketExchanges
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


# ---------------------------------------------------------------- ways of zeroing


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("consistency", ["bitwise", "samples"])
@pytest.mark.parametrize("zeroing", ["before", "after", "before in place", "after in place", "no"])
def test_the_gradient_is_that_of_all_micro_batches_however_they_are_zeroed(
    make: Make, num_micro_batches: int, consistency: str, zeroing: str
) -> None:
    model, twin = mlp(), mlp()
    unit = unit_of(model)
    reducer = make([unit], [model], consistency=consistency, bucket_bytes=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    counts = (SIZE,) * num_micro_batches
    for step in range(4):

        def loss(which: nn.Module, number: int, step: int = step) -> torch.Tensor:
            return mean_square(which, 100 * step + number)

        right = written_out(twin, loss, counts)
        for number in iterations(reducer, counts):
            if "before" in zeroing:
                optimizer.zero_grad(set_to_none="in place" not in zeroing)
            loss(model, number).backward()
            if number == num_micro_batches - 1:
                assert reducer.settle(unit)
                assert same(gradients(model), right)
                optimizer.step()
            reducer.unit_stepped(unit)
            if "after" in zeroing:
                optimizer.zero_grad(set_to_none="in place" not in zeroing)
        for parameter, gradient in zip(twin.parameters(), right, strict=True):
            parameter.grad = gradient
        plain.step()
    assert same(list(model.parameters()), list(twin.parameters()))


# ---------------------------------------------------------------- unused, frozen, sparse


class Branches(nn.Module):
    """Some branches are taken by some micro-batches only, one by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.never = nn.Linear(5, 3), nn.Linear(5, 3)
        self.even, self.last = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        out = self.always(x)
        out = out + self.even(x) if number % 2 == 0 else out
        return out * self.last(x) if number == 4 else out  # type: ignore[no-any-return]


def branched(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number), number).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_parameter_has_a_gradient_if_any_micro_batch_gave_it_one(
    make: Make, bucket_bytes: int, size: int
) -> None:
    model = Branches()
    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=bucket_bytes)
    for _ in range(2):
        found = one_step(reducer, unit, model, branched, (SIZE,) * size)
        assert same(found, written_out(model, branched, (SIZE,) * size))
        model.zero_grad()
        assert [p.grad for p in model.never.parameters()] == [None, None]


def test_an_empty_micro_batch_gives_no_parameter_a_gradient(make: Make) -> None:
    model = Branches()
    unit = unit_of(model)
    found = one_step(make([unit]), unit, model, branched, (4, 4, 4, 4, 0))
    names = [name for (name, _), one in zip(unit.parameters, found, strict=True) if one is None]
    # The last one alone goes through this branch, and it has no samples.
    assert [name for name in names if "last" in name] == ["last.weight", "last.bias"]


def test_the_last_micro_batch_decides_alone_about_nothing(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)

    def loss(which: nn.Module, number: int) -> torch.Tensor:
        if number == 1:
            return which(batch(number)).square().mean()
        return which[0](batch(number)).square().mean()  # type: ignore[index,no-any-return]

    # Its gradients are complete, but it has no samples, and nobody else reached these.
    found = one_step(make([unit]), unit, model, loss, (4, 0))
    assert [one is None for one in found] == [False, False, True, True, True, True]


def test_a_step_without_any_backward_has_no_gradients(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    for _ in iterations(reducer, (4, 4)):
        pass
    assert reducer.settle(unit)
    assert gradients(model) == [None] * 6


def test_parameters_may_be_frozen_later(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    one_step(reducer, unit, model, mean_square)
    model.zero_grad()
    model[0].requires_grad_(False)
    right = written_out(model, mean_square, (SIZE,) * 5)
    found = one_step(reducer, unit, model, mean_square)
    assert found[:2] == [None, None]
    assert same(found[2:], right)
    model.zero_grad()
    model[0].requires_grad_(True)
    right = written_out(model, mean_square, (SIZE,) * 5)
    assert same(one_step(reducer, unit, model, mean_square), right)


def test_a_sparse_gradient_is_refused_by_name(make: Make) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 2, sparse=True)})
    reducer = make([unit_of(model)])
    reducer.begin_step(share_of((4, 4)))
    reducer.begin_micro_batch(0)
    with pytest.raises(UsageError, match=r"words\.weight has a sparse gradient.*sparse=False"):
        model["words"](torch.arange(3)).sum().backward()


def test_a_gradient_that_is_part_of_a_graph_is_refused_by_name(make: Make) -> None:
    """It would be moved out of the graph, and what is computed of it have no gradient."""
    model = nn.ModuleDict({"words": nn.Linear(3, 1)})
    reducer = make([unit_of(model)])
    reducer.begin_step(share_of((4, 4)))
    reducer.begin_micro_batch(0)
    loss = model["words"](torch.ones(2, 3)).square().sum()
    with pytest.raises(UsageError, match=r"gave parameter words\..* a gradient with a graph"):
        loss.backward(create_graph=True)


def test_shared_parameters_go_once(make: Make) -> None:
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    model[1].weight = model[0].weight
    unit = unit_of(model)
    assert len(unit.parameters) == 3

    def loss(which: Any, number: int) -> torch.Tensor:
        return which[1](torch.tanh(which[0](batch(number)))).square().mean()  # type: ignore[no-any-return]

    assert same(one_step(make([unit]), unit, model, loss), written_out(model, loss, (SIZE,) * 5))


def test_buckets_that_grow_with_the_world_give_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer, right = make([unit], bucket_bytes=1), written_out(model, mean_square, (SIZE,) * 5)
    for size in (1 << 30, 0):
        monkeypatch.setattr(reduce_module, "bucket_bytes_for", lambda _, size=size: size)
        reducer.attach(None)
        assert len(reducer._layout.buckets) == (1 if size else 6)
        assert same(one_step(reducer, unit, model, mean_square), right)
        model.zero_grad()


# ---------------------------------------------------------------- backward calls


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_backward_calls_of_a_micro_batch_add_up_on_the_last_one_too(
    make: Make, num_micro_batches: int, bucket_bytes: int
) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=bucket_bytes)
    counts = (SIZE,) * num_micro_batches

    def losses(which: nn.Sequential, number: int) -> list[torch.Tensor]:
        x = batch(number)
        return [which(x).square().mean(), which[0](x).mean(), which(x).abs().mean()]

    twin = mlp()
    leaves = []
    for number in range(num_micro_batches):
        twin.zero_grad()
        for one in losses(twin, number):
            one.backward()
        leaves.append(gradients(twin))
    right = [
        tree_sum([leaf[place] for leaf in leaves]) / num_micro_batches  # type: ignore[misc]
        for place in range(6)
    ]
    for _ in range(3):
        for number in iterations(reducer, counts):
            for one in losses(model, number):
                one.backward()
        assert reducer.settle(unit)
        assert same(gradients(model), right)
        model.zero_grad()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_gradients_that_a_loop_sets_to_none_between_two_backward_calls_do_not_count(
    make: Make, num_micro_batches: int
) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer, counts = make([unit]), (SIZE,) * num_micro_batches
    right = written_out(model, mean_square, counts)
    for _ in range(2):
        for number in iterations(reducer, counts):
            mean_square(model, number + 7).backward()
            for parameter in model.parameters():
                parameter.grad = None  # As zero_grad() of an optimizer that is not prepared.
            mean_square(model, number).backward()
        assert reducer.settle(unit)
        assert same(gradients(model), right)


def test_one_more_backward_call_than_before_is_refused(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    one_step(reducer, unit, model, mean_square, (SIZE,))
    for number in iterations(reducer, (SIZE,)):
        mean_square(model, number).backward()
        with pytest.raises(UsageError, match="more often than those before it"):
            mean_square(model, number).backward()


def test_one_that_comes_later_learns_from_others_how_often_backward_is_called(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = mlp(), mlp()
    unit = unit_of(model)
    reducer, finish = make([unit]), BucketExchanges.finish

    def received(
        self: BucketExchanges, numbers: list[int], **named: Any
    ) -> list[tuple[float, ...]]:
        (mine,) = finish(self, numbers, **named)
        return [mine, (mine[0], 1.0, *mine[2:])]

    monkeypatch.setattr(BucketExchanges, "finish", received)
    one_step(reducer, unit, model, mean_square, (SIZE,))
    model.zero_grad()
    for number in iterations(reducer, (SIZE,)):
        for which in (model, twin):
            mean_square(which, number).backward()
            mean_square(which, number + 1).backward()
        assert reducer.settle(unit)
        assert same(gradients(model), gradients(twin))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_checkpointed_layers_give_the_same(make: Make, reentrant: bool, bucket_bytes: int) -> None:
    def loss(which: nn.Sequential, number: int) -> torch.Tensor:
        x = batch(number).requires_grad_()
        x = checkpoint(which[:2], x, use_reentrant=reentrant)
        return checkpoint(which[2:], x, use_reentrant=reentrant).square().mean()  # type: ignore[no-any-return]

    model = mlp()
    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=bucket_bytes)
    right = written_out(model, mean_square, (SIZE,) * 5)
    for _ in range(2):
        assert same(one_step(reducer, unit, model, loss), right)
        model.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_layer_that_is_checkpointed_twice_has_both_gradients_or_is_refused(
    make: Make, reentrant: bool, bucket_bytes: int, num_micro_batches: int
) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))

    def loss(which: nn.Sequential, number: int, reentrant: bool = reentrant) -> torch.Tensor:
        x = batch(number).requires_grad_()
        for layer in (which[0], which[1], which[1], which[2], which[0], which[1]):
            x = checkpoint(torch.nn.Sequential(layer, nn.Tanh()), x, use_reentrant=reentrant)
        return x.square().mean()

    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=bucket_bytes)
    counts = (SIZE,) * num_micro_batches
    right = written_out(model, loss, counts)
    for _ in range(3):
        if reentrant:
            # Each segment adds to the gradient by itself, and when it is complete nobody knows.
            with pytest.raises(UsageError, match=r"once more.*use_reentrant=False"):
                one_step(reducer, unit, model, loss, counts)
            return
        assert same(one_step(reducer, unit, model, loss, counts), right)
        model.zero_grad()


def test_autograd_grad_is_left_alone(make: Make) -> None:
    model, twin = mlp(), mlp()
    unit = unit_of(model)
    reducer = make([unit])

    def loss(which: nn.Module, number: int) -> torch.Tensor:
        x = batch(number).requires_grad_()
        (by_input,) = torch.autograd.grad(which(x).sum(), x, create_graph=True)
        return by_input.square().mean() + which(x).mean()

    for number in iterations(reducer, (SIZE,) * 2):
        found = torch.autograd.grad(mean_square(model, number), list(model.parameters()))
        right = torch.autograd.grad(mean_square(twin, number), list(twin.parameters()))
        assert same(found, right)
        assert gradients(model) == [None] * 6
        loss(model, number).backward()
    assert reducer.settle(unit)
    # The bias of the last layer has no part in the gradient of the sum.
    assert same(gradients(model), written_out(model, loss, (SIZE,) * 2))


def test_backward_outside_of_a_step_is_left_alone(make: Make) -> None:
    model, twin = mlp(), mlp()
    unit = unit_of(model)
    reducer = make([unit])
    for _ in range(2):  # Before the first step, and after a step.
        model.zero_grad()
        for number in range(2):
            mean_square(model, number).backward()
            mean_square(twin, number).backward()
        assert same(gradients(model), gradients(twin))
        model.zero_grad()
        twin.zero_grad()
        one_step(reducer, unit, model, mean_square)
        reducer.release_gradients()
    reducer.close()
    model.zero_grad()
    mean_square(model, 0).backward()
    mean_square(twin, 0).backward()
    assert same(gradients(model), gradients(twin))


def test_what_user_code_raises_in_backward_comes_out_and_leaves_nothing(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit])
    right = written_out(model, mean_square, (SIZE,) * 2)

    def refuse(_: torch.Tensor) -> None:
        raise LookupError("the user's own")

    for number in iterations(reducer, (SIZE,) * 2):
        hidden = model[:2](batch(number))
        hidden.register_hook(refuse)
        with pytest.raises(LookupError, match="the user's own"):
            model[2:](hidden).square().mean().backward()
        break
    assert same(one_step(reducer, unit, model, mean_square, (SIZE,) * 2), right)


def test_a_group_that_breaks_while_buckets_are_sent_behind_backward_leaves_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    unit = unit_of(model)
    reducer = make([unit], bucket_bytes=1)

    def breaks(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(BucketExchanges, "start", breaks)
    for number in iterations(reducer, (SIZE,)):
        parameters = list(model.parameters())
        found = torch.autograd.grad(mean_square(model, number), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
    assert not reducer.settle(unit)
    assert "Connection closed" in str(reducer.broken)

"""The reducer without a group: buffers of modules, and what is left of steps that did not count."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.worker.reduce.bucket_exchanges import BucketExchanges
from elastic.worker.reduce.model_buffers import _buffer_of, _numbers
from elastic.worker.reduce.reducer import OptimizerUnit
from tests.unit.reduce_under_test import (
    SIZE,
    Make,
    iterations,
    mean_square,
    mlp,
    one_step,
    reducers,
    same,
    tree_sum,
    unit_of,
    written_out,
)

_make = pytest.fixture(name="make")(reducers)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))


class Replaces(nn.Module):
    """Puts a new tensor in its buffer's place, as `self.mean = ...` does, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x.mean(0).detach() * 0.5
        self.cache = torch.zeros(len(self.cache) + 1)
        return self.layer(x)


class Least(nn.Module):
    """Keeps the least that it has seen, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("least", torch.tensor(float("inf")))

    def forward(self, x: torch.Tensor, keeps: bool = True) -> torch.Tensor:
        if keeps:
            self.least.copy_(torch.minimum(self.least, x.min()))
        return self.layer(x)


def steps(make: Make, model: nn.Module, inputs: Sequence[float], counts: Sequence[int]) -> None:
    """Do a step; micro-batch i sees inputs that are all inputs[i]."""

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        return module(torch.full((4, 2), inputs[number])).nan_to_num().sum()

    unit = unit_of(model)
    one_step(make([unit], [model]), unit, model, loss, counts)


@pytest.mark.parametrize("counts", [(4, 4, 4), (4, 2, 0)])
def test_statistics_are_the_mean_by_samples_to_the_bit(make: Make, counts: tuple[int, ...]) -> None:
    model = normed()
    totals: dict[str, torch.Tensor] = {}
    for number, count in enumerate(counts):
        alone = copy.deepcopy(model)
        mean_square(alone, number)
        for name in ("running_mean", "running_var"):
            value = getattr(alone[1], name).double() * count
            totals[name] = totals.get(name, torch.zeros_like(value)) + value
    unit = unit_of(model)
    one_step(make([unit], [model]), unit, model, mean_square, counts)
    for name, total in totals.items():
        assert torch.equal(getattr(model[1], name), (total / sum(counts)).float())


class OwnNorm(nn.Module):
    """A layer of a user's own around torch's function, which shows no change of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(6))
        self.register_buffer("stored_var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalized(x)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            x, self.stored_mean, self.stored_var, training=self.training
        )


def test_statistics_of_a_users_own_layer_are_the_mean_too(make: Make) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 6), OwnNorm(), nn.Linear(6, 3)), normed()
    layers[1].load_state_dict(layers[0].state_dict(), strict=False)
    for model in layers:
        unit = unit_of(model)
        one_step(make([unit], [model]), unit, model, mean_square)
    for own, torchs in (("stored_mean", "running_mean"), ("stored_var", "running_var")):
        assert torch.equal(getattr(layers[0][1], own), getattr(layers[1][1], torchs))


class Codebook(nn.Module):
    """Learns vectors by averages of its own, and has a cache that it resizes in place."""

    def __init__(self, *, unnoticed: bool) -> None:
        super().__init__()
        self.unnoticed = unnoticed
        self.register_buffer("codes", torch.zeros(2, 2))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.resize_(len(self.cache) + 1)
        if self.unnoticed:
            self.codes.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        else:
            with torch.no_grad():
                self.codes.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x + self.codes[0].clone()


def test_buffers_that_a_layer_changes_by_data_are_the_mean_too(make: Make) -> None:
    found = []
    for unnoticed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), Codebook(unnoticed=unnoticed))
        steps(make, model, (1.0, 2.0, 4.0), (4, 4, 2))
        found.append(model[1].codes.clone())
        assert model[1].codes.any()
        assert len(model[1].cache) == 3
    assert torch.equal(*found)


def test_what_is_received_after_a_broken_step_is_not_put_back_to_its_beginning(make: Make) -> None:
    model = normed()
    reducer = make([unit_of(model)], [model])
    mean_square(model, next(iterations(reducer, (SIZE,) * 2))).backward()
    reducer.abandon()
    reducer.attach(None)
    others = normed()
    others(torch.randn(8, 5))
    model.load_state_dict(others.state_dict())
    reducer.attach(None)
    for mine, right in zip(model.buffers(), others.buffers(), strict=True):
        assert torch.equal(mine, right)


def test_buffers_are_put_back_where_the_group_is_over_before_the_commit(make: Make) -> None:
    model = normed()
    unit = unit_of(model)
    before = [one.clone() for one in model.buffers()]
    reducer = make([unit], [model])
    for number in iterations(reducer, (SIZE,)):
        mean_square(model, number).backward()
    assert reducer.settle(unit)
    assert not reducer.settle_buffers(lambda: False)
    reducer.abandon()
    assert same(list(model.buffers()), before)


class Counts(nn.Module):
    """Writes into a buffer that its own backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(1.0)
        return self.layer(x) * self.scale


@pytest.mark.parametrize("make_model", [normed, Counts])
def test_a_group_that_breaks_during_backward_lets_it_end(
    make: Make, make_model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    # The loss's own layer is the first whose gradient is complete, and is sent.
    model = nn.Sequential(model, nn.Linear(6, 3))
    unit = unit_of(model)
    before = [one.clone() for one in model.buffers()]
    reducer = make([unit], [model], bucket_bytes=1)

    def breaks(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(BucketExchanges, "start", breaks)
        for number in iterations(reducer, (SIZE,)):
            mean_square(model, number).backward()
            assert not any(p.grad is None for p in model.parameters()), "loops look at them"
            assert not reducer.settle(unit)
    assert isinstance(reducer.broken, RuntimeError)
    reducer.attach(None)
    assert same(list(model.buffers()), before)


@pytest.mark.parametrize("make_model", [normed, Counts])
def test_a_graph_from_before_a_void_moment_may_still_be_gone_through(
    make: Make, make_model: type[nn.Module]
) -> None:
    model = make_model()
    unit = unit_of(model)
    reducer = make([unit], [model])
    for number in iterations(reducer, (SIZE,)):
        loss = mean_square(model, number)
        reducer.abandon()
        loss.backward()
        assert not reducer.settle(unit)


def test_statistics_count_where_an_iteration_ends_in_evaluation_mode(make: Make) -> None:
    ways = []
    for is_left in (False, True):
        model = normed()
        unit = unit_of(model)
        reducer = make([unit], [model])
        for number in iterations(reducer, (SIZE,) * 3):
            model.train()
            mean_square(model, number).backward()
            if is_left:
                model.eval()
        assert reducer.settle(unit)
        assert reducer.settle_buffers()
        reducer.keep_buffers()
        ways.append([one.clone() for one in model.buffers()])
    assert same(*ways)


def test_a_buffer_that_forward_replaces_becomes_the_mean_like_any_other(make: Make) -> None:
    model = Replaces()
    unit = unit_of(model)
    reducer = make([unit], [model])

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        return module(torch.full((4, 2), float(number + 1))).sum()  # type: ignore[no-any-return]

    for mean in (0.75, 1.125):
        one_step(reducer, unit, model, loss, (SIZE,) * 2)
        assert model.mean.tolist() == [mean, mean]
    assert len(model.cache) == 4


def test_an_infinite_buffer_of_a_micro_batch_without_samples_counts_zero(make: Make) -> None:
    model = Least()
    steps(make, model, [1.0, 2.0, float("inf")], [4, 4, 0])
    assert model.least.item() == 1.5


def test_buffers_are_added_in_the_order_of_the_tree(make: Make) -> None:
    """As members add up their subtrees: one after the other would be other bits."""
    model, counts = Least(), [4, 4, 4, 4]
    large = 2.0**60
    made_of_it = [1.0, large, -large, 1.0]
    steps(make, model, made_of_it, counts)
    leaves = [torch.tensor(4 * value, dtype=torch.float64) for value in made_of_it]
    assert sum(leaves) != tree_sum(leaves)
    assert model.least.item() == tree_sum(leaves).item() / sum(counts)


def test_a_buffer_that_only_some_micro_batches_change_is_refused(make: Make) -> None:
    model = Least()
    unit = unit_of(model)

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        return module(torch.ones(4, 2), keeps=number == 1).sum()  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match="in some micro-batches"):
        one_step(make([unit], [model]), unit, model, loss, (SIZE,) * 2)


@pytest.mark.parametrize("left", [0.0, 1.0])
def test_what_an_earlier_step_left_in_grad_is_not_part_of_this_one(make: Make, left: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    unit = OptimizerUnit("all", [("weight", weight)])
    weight.grad = torch.full((2,), left)

    def loss(_: nn.Module, number: int) -> torch.Tensor:
        del number
        return (weight * torch.tensor([-0.0, 1.0])).sum()

    found = one_step(make([unit]), unit, nn.Module(), loss, (SIZE,) * 2)
    assert same(found, [torch.tensor([-0.0, 1.0])])


def test_nothing_is_left_of_a_step_that_was_begun_anew(make: Make) -> None:
    model = mlp()
    unit = unit_of(model)
    right = written_out(model, mean_square, (SIZE,) * 4)
    reducer = make([unit])
    for done in (1, 2, 4):
        for number in iterations(reducer, (SIZE,) * 4):
            mean_square(model, number + 10).backward()
            if number + 1 == done:
                break
        reducer.abandon()
        reducer.attach(None)
        assert same(one_step(reducer, unit, model, mean_square, (SIZE,) * 4), right)


def test_statistics_of_ones_own_layer_count_where_iterations_end_in_evaluation_mode(
    make: Make,
) -> None:
    ways = []
    for is_left in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), OwnNorm())
        unit = unit_of(model)
        reducer = make([unit], [model])
        for number in iterations(reducer, (SIZE,) * 2):
            model.train()
            mean_square(model, number).backward()
            model.train(not is_left)
        assert reducer.settle(unit)
        assert reducer.settle_buffers()
        reducer.keep_buffers()
        ways.append([one.clone() for one in model.buffers()])
    assert same(*ways)
    assert ways[0][0].any()


class HasNorm(nn.Module):
    """Has a part that is called like torch's function, and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.rand(4, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x) * self.table.sum().float()


def test_a_table_beside_a_layer_that_is_called_batch_norm_is_no_statistic(make: Make) -> None:
    model = HasNorm()
    unit = unit_of(model)
    reducer = make([unit], [model])
    one_step(reducer, unit, model, mean_square, (SIZE,) * 3)
    assert {name.rpartition(".")[2] for name in reducer._buffers._changed} == {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip


def test_a_layer_that_forward_goes_around_in_some_micro_batches_is_averaged_all_the_same(
    make: Make,
) -> None:
    """A batch of one sample has no variance, so that loops leave the layer out for it."""
    model = normed()
    unit = unit_of(model)
    reducer = make([unit], [model])
    for number in iterations(reducer, (SIZE, 1)):
        (model if number == 0 else model[0])(torch.ones(SIZE, 5)).sum().backward()
    assert reducer.settle(unit)
    assert reducer.settle_buffers()
    reducer.keep_buffers()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[2**62 + 1, -(2**53) - 1], [-1, 2**32]]),
        torch.tensor([1.5 - 2.25j, 3j]),
        torch.tensor([1 / 3 - 2j], dtype=torch.complex128),
        torch.tensor([1.0, float("inf")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([2**31 - 1, -7], dtype=torch.int32),
    ],
    ids=lambda values: str(values.dtype),
)
def test_no_bit_of_a_buffer_is_lost_on_its_way(values: torch.Tensor) -> None:
    found = torch.empty_like(values).copy_(_buffer_of(_numbers(values), values))
    assert torch.equal(found, values)

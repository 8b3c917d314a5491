"""Loops that the step engine cannot follow are refused, and odd ones that it can are not harmed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.errors import UsageError
from elastic.train.torch import (
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from elastic.worker.engine.loop_guard import LoopGuard
from elastic.worker.engine.train_call import current_engine
from elastic.worker.process.local import LocalRun, run_local
from elastic.worker.state.train_state import TrainState
from tests.unit.engine_under_test import Count

Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the other core to others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(loop: Loop, *, frozen: bool = False, global_batch_size: int = 8) -> list[Any]:
    """Train a small model by such a loop, on 32 numbers; return what it returned."""
    found: list[Any] = []

    def function() -> None:
        model = prepare_model(nn.Linear(1, 1))
        model.module.bias.requires_grad_(not frozen)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = TensorDataset(torch.arange(32.0).reshape(32, 1) / 32)
        loader = prepare_data_loader(
            DataLoader(data, batch_size=2), global_batch_size=global_batch_size
        )
        found.append(loop(model, optimizer, loader))

    run_local(function, LocalRun(job_name="misuse"))
    return found


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_second_pass_of_training_in_an_epoch_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(2):
            for _ in range(2):
                for (x,) in loader:
                    iterate(model, optimizer, x)

    with pytest.raises(UsageError, match="a second pass over a prepared loader began in epoch 0"):
        run(loop)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("last", "where"), [(3, "where step 1 of epoch 0 begins"), (4, "in the middle of step 1")]
)
def test_leaving_an_epoch_after_a_number_of_iterations_is_refused(
    last: int, where: str, goes_on: bool
) -> None:
    """Who counts iterations would leave it after another step at another number of workers."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(2):
            for place, (x,) in enumerate(loader):
                iterate(model, optimizer, x)
                if place == last:
                    break
            if not goes_on:
                return

    with pytest.raises(UsageError, match=rf"was left {where}.*get_step\(\)"):
        run(loop)


def test_leaving_an_epoch_by_a_count_as_an_iteration_begins_is_refused() -> None:
    """Where a step begins, or in its middle: `zip` has asked for a batch that it does not use."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(2):
            for (x,), _ in zip(loader, range(4), strict=False):
                iterate(model, optimizer, x)

    with pytest.raises(UsageError, match=r"was left where step 1 of epoch 0 begins.*get_step\(\)"):
        run(loop)


def test_leaving_an_epoch_as_an_iteration_begins_by_what_the_one_before_has_asked() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
        done = 0
        for _ in train.epochs(2):
            is_over = False
            for (x,) in loader:
                if is_over:
                    break
                iterate(model, optimizer, x)
                if train.stepped():
                    done, is_over = done + 1, True
        return done

    assert run(loop) == [2]


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (nn.Embedding(3, 2, max_norm=1.0), r"module\.added: Embedding\(max_norm=1.0\)"),
        (nn.SyncBatchNorm(2), r"module\.added: SyncBatchNorm waits in forward for all ranks"),
        (nn.LazyLinear(2), r"module\.added\.weight: has no shape before the first forward"),
        (nn.LazyBatchNorm1d(affine=False), r"module\.added\.running_mean: has no shape"),
    ],
)
def test_a_layer_whose_forward_makes_ranks_differ_or_wait_is_refused(
    layer: nn.Module, found: str
) -> None:
    def loop(model: nn.Module, *_: Any) -> None:
        model.module.added = layer
        next(iter(train.epochs(1)))

    with pytest.raises(UsageError, match=found):
        run(loop)


def test_a_layer_that_keeps_ranges_for_quantization_is_refused() -> None:
    observers = pytest.importorskip("torch.ao.quantization.fake_quantize")

    def loop(model: nn.Module, *_: Any) -> None:
        model.module.added = observers.FakeQuantize()
        next(iter(train.epochs(1)))

    with pytest.raises(UsageError, match="FakeQuantize keeps ranges of what this rank has read"):
        run(loop)


def test_sync_batch_norm_is_refused_once_it_trains() -> None:
    def loop(model: nn.Module, optimizer: Any, loader: Any) -> int:
        model.module.added = nn.SyncBatchNorm(2).eval()
        steps = 0
        for epoch in train.epochs(2):
            model.module.added.train(epoch > 0)
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
                steps += 1
                assert epoch == 0
        return steps

    with pytest.raises(UsageError, match="SyncBatchNorm waits in forward"):
        run(loop)


def test_an_optimizer_whose_state_is_in_parts_is_refused() -> None:
    class InParts(torch.optim.SGD):
        def consolidate_state_dict(self, to: int = 0) -> None: ...

    def loop(model: nn.Module, *_: Any) -> None:
        prepare_optimizer(InParts(model.parameters(), lr=0.1)).step()  # A plain loop may.
        next(iter(train.epochs(1)))

    with pytest.raises(UsageError, match="InParts keeps a part of its state on each rank"):
        run(loop)


@pytest.mark.parametrize("how", ["prepared", "registered", "inside", "forgotten"])
def test_a_scheduler_that_is_in_no_state_is_refused(how: str) -> None:
    class Schedules:
        def __init__(self, *of: Any) -> None:
            self.of, self.last = of, of[-1]

        def state_dict(self) -> dict[str, Any]:
            return {"of": [one.state_dict() for one in self.of]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        if how == "prepared":
            prepare_scheduler(scheduler)
        elif how != "forgotten":
            train.register(it=scheduler if how == "registered" else Schedules(scheduler))
        next(iter(train.epochs(1)))

    if how != "forgotten":
        run(loop)
        return
    with pytest.raises(UsageError, match="SGD has a learning rate scheduler that was not prepared"):
        run(loop)


@pytest.mark.parametrize(
    "how",
    ["in place", "data", "in data", "registered", "between steps", "after steps", "in a step"],
)
def test_weights_that_change_while_a_step_is_computed_are_refused(how: str) -> None:
    def change(weight: torch.Tensor) -> None:
        with torch.no_grad():
            if how == "data":
                weight.data = weight.data * 0.9
            elif how == "in data":
                weight.data.mul_(0.9)
            else:
                weight.clamp_(-0.1, 0.1)

    class Drawing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            change(self.param_groups[0]["params"][0])

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        average = copy.deepcopy(model.module)
        train.register(average=average)
        if how == "in a step":
            prepare_optimizer(Drawing(average.parameters(), lr=0.1))
        target = average.weight if how == "registered" else model.module.weight
        for _ in train.epochs(2):
            change(target)
            for (x,) in loader:
                model.to("cpu")  # As it is.
                assert target.data.numel() == 1
                if how in ("in place", "data", "in data"):
                    change(target)
                loss = model(x).square().mean()
                loss.backward()
                for one in current_engine().state.optimizers:  # type: ignore[union-attr]
                    one.step()
                optimizer.zero_grad()
                if how in ("registered", "after steps") or train.stepped():
                    change(target)

    if how in ("between steps", "in a step"):
        run(loop)
        return
    name = "registered average: weight" if how == "registered" else r"module\.weight"
    with pytest.raises(UsageError, match=rf"{name}: forward, or code before the step was complete"):
        run(loop)


class Average:
    """An average of weights as scripts have it."""

    def __init__(self, model: nn.Module, *, within: str) -> None:
        copied = copy.deepcopy(model)
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.of: Any = {"module": copied, "dict": weights, "list": [*weights.values()]}[within]

    def update(self, model: nn.Module) -> None:
        for place, (name, weight) in enumerate(model.named_parameters()):
            if isinstance(self.of, nn.Module):
                self.of.get_parameter(name).data.lerp_(weight.data, 0.5)
            else:
                key: Any = name if isinstance(self.of, dict) else place
                self.of[key] = self.of[key].lerp(weight.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.of.state_dict() if isinstance(self.of, nn.Module) else self.of}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_registered_average_that_follows_iterations_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        average = Average(model, within="dict")
        train.register(average=average)
        for _ in train.epochs(1):
            for (x,) in loader:
                iterate(model, optimizer, x)
                average.update(model)

    with pytest.raises(UsageError, match=r"registered average: changed in .* train\.stepped\(\)"):
        run(loop)


@pytest.mark.parametrize("how", ["trains", "evaluates", "is prepared", "belongs to a model"])
def test_a_registered_teacher_that_trains_is_refused_where_steps_repeat(how: str) -> None:
    state, model = TrainState(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    teacher = model[1] if how == "belongs to a model" else copy.deepcopy(model)
    state.models = [model, teacher] if how == "is prepared" else [model]
    state.register("teacher", teacher.train(how != "evaluates"))
    guard = LoopGuard(state, looks=False)
    for repeats in (False, True):
        guard.begin_step()
        teacher(torch.ones(3, 2))
        if repeats and how == "trains":
            with pytest.raises(UsageError, match=r"^registered teacher, 1: .*prepare_model"):
                guard.check_computed(repeats=repeats)
        else:
            guard.check_computed(repeats=repeats)


@pytest.mark.parametrize("global_batch_size", [2, 8])
def test_a_count_before_the_step_is_done_is_refused_where_steps_repeat(
    global_batch_size: int,
) -> None:
    """It would stay of a step that is done again, and be of each micro-batch of several."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
        count = Count()
        train.register(count=count)
        for _ in train.epochs(1):
            for (x,) in loader:
                count.steps += 1
                iterate(model, optimizer, x)
                train.stepped()
        return count.steps

    if global_batch_size == 2:  # One worker, for good, with one micro-batch.
        assert run(loop, global_batch_size=global_batch_size) == [16]
        return
    with pytest.raises(UsageError, match=r"registered count: changed before the step was done"):
        run(loop)


def test_a_loop_over_steps_counts_at_the_head_of_a_step() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
        count = Count()
        train.register(count=count)
        for _ in train.epochs(1):
            for step in train.steps(loader):
                count.steps += 1
                for (x,) in step:
                    model(x).square().mean().backward()
                count.steps += 1
                optimizer.step()
                optimizer.zero_grad()
        return count.steps

    assert run(loop) == [8]


@pytest.mark.parametrize("max_workers", [1, 2])
def test_a_count_within_a_step_is_refused_before_the_job_grows(max_workers: int) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
        engine, count = current_engine(), Count()
        assert engine is not None
        engine.enter(replace(engine.context, max_workers=max_workers))
        train.register(count=count)
        for _ in train.epochs(1):
            for step in train.steps(loader):
                for (x,) in step:
                    count.steps += 1
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return count.steps

    if max_workers == 1:
        assert run(loop) == [16]
        return
    with pytest.raises(UsageError, match=r"registered count: changed before the step was done"):
        run(loop)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("within", ["module", "dict", "list"])
def test_an_average_that_is_in_no_state_is_refused(within: str, is_known: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        first = copy.deepcopy(model)  # A teacher stays as it is.
        shown, average = model.state_dict(), Average(model, within=within)
        if is_known:
            train.register(average=average)
        for _ in train.epochs(2):
            for (x,) in loader:
                iterate(model, optimizer, x + first(x).detach())
                if train.stepped():
                    average.update(model)
        return shown

    if is_known:
        run(loop)
        return
    name = "PreparedModel" if within == "module" else f"a {within} of 2 tensors"
    with pytest.raises(UsageError, match=f"{name}: what changes while the loop trains is neither"):
        run(loop)


def test_an_average_that_a_registered_object_has_from_around_it_is_known() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        average = copy.deepcopy(model.state_dict())

        class Around:
            def state_dict(self) -> dict[str, Any]:
                return dict(average)

            def load_state_dict(self, state: dict[str, Any]) -> None:
                average.update(state)

        train.register(average=Around())
        for _ in train.epochs(2):
            for (x,) in loader:
                iterate(model, optimizer, x)
                if train.stepped():
                    for name, value in model.state_dict().items():
                        average[name].lerp_(value, 0.5)

    run(loop)


def test_what_changes_without_being_prepared_is_refused_by_its_name() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts(x)
            return out

    def with_head(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        head = Head()
        optimizer.add_param_group({"params": list(head.parameters())})
        for _ in train.epochs(1):
            for (x,) in loader:
                iterate(lambda x: model(head(x)), optimizer, x)  # type: ignore[arg-type]

    def with_plateau(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for _ in train.epochs(2):
            for (x,) in loader:
                iterate(model, optimizer, x)
            scheduler.step(1.0)

    def with_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        wrapped = DistributedDataParallel(model.module)
        for _ in train.epochs(1):
            for (x,) in loader:
                iterate(wrapped, optimizer, x)

    with pytest.raises(UsageError, match=r"Head: .* model = prepare_model\(model\) for a model"):
        run(with_head)
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau: .* = prepare_scheduler\("):
        run(with_plateau)
    with pytest.raises(UsageError, match="DistributedDataParallel, which reduces their gradients"):
        run(with_ddp)


@pytest.mark.parametrize("how", ["adds", "resizes", "prunes"])
def test_a_model_that_gets_other_parts_inside_the_loop_is_refused(how: str) -> None:
    """Who joins later has the model of before the loop, and could not take its state."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        model.module.register_buffer("seen", torch.zeros(1))
        for epoch in train.epochs(2):
            if epoch and how == "adds":
                model.module.register_buffer("more", torch.zeros(1))
            elif epoch and how == "resizes":
                model.module.seen = torch.zeros(2)
            elif epoch:
                prune.l1_unstructured(model.module, "weight", 0.5)
            for (x,) in loader:
                iterate(model, optimizer, x)

    name = {"adds": "more", "resizes": "seen", "prunes": "weight"}[how]
    with pytest.raises(UsageError, match=rf"model 0, module\.{name}.* when the loop over"):
        run(loop)


def test_a_cache_that_grows_inside_the_loop_is_let_be() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for epoch in train.epochs(2):
            cache = torch.zeros(1 + epoch)
            model.module.register_buffer("cache", cache, persistent=False)
            for (x,) in loader:
                iterate(model, optimizer, x)

    run(loop)


@pytest.mark.parametrize("adds", [True, False])
def test_parameters_that_come_in_the_middle_of_an_epoch_are_refused(adds: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(1):
            for place, (x,) in enumerate(loader):
                if place == 5 and adds:
                    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
                model.module.bias.requires_grad_(adds or place >= 5)
                iterate(model, optimizer, x)

    says = "added to a prepared optimizer" if adds else "module.bias: required no gradient before"
    with pytest.raises(UsageError, match=says):
        run(loop, frozen=not adds)


@pytest.mark.parametrize("number", range(4))
def test_a_second_step_in_an_iteration_is_refused(number: int) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(1):
            for place, (x,) in enumerate(loader):
                for _ in range(2 if place == number else 1):
                    iterate(model, optimizer, x)

    with pytest.raises(UsageError, match="was called twice in one iteration"):
        run(loop)


def test_training_with_a_model_that_was_left_in_evaluation_mode_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for _ in train.epochs(2):
            for (x,) in loader:
                iterate(model, optimizer, x)
            model.eval()

    with pytest.raises(UsageError, match=r"call model\.train\(\)"):
        run(loop)


def test_training_with_a_loader_that_is_not_prepared_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        optimizer.step()
        for _ in train.epochs(1):
            optimizer.step()  # Without gradients it does nothing, and quiets schedulers.
            iterate(model, optimizer, next(iter(loader.dataset))[0])

    with pytest.raises(UsageError, match="train with the batches of a prepared loader"):
        run(loop)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_the_loop_puts_in_place_itself_are_those_of_the_step(
    scale: float, clips: bool
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        parameters = list(model.parameters())
        nn.init.ones_(parameters[0])
        nn.init.zeros_(parameters[1])
        for _ in train.epochs(1):
            for (x,) in loader:
                loss = scaler.scale((model(x) - 1).square().mean())
                gradients = torch.autograd.grad(loss, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                if clips:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if train.stepped():
                    break
        return [parameter.item() for parameter in parameters]

    x = torch.arange(8.0) / 32
    right = [1 - 0.01 * (2 * (x - 1) * x).mean().item(), -0.01 * (2 * (x - 1)).mean().item()]
    assert run(loop) == [pytest.approx(right)]

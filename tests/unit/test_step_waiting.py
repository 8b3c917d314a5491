"""Loops with several optimizers: what belongs to one step waits for all of it, and is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic import train
from elastic.errors import UsageError
from elastic.train.torch import (
    PreparedLoader,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from tests.unit.engine_under_test import (
    GLOBAL,
    SIZE,
    STEPS,
    Pair,
    data,
    inside_a_run,
    near,
    square,
    whole_batches,
)

_inside = pytest.fixture(autouse=True)(inside_a_run)


def loader() -> PreparedLoader:
    return prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)


@pytest.mark.parametrize("together", [True, False])
def test_a_scheduler_may_step_before_the_other_optimizer_does(together: bool) -> None:
    pair = Pair(prepare=True)
    of_judge, of_maker = (
        prepare_scheduler(torch.optim.lr_scheduler.StepLR(one, 1))
        for one in (pair.of_judge, pair.of_maker)
    )
    for epoch in train.epochs(2):
        for _, x, _ in loader():
            pair.train_judge(x)
            of_judge.step()
            if together or epoch == 1:
                pair.train_maker(x)
                of_maker.step()
    assert of_judge.last_epoch == 2 * STEPS
    assert of_maker.last_epoch == (2 * STEPS if together else STEPS)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("updates", ["once", "twice"])
def test_optimizers_that_wait_keep_the_scale_of_their_gradients(fused: bool, updates: str) -> None:
    pair, twin = Pair(prepare=False), Pair(prepare=False)
    for module in (pair.maker, pair.judge):
        prepare_model(module)
    pair.of_maker, pair.of_judge = (
        prepare_optimizer(torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, fused=fused))
        for one in (pair.maker, pair.judge)
    )  # type: ignore[assignment]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for epoch in train.epochs(2):
        for _, x, _ in loader():
            pair.of_judge.zero_grad()
            scaler.scale(pair.judge(x).square().mean()).backward()
            scaler.step(pair.of_judge)
            if updates == "twice":
                scaler.update()
            if epoch == 1:  # Before that it is not asked to step.
                pair.of_maker.zero_grad()
                scaler.scale(pair.maker(x).square().mean()).backward()
                scaler.step(pair.of_maker)
            scaler.update()
    for count, (_, x, _) in enumerate(whole_batches() * 2):
        twin.of_judge.zero_grad()
        twin.judge(x).square().mean().backward()
        twin.of_judge.step()
        if count >= STEPS:
            twin.of_maker.zero_grad()
            twin.maker(x).square().mean().backward()
            twin.of_maker.step()
    assert near(pair.judge, twin.judge)
    assert near(pair.maker, twin.maker)
    assert scaler.get_scale() == 64.0 * 2 ** (2 * STEPS // 2)
    assert not {"grad_scale", "found_inf"} & {*vars(pair.of_judge), *vars(pair.of_maker)}


def network_of_two(prepare: bool) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """Return one whose last layer two optimizers have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    if prepare:
        prepare_model(model)
    made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[1], model)]
    return model, [prepare_optimizer(one) if prepare else one for one in made]


def test_a_parameter_of_two_optimizers_is_stepped_by_the_one_that_is_asked() -> None:
    model, optimizers = network_of_two(prepare=True)
    twin, plain = network_of_two(prepare=False)
    for epoch in train.epochs(2):
        for _, x, y in loader():
            square(model(x), y).backward()
            optimizers[epoch].step()
            model.zero_grad()
    for count, (_, x, y) in enumerate(whole_batches() * 2):
        square(twin(x), y).backward()
        plain[count // STEPS].step()
        twin.zero_grad()
    assert near(model, twin)


@pytest.mark.parametrize("backwards", [1, 2])
def test_two_optimizers_step_a_parameter_by_one_gradient_and_not_by_two(backwards: int) -> None:
    model, optimizers = network_of_two(prepare=True)
    twin, plain = network_of_two(prepare=False)

    def loop() -> None:
        for _ in train.epochs(1):
            for _, x, y in loader():
                square(model(x), y).backward()
                optimizers[0].step()
                if backwards == 2:
                    square(model(x), y).backward()
                optimizers[1].step()

    if backwards == 2:
        with pytest.raises(UsageError, match="two prepared optimizers have the same parameter"):
            loop()
        return
    loop()
    for _, x, y in whole_batches():
        twin.zero_grad()
        square(twin(x), y).backward()
        for one in plain:
            one.step()
    assert near(model, twin)

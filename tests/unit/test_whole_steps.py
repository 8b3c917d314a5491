"""A loop over whole steps, in this process: a plain loop's bits, an iteration for each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from elastic import train
from elastic.core.policy.recovery import PassPosition
from elastic.errors import UsageError
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from elastic.worker.engine import step_engine
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.train_call import current_engine
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    STEPS,
    Loop,
    Pair,
    V,
    bits,
    data,
    each,
    inside_a_run,
    inside_again,
    near,
    network,
    square,
    whole_batches,
)

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)
VOCABULARY, LENGTH, PADDED = 7, 6, -100


def trained_plainly(**options: Any) -> tuple[list[bytes], list[float]]:
    with inside_again():
        loop, losses = Loop.make(torch.optim.AdamW, shuffle=True, **options), []
        for _ in train.epochs(2):
            for _, x, y in loop.loader:
                loss = square(loop.model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                train.log(loss=loss)
            losses.append(train.get_logged()["loss"])
        return bits(loop.plain), losses


def test_steps_have_the_bits_of_a_plain_loop_and_one_iteration_each() -> None:
    right, losses = trained_plainly()
    loop, found, batches, places = Loop.make(torch.optim.AdamW, shuffle=True), [], [], []
    for _ in train.epochs(2):
        for step in train.steps(loop.loader):
            for number, x, y in step:
                batches.append(number.tolist())
                loss = square(loop.model(x), y)
                loss.backward()
                train.log(loss=loss)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            found.append(step.averages["loss"])
            places.append(train.get_context().get_step())
            train.log(rate=0.5)  # Of the whole step; told with the next one.
        assert train.get_logged() == {"loss": found[-1], "rate": 0.5}
    assert bits(loop.plain) == right
    assert len(found) == 2 * STEPS
    assert len(batches) == 2 * STEPS * V
    assert found[STEPS - 1 :: STEPS] == pytest.approx(losses, rel=1e-6)
    assert places == [1, 2, 3] * 2  # As after the step of a plain loop.


def test_run_has_all_micro_batches_computed_and_returns_what_they_average_to() -> None:
    right, losses = trained_plainly()
    loop, found = Loop.make(torch.optim.AdamW, shuffle=True), []

    def compute(batch: Any) -> dict[str, torch.Tensor]:
        loss = square(loop.model(batch[1]), batch[2])
        loss.backward()
        return {"loss": loss}

    for _ in train.epochs(2):
        for step in train.steps(loop.loader):
            found.append(step.run(compute)["loss"])
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
            loop.optimizer.step()
    assert bits(loop.plain) == right
    assert found[STEPS - 1 :: STEPS] == pytest.approx(losses, rel=1e-6)


def test_run_names_what_it_expects_of_a_function_that_returns_its_loss() -> None:
    loop = Loop.make()
    with pytest.raises(UsageError, match=r"step\.run: compute returned a Tensor, expected a dict"):
        each(
            (step for _ in train.epochs(1) for step in train.steps(loop.loader)),
            lambda step: step.run(lambda batch: square(loop.model(batch[1]), batch[2])),
        )


def test_an_optimizer_that_needs_a_closure_computes_a_step_in_it() -> None:
    options = {"max_iter": 1, "lr": 0.3}
    loop, twin = Loop.make(torch.optim.LBFGS, **options), network()
    step_in_closure(loop)
    plain = torch.optim.LBFGS(twin.parameters(), **options)
    for _, x, y in whole_batches():
        plain.zero_grad()
        square(twin(x), y).backward()
        plain.step(lambda x=x, y=y: square(twin(x), y))
    assert near(loop.plain, twin)


def test_an_optimizer_that_evaluates_its_closure_again_is_refused() -> None:
    with pytest.raises(UsageError, match=r"more than once.*use LBFGS\(max_iter=1\)"):
        step_in_closure(Loop.make(torch.optim.LBFGS))


@pytest.mark.parametrize("change", [lambda p: p.add_(p.grad), lambda p: p.grad.zero_()])
def test_an_optimizer_that_changes_weights_before_it_evaluates_its_closure_is_refused(
    change: Callable[[nn.Parameter], Any],
) -> None:
    class Sharp(torch.optim.SGD):
        """As SAM is usually written: a part of it before the closure, for the second time."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                change(p)
            closure()
            super().step()

    with pytest.raises(UsageError, match=r"before it evaluated its closure.*SAM, takes two steps"):
        step_in_closure(Loop.make(Sharp))


def test_sharpness_aware_minimization_as_it_is_documented_is_that_of_the_whole_batch() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/training-loop.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("## Sharpness-aware minimization")[1].split("```")[1][len("python") :], names)
    plain, twin = network(), network()
    model, dataset = prepare_model(plain), data()
    optimizer = prepare_optimizer(names["SAM"](model.parameters(), lr=0.1, momentum=0.9))
    sampler = names["Twice"](SequentialSampler(dataset), GLOBAL)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=SIZE, sampler=sampler), global_batch_size=GLOBAL
    )
    for _ in train.epochs(1):
        for _, x, y in loader:
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _, x, y in whole_batches()[: SAMPLES // GLOBAL]:
        square(twin(x), y).backward()
        moves = [0.05 * p.grad / nn.utils.get_total_norm(grads(twin)) for p in twin.parameters()]
        before = copy.deepcopy(twin.state_dict())
        with torch.no_grad():
            for p, move in zip(twin.parameters(), moves, strict=True):
                p.add_(move)
        by_hand.zero_grad()
        square(twin(x), y).backward()
        twin.load_state_dict(before)
        by_hand.step()
        by_hand.zero_grad()
    assert near(plain, twin)


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def step_in_closure(loop: Loop) -> None:
    def compute(batch: Any) -> dict[str, torch.Tensor]:
        loss = square(loop.model(batch[1]), batch[2])
        loss.backward()
        return {"loss": loss}

    for _ in train.epochs(1):
        for step in train.steps(loop.loader):
            loop.optimizer.zero_grad()
            loop.optimizer.step(lambda step=step: step.run(compute)["loss"])


def test_several_optimizers_and_those_a_step_leaves_out() -> None:
    """A step's gradients are there for all of them, whichever is asked first, or not at all."""
    pair, twin = Pair(prepare=True), Pair(prepare=False)
    loader = Loop.make().loader
    numbers: list[list[int]] = []
    for _ in train.epochs(1):
        for place, step in enumerate(train.steps(loader)):
            for number, x, _ in step:
                numbers.append(number.tolist())
                pair.judge_loss(x).backward()
            if place == 1:
                step.skip()
                continue
            pair.of_judge.step()
    data: Any = current_engine().run.loader  # type: ignore[union-attr]
    assert data.plan.steps == STEPS
    everything = loader.dataset.tensors[1]
    for place in range(STEPS):
        ids = [i for batch in numbers[place * V : (place + 1) * V] for i in batch]
        if place == 1:
            continue
        ids = list(dict.fromkeys(ids))  # The last micro-batch of the last step counts nothing.
        twin.of_judge.zero_grad()
        twin.judge_loss(everything[ids]).backward()
        twin.of_judge.step()
    assert near(pair.judge, twin.judge)


class Text(nn.Module):
    """Predicts words, each of a sample's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def text() -> TensorDataset:
    """Return sequences of which more and more is padding, and all of the last micro-batch."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, VOCABULARY, (16, LENGTH), generator=generator)
    y = torch.randint(0, VOCABULARY, (16, LENGTH), generator=generator)
    for number in range(16):
        y[number, LENGTH - min(LENGTH, number // 2) :] = PADDED
    return TensorDataset(x, y)


def token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDED)


@pytest.mark.parametrize("by_step", [True, False])
def test_weighed_micro_batches_average_to_what_one_batch_of_all_tokens_would(by_step: bool) -> None:
    plain, twin = Text(), Text()
    model = prepare_model(plain)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    loader = prepare_data_loader(
        DataLoader(text(), batch_size=2),
        global_batch_size=8,
        weigh=lambda batch: (batch[1] != PADDED).sum(),
    )
    losses = []
    for _ in train.epochs(2):
        if by_step:
            for step in train.steps(loader):
                losses.append(step.run(lambda batch: _computed(model, batch))["loss"])
                optimizer.step()
            continue
        for batch in loader:
            train.log(**_computed(model, batch))
            optimizer.step()
        losses.append(train.get_logged()["loss"])
    other, right = torch.optim.SGD(twin.parameters(), lr=0.5), []
    for _ in range(2):
        for x, y in DataLoader(text(), batch_size=8):
            other.zero_grad()
            loss = token_loss(twin, x, y)
            loss.backward()
            other.step()
            right.append(loss.item())
    assert near(plain, twin)
    assert losses == pytest.approx(right if by_step else right[1::2], rel=1e-5)


def _computed(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    loss = token_loss(model, *batch)
    loss.backward()
    return {"loss": loss}


@pytest.mark.parametrize(
    ("weigh", "says"),
    [
        (lambda batch: "many", "returned 'many'"),
        (lambda batch: -1, "returned -1"),
        (lambda batch: float("nan"), "returned nan"),
        (lambda batch: 0, "no micro-batch of step 0 of epoch 0 counts anything"),
    ],
)
def test_weights_that_are_none_are_refused(weigh: Callable[[Any], Any], says: str) -> None:
    model = prepare_model(Text())
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    loader = prepare_data_loader(DataLoader(text(), batch_size=2), weigh=weigh)

    def body(step: Any) -> None:
        step.run(lambda batch: _computed(model, batch))
        optimizer.step()

    with pytest.raises(UsageError, match=says):
        each((step for _ in train.epochs(1) for step in train.steps(loader)), body)


def test_an_epoch_may_end_early_and_its_step_counts() -> None:
    """And what is added up is so over all micro-batches that have samples."""
    loop, counts = Loop.make(), []
    for epoch in train.epochs(2):
        for number, step in enumerate(train.steps(loop.loader)):
            for _, x, y in step:
                square(loop.model(x), y).backward()
                step.add(samples=len(x))
            loop.optimizer.step()
            counts.append((epoch, step.sums["samples"]))
            if epoch == 0 and number == 1:
                step.end_epoch()
    assert counts == [(0, 8.0), (0, 8.0), (1, 8.0), (1, 8.0), (1, 6.0)]


def inside(loop: Loop, step: Any) -> None:
    for _, x, y in step:
        square(loop.model(x), y).backward()
        loop.optimizer.step()


def left_early(loop: Loop, step: Any) -> None:
    for _, x, y in step:
        square(loop.model(x), y).backward()
        break


def twice(loop: Loop, step: Any) -> None:
    for _, x, y in step:
        square(loop.model(x), y).backward()
    list(step)


def without_optimizer(loop: Loop, step: Any) -> None:
    for _, x, y in step:
        square(loop.model(x), y).backward()


MISUSES: list[tuple[Callable[[Loop, Any], Any], str]] = [
    (inside, "SGD.step.. was called while the micro-batches of a step are computed"),
    (left_early, "step 0 of epoch 0 was left before all of its micro-batches were computed"),
    (lambda loop, step: None, "step 0 of epoch 0 was left before"),
    (twice, "were read already"),
    (without_optimizer, "optimizer.step.. was not called in step 0 of epoch 0"),
    (lambda loop, step: step.averages, "this step is not computed"),
]


@pytest.mark.parametrize(("body", "says"), MISUSES)
def test_misuse_is_answered_with_what_to_write(body: Callable[..., Any], says: str) -> None:
    loop = Loop.make()
    steps = (step for _ in train.epochs(1) for step in train.steps(loop.loader))
    with pytest.raises(UsageError, match=says):
        each(steps, lambda step: body(loop, step))


def test_steps_outside_the_loop_over_epochs_are_refused() -> None:
    loop = Loop.make()
    with pytest.raises(UsageError, match=r"outside the loop over train.epochs\(\)"):
        list(train.steps(loop.loader))
    with pytest.raises(UsageError, match="expected a loader that prepare_data_loader"):
        list(train.steps([1, 2]))  # type: ignore[arg-type]


def test_a_step_that_is_left_before_the_optimizer_steps_is_done_again_from_its_beginning() -> None:
    """A collective of the script's own may raise there, on all ranks at once."""
    with inside_again():
        loop = Loop.make(torch.optim.AdamW, shuffle=True)
        loop.plain.register_buffer("seen", torch.zeros(()))
        engine: Any = current_engine()
        for _ in train.epochs(1):
            for step in train.steps(loop.loader):
                for _, x, y in step:
                    loop.plain.seen += 1
                    square(loop.model(x), y).backward()
                kept = engine.resume_state()
                assert kept is not None
                assert kept.cursor == engine.cursor
                assert float(loop.plain.seen) == 0.0
                break
            break


def test_rates_of_a_step_that_others_have_done_are_lowered_once() -> None:
    """The sender has lowered them in that step, and so does the rest of the receiver's."""
    engine: Any = current_engine()
    loop = Loop.make(momentum=0.9)
    (group,) = loop.optimizer.param_groups

    def taken() -> float:
        return float(engine.state.take()["optimizers"][0]["param_groups"][0]["lr"])

    for _ in train.epochs(1):
        for step in train.steps(loop.loader):
            for _, x, y in step:
                square(loop.model(x), y).backward()
            loop.optimizer.step()
        group["lr"] = 0.05
        state = copy.deepcopy(engine.state.take())
        group["lr"] = 0.1
        with engine.state.registered_later():
            engine.state.put(state)
        (group,) = loop.optimizer.param_groups
        assert (group["lr"], taken()) == (0.05, 0.05)
        group["lr"] *= 0.5
        assert taken() == 0.05
        engine.state.put_late()
    (group,) = loop.optimizer.param_groups
    assert (group["lr"], taken()) == (0.05, 0.05)


def test_a_whole_step_begins_with_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = current_engine()
    loop, is_over, real = Loop.make(), [False], step_engine.catch_up
    met: list[PassPosition] = []
    made: list[str] = []

    def catch_up(run: RunState, checkpoints: Any, in_pass: Any, *args: Any, **options: Any) -> Any:
        met.append(in_pass(run.cursor))
        return real(run, checkpoints, in_pass, *args, **options)

    def rejoin(*_: Any) -> None:
        is_over[0] = False

    def report(*_: Any, where: str, voters: int) -> None:
        made.append(f"{where}: {voters}")

    monkeypatch.setattr(engine.groups, "must_leave", lambda generation: is_over[0])
    monkeypatch.setattr(engine.groups, "rejoin", rejoin)
    monkeypatch.setattr(step_engine, "catch_up", catch_up)
    for _ in train.epochs(1):
        monkeypatch.setattr(engine.context.the_reporter(), "report_in_place", report)
        train.report({})
        for number, step in enumerate(train.steps(loop.loader)):
            train.report({})
            for _, x, y in step:
                square(loop.model(x), y).backward()
                is_over[0] = number == 0 and len(met) == 1
            loop.optimizer.step()
            train.report({})
            is_over[0] = number == 1
        train.report({})
    assert met == [PassPosition.NO, PassPosition.WITHIN_STEP, PassPosition.BETWEEN_STEPS]
    assert made == [
        f"e00000-s000000{place}1: 1"
        for place in ("0-", "0-begin", "1-", "1-begin", "2-", "2-begin", "3-", "3-end")
    ]

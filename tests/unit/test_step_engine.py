"""A plain training loop over the step engine, in this process: what it sees, computes, refuses."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.program_points import CodePart, ProgramPoint
from elastic.core.policy.seeds import step_seed
from elastic.errors import UsageError
from elastic.train.torch import (
    enable_reproducibility,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
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
    inside_a_run,
    inside_again,
    near,
    network,
    reported,
    square,
    whole_batches,
)

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)


def test_micro_batches_come_in_order_and_steps_count_samples() -> None:
    loop = Loop.make()
    ids, places = [], []
    for epoch in train.epochs(2):
        for number, x, y in loop.loader:
            context = train.get_context()
            ids.append(number.tolist())
            places.append((epoch, context.get_epoch(), context.get_step()))
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    one_pass = [i for batch in ids[: STEPS * V] for i in batch]
    # 22 samples in steps of 8: the last step has 6, two for each micro-batch but the last, which
    # computes with the first ones and counts for nothing.
    assert one_pass == [*range(SAMPLES), 16, 17]
    assert ids[: STEPS * V] == ids[STEPS * V :]
    steps = [(e, e, s) for e in range(2) for s in range(STEPS) for _ in range(V)]
    # Asked before its optimizer has stepped, a micro-batch belongs to the steps that are done.
    assert places == steps


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("zeroes", ["before", "after", "never"])
def test_a_plain_loop_computes_what_one_big_batch_would(clips: bool, zeroes: str) -> None:
    loop, twin = Loop.make(momentum=0.9, weight_decay=0.01), network()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    norms, right = [], []
    for _, x, y in loop.batches(2):
        if zeroes == "before":
            loop.optimizer.zero_grad()
        square(loop.model(x), y).backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)))
        loop.optimizer.step()
        if zeroes == "after":
            loop.optimizer.zero_grad()
    for _, x, y in whole_batches() * 2:
        plain.zero_grad()
        square(twin(x), y).backward()
        if clips:
            right.append(float(nn.utils.clip_grad_norm_(twin.parameters(), 0.3)))
        plain.step()
    assert near(loop.plain, twin)
    # Those of a step that is not complete count for nothing, and what is clipped by them either.
    assert norms[V - 1 :: V] == pytest.approx(right, rel=1e-4)


def test_shuffling_is_that_of_the_seed_and_each_epoch_has_its_own() -> None:
    def orders(seed: int) -> list[list[int]]:
        with inside_again():
            try:
                enable_reproducibility(seed)
                loop, found = Loop.make(shuffle=True), []
                for _ in train.epochs(2):
                    one = []
                    for number, x, y in loop.loader:
                        one += number.tolist()
                        square(loop.model(x), y).backward()
                        loop.optimizer.step()
                    found.append(one)
                return found
            finally:
                torch.use_deterministic_algorithms(False)

    first, again, other = orders(1), orders(1), orders(2)
    assert first == again != other
    assert first[0] != first[1]
    assert sorted(first[0][:SAMPLES]) == sorted(first[1][:SAMPLES]) == list(range(SAMPLES))


def test_dropout_is_the_same_however_often_the_loop_runs() -> None:
    def trained(warm: int) -> list[bytes]:
        with inside_again():
            torch.manual_seed(0)
            model = prepare_model(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 1)))
            optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            torch.rand(warm)  # The state of the process's generators is of no account.
            loader = prepare_data_loader(
                DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL
            )
            for _ in train.epochs(1):
                for _, x, y in loader:
                    square(model(x), y).backward()
                    optimizer.step()
            return bits(model)

    assert trained(0) == trained(7)


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_scheduler_steps_once_for_each_step_or_epoch(per: str) -> None:
    loop = Loop.make()
    scheduler = prepare_scheduler(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5))
    rates = []
    for _ in train.epochs(2):
        for _, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if per == "step":
                scheduler.step()
        if per == "epoch":
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    per_epoch = STEPS if per == "step" else 1
    assert rates == pytest.approx([0.1 * 0.5**per_epoch, 0.1 * 0.25**per_epoch])


def test_a_one_cycle_scheduler_ends_where_it_should() -> None:
    loop = Loop.make()
    total = 2 * len(loop.loader)
    assert total == 2 * STEPS
    cycle = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, max_lr=1.0, total_steps=total)
    scheduler = prepare_scheduler(cycle)
    for _, x, y in loop.batches(2):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == total  # One call more than this many would have raised.


@pytest.mark.parametrize("first", ["judge", "maker"])
def test_two_optimizers_step_together_from_the_weights_of_the_steps_beginning(first: str) -> None:
    pair, twin = Pair(prepare=True), Pair(prepare=False)
    dataset = DataLoader(data(), batch_size=SIZE)
    loader = prepare_data_loader(dataset, global_batch_size=GLOBAL)
    for _ in train.epochs(2):
        for _, x, _ in loader:
            order = [pair.train_judge, pair.train_maker]
            for one in order if first == "judge" else reversed(order):
                one(x)
    for _, x, _ in whole_batches() * 2:
        by_judge = torch.autograd.grad(twin.judge_loss(x), list(twin.judge.parameters()))
        by_maker = torch.autograd.grad(twin.maker_loss(x), list(twin.maker.parameters()))
        for module, found in ((twin.judge, by_judge), (twin.maker, by_maker)):
            for parameter, gradient in zip(module.parameters(), found, strict=True):
                parameter.grad = gradient
        twin.of_judge.step()
        twin.of_maker.step()
    assert near(pair.judge, twin.judge)
    assert near(pair.maker, twin.maker)


def test_a_step_of_one_of_two_optimizers_is_done_where_the_loop_asks_for_it() -> None:
    pair, count, maker = Pair(prepare=True), 0, []
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    for _ in train.epochs(1):
        for _, x, _ in loader:
            is_first = train.get_context().get_step() == 0
            pair.train_judge(x)
            if is_first:
                pair.train_maker(x)
            count += train.stepped()
            maker.append(bits(pair.maker))
            train.report({"stepped": count})
    assert count == len(reported) == STEPS
    assert maker[0] != maker[V - 1] == maker[-1]


def test_an_optimizer_that_comes_after_that_is_refused() -> None:
    pair = Pair(prepare=True)
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)

    def loop() -> None:
        for _ in train.epochs(1):
            for _, x, _ in loader:
                pair.train_judge(x)
                train.stepped()
                pair.train_maker(x)

    with pytest.raises(UsageError, match=r"SGD.step\(\) was called after train.stepped\(\)"):
        loop()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("prepared_after", [False, True])
def test_a_scaler_scales_the_gradients_of_whole_steps(clips: bool, prepared_after: bool) -> None:
    loop, twin = Loop.make(), network()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for _, x, y in loop.batches(2):
        if not prepared_after:
            loop.optimizer.zero_grad()
        scaler.scale(square(loop.model(x), y)).backward()
        if clips:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
        scaler.step(loop.optimizer)
        scaler.update()
        if prepared_after:
            loop.optimizer.zero_grad()
    for _, x, y in whole_batches() * 2:
        plain.zero_grad()
        square(twin(x), y).backward()
        if clips:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
    assert near(loop.plain, twin)
    assert scaler.get_scale() == 64.0 * 2 ** (2 * STEPS // 2)


def test_a_step_that_overflows_is_left_out_and_counts() -> None:
    loop = Loop.make()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    seen: list[tuple[int, list[bytes]]] = []
    for count, (_, x, y) in enumerate(loop.batches(1)):
        before = bits(loop.plain)
        # The second micro-batch of the second step overflows.
        factor = float("inf") if count == V + 1 else 1.0
        scaler.scale(square(loop.model(x), y) * factor).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        if bits(loop.plain) != before:
            seen.append((count, before))
    assert [count for count, _ in seen] == [V - 1, 3 * V - 1]
    assert scaler.get_scale() == 32.0
    assert train.get_context().get_epoch() == 1


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_a_scaler_takes_a_step_of_which_all_batches_are_left_out(step: int, clips: bool) -> None:
    loop = Loop.make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    changed, left = set(), range(step * V, step * V + V)
    for count, (_, x, y) in enumerate(loop.batches(1)):
        before = bits(loop.plain)
        loop.optimizer.zero_grad()
        if count not in left:
            scaler.scale(square(loop.model(x), y)).backward()
        if clips:
            scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        scaler.update()
        if bits(loop.plain) != before:
            changed.add(count // V)
    assert changed == set(range(STEPS)) - {step}
    assert scaler.get_scale() == 4.0 * 2 ** (STEPS - 1)


def test_two_optimizers_share_a_scaler_and_one_may_overflow() -> None:
    pair = Pair(prepare=True)
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    start = bits(pair.judge), bits(pair.maker)
    for _ in train.epochs(1):
        for _, x, _ in loader:
            pair.of_judge.zero_grad()
            scaler.scale(pair.judge_loss(x)).backward()
            scaler.step(pair.of_judge)
            pair.of_maker.zero_grad()
            scaler.scale(pair.maker_loss(x) * float("nan")).backward()
            scaler.step(pair.of_maker)
            scaler.update()
    assert bits(pair.judge) != start[0]
    assert bits(pair.maker) == start[1]
    assert all(torch.isfinite(p).all() for p in pair.judge.parameters())
    assert scaler.get_scale() == 4.0 / 2**STEPS


def test_an_optimizer_that_draws_does_so_by_the_step_and_not_by_a_micro_batch() -> None:
    drawn: list[tuple[int, float]] = []

    class Drawing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            drawn.append((torch.initial_seed(), float(torch.rand(()))))
            return super().step(closure)

    loop = Loop.make(Drawing)
    for _, x, y in loop.batches(2):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
    steps = [Cursor(epoch, step) for epoch in range(2) for step in range(STEPS)]
    assert [seed for seed, _ in drawn] == [step_seed(0, cursor) for cursor in steps]
    assert len({number for _, number in drawn}) == len(steps)


def test_logged_values_are_means_over_the_samples_of_a_step() -> None:
    loop = Loop.make()
    seen, sums = [], []
    for _ in train.epochs(1):
        for number, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            if train.stepped():
                seen.append(dict(train.get_logged()))
            train.log(mean=number.float().mean(), one=1)
            sums += number.tolist()
        last = train.get_logged()
        train.report({"epoch": 0})
    # In the first step there is nothing yet; later it is the step before.
    assert seen == [{}, {"mean": 3.5, "one": 1.0}, {"mean": 11.5, "one": 1.0}]
    assert last == {"mean": pytest.approx(sum(range(16, 22)) / 6), "one": 1.0}
    # What its last micro-batch computed with was there before.
    assert sums == [*range(SAMPLES), 16, 17]
    # A report has the mean over all samples since the last one.
    assert reported == [{"epoch": 0, "mean": pytest.approx(10.5), "one": 1.0}]


def test_reports_and_stepped_happen_once_for_each_step() -> None:
    loop = Loop.make()
    average, stepped = copy.deepcopy(loop.plain), []

    class Ema:
        updates = 0

        def state_dict(self) -> dict[str, Any]:
            return {"model": average.state_dict(), "updates": self.updates}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.updates = state["updates"]

    ema = Ema()
    train.register(ema=ema)
    assert train.stepped()
    for _ in train.epochs(1):
        assert train.stepped()
        for _, x, y in loop.loader:
            assert not train.stepped()
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            stepped.append(train.stepped())
            if train.stepped():
                ema.updates += 1
            train.report({"step": train.get_context().get_step()})
        assert train.stepped()
        train.report({"end": True})
    assert stepped == ([False] * (V - 1) + [True]) * STEPS
    assert ema.updates == STEPS
    assert reported == [{"step": 1}, {"step": 2}, {"step": 3}, {"end": True}]


def test_a_checkpoint_may_be_reported_within_an_epoch(tmp_path: Path) -> None:
    loop = Loop.make()
    files = tmp_path / "files"
    files.mkdir()
    for _, x, y in loop.batches(1):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        (files / "step").write_text(str(train.get_context().get_step()))
        train.report({}, checkpoint=train.Checkpoint.from_directory(files))
    newest = train.get_checkpoint()
    assert newest is not None
    assert (Path(newest.path) / "step").read_text() == str(STEPS)
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 1
    assert len(reported) == STEPS


def test_a_scheduler_made_before_the_optimizer_was_prepared_does_not_warn() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepare_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()


def test_a_report_that_others_have_made_before_keeps_its_metrics_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who joins behind the last step runs the code before the pass; the others are past it."""
    engine, made = current_engine(), []
    assert engine is not None

    def report(_: str, checkpoint: Any, __: Any, *, where: str, voters: int) -> None:
        made.append((where, voters, checkpoint is not None))

    loop, end = Loop.make(), ProgramPoint(Cursor(0, STEPS), CodePart.END)
    for _ in train.epochs(1):
        monkeypatch.setattr(engine.context.the_reporter(), "report_in_place", report)
        engine._group.program_points = ProgramPoint(Cursor()), end
        engine.run.cursor = end.cursor
        train.report({}, checkpoint=train.Checkpoint.from_directory(tmp_path))
        assert not list(loop.loader)
        train.report({}, checkpoint=train.Checkpoint.from_directory(tmp_path))
        train.report({}, checkpoint=None)
    end_of_epoch = f"e00000-s{STEPS:07d}-end"
    assert made == [
        ("e00000-s0000000-1", 1, False),
        (f"{end_of_epoch}1", 2, True),
        (f"{end_of_epoch}2", 2, True),
    ]

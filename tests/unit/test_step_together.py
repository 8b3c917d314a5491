"""What members of a group must agree on, and what a step that does not count must not leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.worker.engine.logbook import Logbook
from elastic.worker.engine.prepared_optimizers import scalers_know, scalers_noted
from elastic.worker.engine.train_call import current_engine
from elastic.worker.reduce.step_metadata import StepMetadata, rates_print, read_rows
from elastic.worker.state.train_state import TrainState
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    Loop,
    inside_a_run,
    reported,
    square,
)

_inside = pytest.fixture(name="inside")(inside_a_run)


def test_ranks_in_different_steps_are_refused_before_anything_is_committed() -> None:
    rows = [
        StepMetadata(False, Cursor(0, 3), 1).numbers(),
        StepMetadata(False, Cursor(1, 0), 1).numbers(),
    ]
    with pytest.raises(UsageError, match="rank 1 is in step 0 of epoch 1, rank 0 in step 3"):
        read_rows(rows)


def test_ranks_whose_optimizers_differ_are_refused() -> None:
    rows = [
        StepMetadata(False, Cursor(0, 3), 3).numbers(),
        StepMetadata(False, Cursor(0, 3), 1).numbers(),
    ]
    with pytest.raises(UsageError, match="rank 1 has stepped other optimizers than rank 0"):
        read_rows(rows)


@pytest.mark.parametrize("freezes", [False, True])
def test_ranks_whose_learning_rates_or_frozen_parameters_differ_are_refused(freezes: bool) -> None:
    rows = []
    for number in range(3):
        parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
        rates = 0.1, 0.2 if freezes or number < 2 else 0.1
        parameters[1].requires_grad_(not freezes or number < 2)
        groups = [{"params": one, "lr": r} for one, r in zip(parameters, rates, strict=True)]
        print_ = rates_print([torch.optim.SGD(groups)])
        rows.append(StepMetadata(False, Cursor(0, 3), 1, rates=print_).numbers())
    assert len(read_rows(rows[:2])) == 2
    with pytest.raises(UsageError, match="rank 2 had other learning rates than rank 0, or other"):
        read_rows(rows)


class NoSteps:
    """What scalers ask while no step runs."""

    def __init__(self, state: TrainState) -> None:
        self.add_scaler = state.add_scaler


def test_a_scaler_that_a_newcomer_has_not_used_yet_begins_with_the_scale_of_the_run() -> None:
    theirs, ours = TrainState(), TrainState()
    used = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with scalers_know(NoSteps(theirs)):  # type: ignore[arg-type]
        used.scale(torch.ones(1))
    used.update(512.0)
    ours.put(theirs.take())
    assert ours.take()["scalers"] == theirs.take()["scalers"]  # Also before its first use.
    fresh = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with scalers_know(NoSteps(ours)):  # type: ignore[arg-type]
        assert fresh.scale(torch.ones(1)).item() == 512.0
    assert ours.take()["scalers"] == theirs.take()["scalers"]


def test_a_newcomer_has_the_scales_of_the_run_before_it_uses_its_scalers() -> None:
    def made(state: TrainState, *scales: float) -> list[torch.amp.GradScaler]:
        with scalers_noted(state.note_scaler):
            return [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]

    theirs, ours = TrainState(), TrainState()
    replaced: list[Any] = [*made(ours, 8.0)]
    replaced.append(replaced)  # Only the garbage collector ends it.
    del replaced
    used, mine = made(theirs, 64.0, 1024.0), made(ours, 64.0, 1024.0)
    for state in (theirs, ours):
        state.begin()  # The scaler that was replaced by another one is gone.
    with scalers_know(NoSteps(theirs)):  # type: ignore[arg-type]
        used[1].scale(torch.ones(1))
    used[1].update(512.0)
    ours.put(theirs.take())
    assert [one.get_scale() for one in mine] == [64.0, 512.0]
    assert [one.state_dict() for one in mine] == [one.state_dict() for one in used]


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_run_that_was_saved_with_its_scaler_disabled_goes_on_with_one(
    is_made_before: bool,
) -> None:
    theirs, ours = TrainState(), TrainState()
    theirs.add_scaler(torch.amp.GradScaler("cpu", enabled=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if is_made_before:
        ours.add_scaler(scaler)
    ours.put(theirs.take())
    ours.add_scaler(scaler)
    assert scaler.get_scale() == 8.0


def test_averages_since_the_last_report_go_on_from_a_checkpoint() -> None:
    before, after, started = Logbook(), Logbook(), Logbook()
    for logbook, losses in ((before, (3.0, 1.0)), (started, (9.0,))):
        for loss in losses:
            logbook.add({"loss": loss}, 2.0)
            logbook.commit_step()
            logbook.take_rows([logbook.row()])
    for logbook in (after, started):
        logbook.load_state(before.state())
        assert logbook.take_averages() == {"loss": 2.0}


def test_values_that_were_shared_count_once_with_the_next_step_also_after_a_restore() -> None:
    first, second, restored = Logbook(), Logbook(), Logbook()
    for logbook, loss in ((first, 3.0), (second, 1.0)):
        logbook.add({"loss": loss}, 2.0)
        logbook.commit_step()
    rows = [first.row(), second.row()]
    first.share(rows)  # The second one missed it: its group broke.
    assert first.latest == {}
    restored.load_state(first.state())
    for group in ([first, second], [restored, Logbook()]):
        rows = [logbook.row() for logbook in group]
        for logbook in group[:1]:
            logbook.take_rows(rows)
            assert logbook.latest == logbook.take_averages() == {"loss": 2.0}
            assert logbook.row() == [0.0, 0.0]


@pytest.mark.usefixtures("inside")
def test_values_of_a_step_that_is_done_again_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, seen, is_over = Loop.make(), [], [False]
    home: Any = current_engine().groups  # type: ignore[union-attr]

    def rejoin(*_: Any) -> None:
        is_over[0] = False

    monkeypatch.setattr(home, "must_leave", lambda generation: is_over[0])
    monkeypatch.setattr(home, "rejoin", rejoin)
    for _ in train.epochs(1):
        for number, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            train.log(mean=number.float().mean())
            seen += number.tolist()
            if len(seen) == GLOBAL + 2 * SIZE:
                is_over[0] = True  # Behind the second micro-batch of a step.
        train.report({"epoch": 0})
    assert seen[GLOBAL : 2 * GLOBAL] == [8, 9, 10, 11, 8, 9, 10, 11]
    assert reported == [{"epoch": 0, "mean": pytest.approx(sum(range(SAMPLES)) / SAMPLES)}]


@pytest.mark.parametrize("value", ["abc", "1.5", None, [1.0], torch.ones(2), np.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    logbook = Logbook()
    logbook.add({"loss": np.float32(1.0), "n": np.array(1), "ok": True}, 1.0)
    with pytest.raises(UsageError, match=r"train\.log: loss is .*expected a number, or a tensor"):
        logbook.add({"loss": value}, 1.0)


def test_values_that_were_not_told_are_forgotten_by_one_that_receives_another_state() -> None:
    logbook = Logbook()
    logbook.add({"loss": 3.0}, 1.0)
    logbook.commit_step()
    logbook.receive({"loss": 1.0}, ["loss"])
    assert logbook.row() == [0.0, 0.0]
    assert logbook.latest == {"loss": 1.0}


def test_one_that_missed_the_gate_hears_of_the_last_step_from_one_that_passed_it() -> None:
    passed, missed = Logbook(), Logbook()
    passed.receive({"accuracy": 0.9, "loss": 1.0}, ["accuracy", "loss"])
    missed.add({"loss": 3.0, "accuracy": 0.5}, 1.0)
    missed.commit_step()
    missed.take_latest([*passed.latest_row(), 0.0, 0.0])
    assert missed.latest == passed.latest
    assert missed.row() == [0.0, 0.0]


def test_a_name_that_some_micro_batches_log_is_averaged_over_these() -> None:
    two, one = Logbook(), Logbook()
    two.add({"loss": 1.0, "aux": 4.0}, 8.0)
    two.add({"loss": 3.0}, 8.0)
    one.add({"loss": 8.0, "aux": 1.0}, 8.0)
    for logbook in (two, one):
        logbook.commit_step()
    rows = [two.row(), one.row()]
    for logbook in (two, one):
        logbook.take_rows(rows)
        assert logbook.latest == {"loss": 4.0, "aux": 2.5}


@pytest.mark.parametrize("held", [(5,), (2, 3), (1, 2, 2)])
def test_averages_are_the_same_bits_whoever_held_which_micro_batch(held: tuple[int, ...]) -> None:
    losses = torch.tensor([1.3781, 0.1, 7.77, 1e-3, 0.6667])
    books = [Logbook() for _ in held]
    for book, mine in zip(books, losses.split(held), strict=True):
        for loss in mine:
            book.add({"loss": loss}, 5.0)
        book.commit_step()
    rows = [book.row() for book in books]
    books[0].take_rows(rows)
    assert books[0].latest == {"loss": losses.double().mean().item()}

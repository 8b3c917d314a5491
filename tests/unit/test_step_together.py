"""What members of a group must agree on, and what a step that does not count must not leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.core.policy.cursor import Cursor, Epochs
from elastic.core.policy.recovery import Standing, next_places, plan_transfers
from elastic.errors import UsageError
from elastic.worker.logbook import Logbook
from elastic.worker.prepared import scalers_know
from elastic.worker.reduce import Reducer, Share, Unit
from elastic.worker.rows import StepRow, rates_print, read_rows
from elastic.worker.state import TrainState

EPOCHS = Epochs(64, micro_batch=4, num_micro_batches=4)


def at(epoch: int, step: int, *, inside: bool = True, has_state: bool = True) -> Standing:
    return Standing(has_state, Cursor(epoch, step), steps=10, is_inside=inside)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        # In the middle of an epoch all go on with the next step.
        ([at(1, 4), at(1, 4)], [(1, 5), (1, 5)]),
        # A newcomer runs the code before the pass, which the others have behind them.
        ([at(1, 4), at(0, 0, inside=False, has_state=False)], [(1, 5), (1, 4)]),
        # Behind the last step, the code between the epochs is still to come.
        ([at(1, 10), at(1, 10)], [(1, 10), (1, 10)]),
        # One has passed the gate of an epoch and is in the next one, the other has not.
        ([at(2, 0), at(1, 10)], [(2, 1), (1, 10)]),
        # One step behind in the same epoch: it receives, and stays where its loop is.
        ([at(1, 4), at(1, 3)], [(1, 5), (1, 5)]),
        # In an epoch behind: it receives, and is called again.
        ([at(2, 1), at(1, 9)], [(2, 2), (2, 1)]),
    ],
)
def test_everyone_knows_who_runs_which_code_again(
    standings: list[Standing], expected: list[tuple[int, int]]
) -> None:
    places = next_places(standings, plan_transfers(standings).value)
    assert [(one.epoch, one.step) for one in places] == expected


def test_a_row_is_read_as_it_was_sent() -> None:
    row = StepRow(True, Cursor(12, 3_000_000_000), 5, (0.5, -1.0), rates=2**32 - 1)
    assert StepRow.of(row.numbers()) == row


def test_ranks_in_different_steps_are_refused_before_anything_is_committed() -> None:
    rows = [StepRow(False, Cursor(0, 3), 1).numbers(), StepRow(False, Cursor(1, 0), 1).numbers()]
    with pytest.raises(UsageError, match="rank 1 is in step 0 of epoch 1, rank 0 in step 3"):
        read_rows(rows)


def test_ranks_whose_optimizers_differ_are_refused() -> None:
    rows = [StepRow(False, Cursor(0, 3), 3).numbers(), StepRow(False, Cursor(0, 3), 1).numbers()]
    with pytest.raises(UsageError, match="rank 1 has stepped other optimizers than rank 0"):
        read_rows(rows)


def test_ranks_whose_learning_rates_differ_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    groups = [{"params": one, "lr": rate} for one, rate in zip(parameters, (0.1, 0.2), strict=True)]
    rows = []
    for factor in (1.0, 1.0, 0.5):
        optimizer = torch.optim.SGD(groups)
        optimizer.param_groups[1]["lr"] *= factor
        rows.append(StepRow(False, Cursor(0, 3), 1, rates=rates_print([optimizer])).numbers())
    assert len(read_rows(rows[:2])) == 2
    with pytest.raises(UsageError, match="rank 2 had other learning rates than rank 0"):
        read_rows(rows)


def reducer_of(model: nn.Module) -> Reducer:
    reducer = Reducer([Unit("all", list(model.named_parameters()))], [model])
    reducer.attach(None)
    return reducer


def compute(reducer: Reducer, model: nn.Module, step: int = 0) -> None:
    reducer.begin_step(Share.of(EPOCHS, step, rank=0, world_size=1))
    for number in range(EPOCHS.num_micro_batches):
        torch.manual_seed(100 * step + number)
        reducer.begin_micro_batch(number)
        model(torch.randn(4, 4)).sum().backward()


def test_buffers_of_a_step_that_turns_void_at_its_very_end_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    reducer = reducer_of(model)
    compute(reducer, model)
    assert not reducer.settle_buffers(lambda: False)
    reducer.abandon()
    reducer.close()
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


class Mean(nn.Module):
    """Keeps a running mean as many do: by putting a new tensor in the buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean().reshape(1)
        return y


def test_a_buffer_that_forward_replaces_is_averaged_and_stays_the_tensor_that_others_know() -> None:
    torch.manual_seed(0)
    model = Mean()
    known = model.mean
    reducer = reducer_of(model)
    for step in range(2):
        base, outputs = known.clone(), []
        compute(reducer, model, step)
        assert reducer.settle_buffers()
        for number in range(EPOCHS.num_micro_batches):
            torch.manual_seed(100 * step + number)
            outputs.append(model.linear(torch.randn(4, 4)).detach().mean())
        expected = 0.5 * base + 0.5 * torch.stack(outputs).mean()
        assert model.mean is known
        assert torch.allclose(known, expected)
    reducer.close()


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_refused() -> None:
    one, head = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([one, head])
    reducer = reducer_of(model)
    single = Epochs(64, micro_batch=4, num_micro_batches=1)
    reducer.begin_step(Share.of(single, 0, rank=0, world_size=1))
    reducer.begin_micro_batch(0)
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(one, checkpoint(one, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        head(y).sum().backward()
    reducer.close()


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


def test_values_that_were_not_told_are_forgotten_by_one_that_receives_another_state() -> None:
    logbook = Logbook()
    logbook.add({"loss": 3.0}, 1.0)
    logbook.commit_step()
    logbook.receive({"loss": 1.0})
    assert logbook.row() == [0.0, 0.0]
    assert logbook.latest == {"loss": 1.0}


def test_one_that_missed_the_gate_hears_of_the_last_step_from_one_that_passed_it() -> None:
    passed, missed = Logbook(), Logbook()
    passed.latest = {"accuracy": 0.9, "loss": 1.0}
    missed.add({"loss": 3.0, "accuracy": 0.5}, 1.0)
    missed.commit_step()
    missed.take_latest([*passed.latest_row(), 0.0, 0.0])
    assert missed.latest == passed.latest
    assert missed.row() == [0.0, 0.0]


def test_rates_are_the_same_whatever_number_holds_them() -> None:
    """What was sent to a member that has joined is Python's own."""
    prints = set()
    for rate in (0.1, np.float64(0.1)):
        prints.add(rates_print([torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=rate)]))
    assert len(prints) == 1

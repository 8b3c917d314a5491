"""Snapshots that are copied during the next forward and backward have the state of their boundary.

Each copy is held here until somebody waits for it, which is as slow as it can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.storage.run_directory import RunDirectory
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from elastic.worker.checkpoint import snapshot_copier
from elastic.worker.checkpoint import snapshotter as snapshotting
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.process.local import LocalRun, local_context
from elastic.worker.state.arena import SnapshotSlot
from tests.patience import is_set
from tests.unit.engine_under_test import GLOBAL, SIZE, STEPS, data, square
from tests.unit.saving_under_test import Run, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Edit = Callable[[nn.Module], None]


class SlowCopies:
    """Copies that begin when the training thread waits for them.

    Attributes:
        seen: "waits" and "copied", in order; tests add to it.
        fails: the next copy raises.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.fails = False
        self._may_begin = threading.Event()
        put, wait = SnapshotSlot.put, snapshotting.wait

        def slow_put(slot: SnapshotSlot, *args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert is_set(self._may_begin)
                self._may_begin.clear()
            if self.fails:
                self.fails = False
                raise OSError("no memory is left")
            put(slot, *args)
            self.seen.append("copied")

        def noted_wait(futures: Any) -> Any:
            self.seen.append("waits")
            self._may_begin.set()
            return wait(futures)

        patch.setattr(SnapshotSlot, "put", slow_put)
        patch.setattr(snapshotting, "wait", noted_wait)
        patch.setattr(snapshot_copier, "BESIDE_BYTES_MIN", 0)


@pytest.fixture(name="copies")
def _copies(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


class Noted(torch.optim.SGD):
    """An optimizer that tells when it steps."""

    seen: list[str]

    def step(self, closure: Any = None) -> Any:
        self.seen.append("step")
        return super().step(closure)


class Training:
    """A run with buffers and momentum, and its state after each step."""

    def __init__(self, path: Path, seen: list[str]) -> None:
        self.path = path
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = Noted(self.plain.parameters(), lr=0.1, momentum=0.9)
        optimizer.seen = seen
        self.model, self.optimizer = prepare_model(self.plain), prepare_optimizer(optimizer)
        loader = DataLoader(data(), batch_size=SIZE)
        self.loader = prepare_data_loader(loader, global_batch_size=GLOBAL)
        self.after: dict[int, list[torch.Tensor]] = {}

    def state(self) -> list[torch.Tensor]:
        moments = [kept["momentum_buffer"] for kept in self.optimizer.state.values()]
        return [*self.plain.parameters(), *self.plain.buffers(), *moments]

    def train(self, epochs: int, before: dict[int, Edit] | None = None) -> None:
        """Train, and do something to the model at the beginning of steps."""
        edits = dict(before or {})
        for _ in train.epochs(epochs):
            for _, x, y in self.loader:
                edits.pop(len(self.after) + 1, lambda _: None)(self.plain)
                self.step(x, y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        square(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if train.stepped():
            self.after[len(self.after) + 1] = [one.detach().clone() for one in self.state()]

    def check_saved(self, *expected: int) -> None:
        """Compare all checkpoints with the states after the steps that they are of."""
        saved = set()
        for name, marker in RunDirectory(str(self.path)).markers():
            state = read_checkpoint(RunDirectory(str(self.path)), name, marker)
            model, optimizer = state["objects"]["models"][0], state["objects"]["optimizers"][0]
            moments = [kept["momentum_buffer"] for kept in optimizer["state"].values()]
            assert_same([*model.values(), *moments], self.after[state["steps"]])
            saved.add(state["steps"])
        assert saved == set(expected)


@contextmanager
def run_that_saves(every: int, path: Path, copies: SlowCopies) -> Iterator[Training]:
    """Be a run that is saved every so many steps, and see all of it written."""
    run = LocalRun(
        job_name="r", run_path=str(path), options={"every_n_steps": every}, num_to_keep=9
    )
    with local_context(run) as context:
        yield Training(path, copies.seen)
        context.snapshotter.finish()


def test_the_next_step_waits_for_a_copy_of_the_state_of_the_boundary(
    tmp_path: Path, copies: SlowCopies
) -> None:
    """Forward has changed the buffers by then."""
    with run_that_saves(2, tmp_path, copies) as run:
        run.train(1)
    assert STEPS == 3
    assert copies.seen == ["step", "step", "waits", "copied", "step", "copied"]
    run.check_saved(2, 3)


def test_a_weight_that_is_changed_between_steps_leaves_no_torn_snapshot(
    tmp_path: Path, copies: SlowCopies, caplog: pytest.LogCaptureFixture
) -> None:
    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    refused = pytest.raises(UsageError, match=r"module\.0\.weight: .*has changed weights")
    with run_that_saves(4, tmp_path, copies) as run, refused:
        run.train(3, {5: halve})
    assert "changed before the next optimizer.step()" in caplog.text
    run.check_saved()


def test_a_change_that_torch_does_not_count_waits_for_the_copy(
    tmp_path: Path, copies: SlowCopies
) -> None:
    def halve(model: nn.Module) -> None:
        next(model.parameters()).data.mul_(0.5)

    refused = pytest.raises(UsageError, match=r"module\.0\.weight: .*has changed weights")
    with run_that_saves(4, tmp_path, copies) as run, refused:
        run.train(3, {5: halve})
    assert "data" not in vars(nn.Parameter)
    run.check_saved(4)


def test_the_script_leaves_the_loop_when_the_state_is_copied(
    tmp_path: Path, copies: SlowCopies
) -> None:
    with run_that_saves(2, tmp_path, copies) as run:
        for _ in train.epochs(1):
            for _, x, y in run.loader:
                if len(run.after) == 2:
                    break
                run.step(x, y)
            for parameter in run.plain.parameters():
                parameter.detach().numpy()[:] = 0
    run.check_saved(2)


def test_a_copy_that_fails_costs_this_snapshot_alone(
    tmp_path: Path, copies: SlowCopies, caplog: pytest.LogCaptureFixture
) -> None:
    copies.fails = True
    with run_that_saves(2, tmp_path, copies) as run:
        run.train(1)
    assert "no memory is left" in caplog.text
    run.check_saved(3)


def test_a_wait_that_is_interrupted_gives_the_snapshot_up(
    tmp_path: Path, copies: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wait = Run(tmp_path), snapshotting.wait
    (snapshotter,) = run.savers
    run.step()
    done = snapshotter.take(run.state, Cursor(0, 1), 1, still=run.objects.still_between_steps())

    def interrupted(futures: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshotting, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        snapshotter.settle()
    monkeypatch.setattr(snapshotting, "wait", wait)
    assert not done.is_set()
    assert snapshotter.held() == -1
    assert done.is_set()
    assert copies.seen == ["waits", "copied"]


def test_a_member_is_busy_until_its_snapshot_is_marked(tmp_path: Path, copies: SlowCopies) -> None:
    """So none overwrites the one before while others copy this one."""
    run = Run(tmp_path)
    (snapshotter,) = run.savers
    run.step()
    snapshotter.take(
        run.state, Cursor(0, 1), 1, durable=False, still=run.objects.still_between_steps()
    )
    assert snapshotter.is_busy()
    snapshotter.settle()
    assert not snapshotter.is_busy()
    assert snapshotter.held() == 1

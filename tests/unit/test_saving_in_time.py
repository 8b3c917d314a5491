"""Snapshots that are taken while earlier ones are still being written: none is mixed up."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic import train
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.activity import Activity
from elastic.worker.checkpoint import checkpoint_writer as writing
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.process.local import LocalRun, local_context
from tests.patience import DEADLINE_S, wait_for
from tests.unit.engine_under_test import Loop, square
from tests.unit.saving_under_test import Run, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Gate:
    """Storage that writes nothing before it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = writing.write_part

        def write_part(*args: Any) -> Any:
            assert self.open.wait(DEADLINE_S)
            return real(*args)

        patch.setattr(writing, "write_part", write_part)


def weights_in(path: Path) -> dict[int, list[bytes]]:
    """Return the weights in each checkpoint of a run, by step."""
    run = RunDirectory(str(path))
    found = {}
    for name, marker in run.markers():
        state = read_checkpoint(run, name, marker)
        model = state["objects"]["models"][0]
        found[state["steps"]] = [tensor.numpy().tobytes() for tensor in model.values()]
    return found


def test_the_last_snapshot_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both slots hold what is not written yet when the last epoch ends."""
    gate = Gate(monkeypatch)
    real = Snapshotter.wait_for_room

    def open_and_wait(snapshotter: Snapshotter, is_over: Any) -> None:
        assert snapshotter.is_busy()
        gate.open.set()
        real(snapshotter, is_over)

    monkeypatch.setattr(Snapshotter, "wait_for_room", open_and_wait)
    run = LocalRun(
        job_name="r", run_path=str(tmp_path), options={"every_n_steps": 1}, num_to_keep=9
    )
    weights: dict[int, list[bytes]] = {}
    with local_context(run) as context:
        loop = Loop.make()
        for x, y in ((x, y) for _, x, y in loop.batches()):
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if train.stepped():
                weights[len(weights) + 1] = parameters(loop.plain)
        context.snapshotter.finish()
    assert weights_in(tmp_path) == {step: weights[step] for step in (1, 2, 3)}


def parameters(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def test_a_slot_that_is_being_written_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after one that could not be taken: that one's place is free again."""
    gate, run = Gate(monkeypatch), Run(tmp_path)
    run.save(wait=False)
    then = {key: value.clone() for key, value in run.model.state_dict().items()}
    snapshotter = run.savers[0]
    with pytest.raises(KeyError):
        snapshotter.take(lambda: {}["no state"], None, 2)  # type: ignore[arg-type]
    assert not snapshotter.is_busy()
    run.save(wait=False)
    assert snapshotter.is_busy()
    with pytest.raises(OSError, match="still being written"):
        run.save(wait=False)
    gate.open.set()
    snapshotter.finish()
    name, marker = min(run.directory.markers(), key=lambda pair: pair[0])
    state = read_checkpoint(run.directory, name, marker)
    assert_same(state["objects"]["models"][0]["embed.weight"], then["embed.weight"])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_changes_under_a_writer_is_given_up(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker of the node has begun the next one in the same place."""
    run, real = Run(tmp_path, workers=2), writing.write_part

    def write_part(*args: Any) -> Any:
        part = real(*args)
        _, writer, slot, *_ = args
        if writer == rank:
            slot.unmark(0)
        return part

    monkeypatch.setattr(writing, "write_part", write_part)
    run.save()
    assert run.committed() == []
    assert "has changed" in caplog.text


def wait_for_beats(activity: Activity, count: int) -> None:
    """Wait until a main thread has shown so often that it is alive; time out if it does not."""
    first = activity.beats
    wait_for(lambda: activity.beats >= first + count)


def test_who_waits_for_storage_is_not_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 waits until all is written; the others wait for it in the next step."""
    real, run = writing.write_part, LocalRun(job_name="r", run_path=str(tmp_path))
    with local_context(
        dataclasses.replace(run, options={"every_n_steps": 2, "async_save": False})
    ) as context:

        def write_part(*args: Any) -> Any:
            if context.activity.beats:  # Nobody judges the last one, behind the loop.
                wait_for_beats(context.activity, 5)
            return real(*args)

        monkeypatch.setattr(writing, "write_part", write_part)
        train_one_epoch()
    assert len(RunDirectory(str(tmp_path)).markers()) == 2


def train_one_epoch() -> None:
    loop = Loop.make()
    for _, x, y in loop.batches():
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

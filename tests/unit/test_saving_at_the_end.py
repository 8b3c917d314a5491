"""The last checkpoint of a run: it is there, also if the group breaks meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic import train
from elastic.core.events.worker import RequestLeave
from elastic.core.policy.cursor import Cursor
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.activity import Activity
from elastic.worker.base.mailboxes import Mailboxes
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine import checkpoint_schedule as keeping
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.run_state import RunState
from elastic.worker.process.local import LocalRun, local_context
from elastic.worker.reduce.step_metadata import StepMetadata
from elastic.worker.state.arena import SnapshotSlot
from tests.patience import DEADLINE_S
from tests.unit.engine_under_test import STEPS, Loop, square
from tests.unit.saving_under_test import Run, Table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def keepers_of(run: Run) -> list[CheckpointScheduler]:
    """Return the members' keepers, behind the last epoch of a run of seven steps."""
    found = []
    for rank, snapshotter in enumerate(run.savers):
        snapshotter.configure({"every_n_steps": 100})
        state = RunState(run.objects, StreamBook())
        state.cursor, state.steps = Cursor(0, 7), 7
        checkpoints = CheckpointScheduler(state)
        known = Mailboxes()
        link = SimpleNamespace(
            save_request=lambda generation: 0, leave_request=known.leave_request,
            is_called_off=known.is_called_off, set_request=known.set_request,
        )  # fmt: skip
        checkpoints._entered = SimpleNamespace(  # type: ignore[assignment]
            snapshotter=snapshotter,
            world_rank=rank,
            generation=1,
            link=link,
            activity=Activity(),
        )
        found.append(checkpoints)
    return found


def rests(checkpoints: CheckpointScheduler, *, goes_on: bool = False) -> None:
    """Let a member know that its job rests, or that it goes on after all."""
    leave_request = RequestLeave(1, "resume" if goes_on else "pause", saves=not goes_on)
    checkpoints._context.link.set_request(leave_request)  # type: ignore[attr-defined]


def rows_of(keepers: list[CheckpointScheduler]) -> list[StepMetadata]:
    """Return what they tell with the next step."""
    found = []
    for checkpoints in keepers:
        leave_request = checkpoints._context.link.leave_request(1)
        told = checkpoints.flags(leave_request)
        cursor = checkpoints._run.cursor
        found.append(StepMetadata(leave_request is not None, cursor, 0, (), *told))
    return found


def commit(checkpoints: CheckpointScheduler, rows: list[StepMetadata]) -> None:
    """Let a member commit a step, and be at the boundary behind it."""
    checkpoints._run.count_step()
    checkpoints.committed(rows)
    checkpoints.at_boundary(lambda: False)


def at_end(keepers: list[CheckpointScheduler]) -> None:
    for checkpoints in keepers:
        checkpoints.end(holds=False)
        checkpoints.at_end(lambda: False)


def test_the_next_group_takes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member was lost before its part was written: this was the run's last state."""
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    at_end(keepers[:1])
    for rank, snapshotter in enumerate(run.savers):
        snapshotter.enter(RankInfo(2, rank, 2))
    monkeypatch.setattr(keeping, "send_metadata", Table(2).tell)
    together(keepers)
    assert [snapshotter.newest.number for snapshotter in run.savers] == [1, 1]
    monkeypatch.setattr("elastic.worker.checkpoint.checkpoint_writer.ORPHANED_S", 0.0)
    at_end(keepers)
    for snapshotter in run.savers:
        snapshotter.finish()
    assert len(run.committed()) == 1


def test_a_wish_that_some_members_have_not_heard_of_yet_is_written_by_all(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    for snapshotter in run.savers:
        snapshotter.configure({})
    keepers[0]._context.link.save_request = lambda generation: 1  # type: ignore[union-attr]
    rows = rows_of(keepers)
    assert [row.saves for row in rows] == [True, False]
    for checkpoints in keepers:
        commit(checkpoints, rows)
    for snapshotter in run.savers:
        assert snapshotter._writer is not None
        assert snapshotter._writer.finish(DEADLINE_S)
    assert len(run.committed()) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_only_shards_that_leave_by_plan_are_in_storage_also_without_automatic_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sharded: bool
) -> None:
    monkeypatch.setattr(CheckpointScheduler, "is_sharded", sharded)
    run = Run(tmp_path)
    (checkpoints,) = keepers_of(run)
    run.savers[0].configure({})
    checkpoints.before_leaving(lambda: False)
    assert len(run.committed()) == int(sharded), "others take it along"


def test_a_job_that_rests_has_its_last_step_in_storage_whoever_heard_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    for snapshotter in run.savers:
        snapshotter.configure({})
    for checkpoints in keepers:
        commit(checkpoints, [StepMetadata(False, Cursor(0, 7), 0, (), saves=True)] * 2)
    rests(keepers[1])
    rows = rows_of(keepers)
    rows = [StepMetadata.of(row.numbers())._replace(busy=True) for row in rows]
    assert [row.releases for row in rows] == [False, True]

    def leave(checkpoints: CheckpointScheduler) -> None:
        commit(checkpoints, rows)
        checkpoints.before_leaving(lambda: False)

    threads = [threading.Thread(target=leave, args=(checkpoints,)) for checkpoints in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [snapshotter.newest.number for snapshotter in run.savers] == [2, 2], (
        "once: at the boundary"
    )
    assert [marker.about("steps", 0) for _, marker in run.directory.markers()] == [8, 9]


def test_rows_of_a_group_that_leaves_take_the_place_of_no_others_that_are_still_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is lost while it copies: its rows of before are of use with those of rank 0 alone."""
    monkeypatch.setattr(CheckpointScheduler, "is_sharded", True)
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    for checkpoints in keepers:
        checkpoints._snapshotter.configure({"copies_every": 1})
        checkpoints._context.link.post = lambda _: None  # type: ignore[method-assign]
        commit(checkpoints, rows_of(keepers))
        checkpoints.know_all_settled([0.0, 0.0])
    (first, second), leaves = run.savers, RequestLeave(1, "one joins")
    keepers[1]._context.link.set_request(leaves)  # type: ignore[attr-defined]
    rows = rows_of(keepers)
    commit(keepers[0], rows)
    keepers[0].before_leaving(lambda: True)
    assert [mark.steps for _, mark in first.held_snapshots()] == [9, 8]
    assert [mark.steps for _, mark in second.held_snapshots()] == [8]


def test_the_last_snapshot_behind_a_break_takes_no_place_of_one_that_is_still_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it has come to nothing, and no gate of the pass has let members know."""

    def put(*_: Any) -> None:
        raise OSError("no memory is left")

    run = LocalRun(job_name="r", run_path=str(tmp_path), options={"every_n_steps": 1})
    with local_context(run) as context:
        loop, place = Loop.make(), train.get_context()
        for _ in train.epochs(1):
            for _, x, y in loop.loader:
                square(loop.model(x), y).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if train.stepped() and place.get_step() == 2:
                    monkeypatch.setattr(SnapshotSlot, "put", put)
                if train.stepped() and place.get_step() == 3:
                    break
        assert context.snapshotter.newest.steps == 3
        assert [mark.steps for _, mark in context.snapshotter.held_snapshots()] == [1]


def test_the_last_step_is_saved_again_where_its_snapshot_has_come_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fails = SnapshotSlot.put, [True]

    def put(*args: Any) -> None:
        if fails:
            fails.clear()
            raise OSError("no memory is left")
        real(*args)

    run = LocalRun(job_name="r", run_path=str(tmp_path), options={"every_n_steps": STEPS})
    monkeypatch.setattr(SnapshotSlot, "put", put)
    with local_context(run) as context:
        loop = Loop.make()
        for _, x, y in loop.batches():
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        context.snapshotter.finish()
    assert not fails
    (name_and_marker,) = RunDirectory(str(tmp_path)).markers()
    assert name_and_marker[1].about("steps", 0) == STEPS


def test_a_job_whose_group_is_over_waits_for_no_storage(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    checkpoints = keepers_of(run)[0]  # The other one has not written its part.
    rests(checkpoints)
    commit(checkpoints, rows_of([checkpoints]))
    checkpoints.before_leaving(lambda: True)
    assert run.committed() == []


def together(keepers: list[CheckpointScheduler]) -> None:
    """Let members agree that were on both sides of the gate."""

    def agree(rank: int) -> None:
        keepers[rank].agree_on_number(rank)

    threads: list[Any] = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)

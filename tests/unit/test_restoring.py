"""A group in which nobody has the state of the run: all members come to the same one, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan
from elastic.errors import StorageError, UsageError
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.activity import Activity
from elastic.worker.checkpoint.snapshot import RankInfo, SnapshotId
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine import state_restore as restoring
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.recovery_modes import ResumeState
from elastic.worker.engine.run_state import RunState, state_of
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current_engine
from elastic.worker.process.local import LocalRun, local_context
from elastic.worker.state.train_state import TrainState
from tests.patience import DEADLINE_S
from tests.unit.engine_under_test import STEPS, Loop, bits, square
from tests.unit.saving_under_test import Run, Table


def keeper_of(run: Run, rank: int, snapshotter: Snapshotter) -> CheckpointScheduler:
    checkpoints = CheckpointScheduler(RunState(run.objects, StreamBook()))
    checkpoints._entered = SimpleNamespace(  # type: ignore[assignment]
        snapshotter=snapshotter,
        world_rank=rank,
        run_path=run.directory.path,
        saved="",
        job_id="j1",
        copies=(),
        copies_key="",
        worker_id=f"n{rank}/1",
        activity=Activity(),
    )
    return checkpoints


def restored(
    run: Run, savers: Sequence[Snapshotter], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any] | Exception | None]:
    """Return what each member comes to, or raises."""
    table = Table(len(savers))
    monkeypatch.setattr(restoring, "send_metadata", table.tell)
    found: list[Any] = [None] * len(savers)

    def restore(rank: int) -> None:
        threading.current_thread().name = f"rank {rank}"
        try:
            found[rank] = keeper_of(run, rank, savers[rank]).restore(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=restore, args=(rank,)) for rank in range(len(savers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return found


def fails_on(rank: int, real: Callable[..., Any], when: Callable[..., bool] | None = None) -> Any:
    """Be a function that storage refuses to one member."""

    def call(*args: Any) -> Any:
        is_it = threading.current_thread().name == f"rank {rank}"
        if is_it and (when is None or when(*args)):
            raise StorageError("storage is away")
        return real(*args)

    return call


def two_of_one_step(tmp_path: Path) -> Run:
    """Return a run whose newest two checkpoints are of the same step, done again."""
    run = Run(tmp_path)
    run.save()
    run.savers[0].enter(RankInfo(generation=2))
    run.steps = 0
    run.savers[0].newest = SnapshotId(6)
    run.save()
    assert [steps for steps, _, _ in restoring._candidates(run.directory)] == [1, 1]
    return run


def test_members_never_go_on_from_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal steps looked like equal states; with consistency='samples' they are not."""
    run = two_of_one_step(tmp_path)
    newest = restoring._candidates(run.directory)[0][1]
    read = fails_on(1, restoring.read_checkpoint, lambda _, name, __: name == newest)
    monkeypatch.setattr(restoring, "read_checkpoint", read)
    found = restored(run, [Snapshotter((), None), Snapshotter((), None)], monkeypatch)
    assert found[1] is None  # It receives the state from rank 0.
    assert isinstance(found[0], dict)


def test_one_that_cannot_list_storage_receives_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save()
    monkeypatch.setattr(restoring, "_candidates", fails_on(1, restoring._candidates))
    found = restored(run, [Snapshotter((), None), Snapshotter((), None)], monkeypatch)
    assert isinstance(found[0], dict)
    assert found[1] is None


def test_memory_is_used_while_storage_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save()
    monkeypatch.setattr(restoring, "_candidates", fails_on(0, restoring._candidates))
    found = restored(run, [Snapshotter((), None), run.savers[0]], monkeypatch)
    assert found[0] is None
    assert isinstance(found[1], dict)
    assert found[1]["steps"] == 1


def test_all_say_so_if_nobody_can_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody begins anew, and nobody waits for one that has given up."""
    run = Run(tmp_path)
    run.save()
    monkeypatch.setattr(restoring, "_candidates", fails_on(0, restoring._candidates))
    found = restored(run, [Snapshotter((), None), Snapshotter((), None)], monkeypatch)
    assert all(isinstance(one, StorageError) for one in found), found
    assert "storage is away" in str(found[0])


def test_memory_that_cannot_be_opened_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save()
    gone = Snapshotter(("/proc/1/no/such", "/proc/1/no/such"), None)
    found = restored(run, [Snapshotter((), None), gone], monkeypatch)
    assert all(isinstance(one, dict) for one in found), found


def test_memory_is_newer_than_what_is_left_in_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is damaged, the one before it older than what a node still holds."""
    run = Run(tmp_path)
    run.save()
    held = Snapshotter((), None)
    held.enter(RankInfo(generation=1))
    run.step()
    held.take(run.state, Cursor(0, 2), 2)
    run.save()
    newest = run.folder(run.committed()[-1])
    (newest / "part-00000.distcp").write_bytes(b"torn")
    found = restored(run, [held], monkeypatch)
    assert isinstance(found[0], dict)
    assert found[0]["steps"] == 2


@contextmanager
def called_in(generation: int, run: LocalRun) -> Iterator[StepEngine]:
    with local_context(run) as context:
        engine = current_engine()
        assert engine is not None
        engine.enter(replace(context, generation=generation))
        yield engine
        context.snapshotter.finish()


def commits_of(loop: Loop, epochs: int, after_first: Callable[[], None]) -> int:
    commits = 0
    for _, x, y in loop.batches(epochs):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if train.stepped():
            commits += 1
            if commits == 1:
                after_first()
    return commits


def test_memory_that_a_later_worker_comes_with_counts_if_it_has_more_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All who had the newest state were killed, and a worker of another node has begun anew."""
    run = LocalRun(job_name="r", job_id="j1", options={"every_n_steps": 3})
    with local_context(LocalRun(job_name="undisturbed")):
        undisturbed = Loop.make()
        assert commits_of(undisturbed, 2, lambda: None) == 2 * STEPS
    memory, is_over = Snapshotter((), None), threading.Event()
    with called_in(1, run) as engine:
        commits_of(Loop.make(), 1, lambda: None)
        memory.slots._slots = engine.context.snapshotter.slots.all()

    def rejoin(*_: Any) -> None:
        is_over.clear()
        engine.enter(replace(engine.context, generation=3, snapshotter=memory))

    with called_in(2, run) as engine:
        monkeypatch.setattr(engine.groups, "must_leave", lambda _: is_over.is_set())
        monkeypatch.setattr(engine.groups, "rejoin", rejoin)
        loop = Loop.make()
        assert commits_of(loop, 2, is_over.set) == 1 + STEPS
    assert bits(loop.plain) == bits(undisturbed.plain)


@pytest.mark.parametrize("later", [True, False])
def test_one_that_was_away_goes_on_from_what_a_later_group_has_saved(
    later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who have trained on without it are gone when it is back."""
    run = LocalRun(job_name="r", job_id="j1", run_path=str(tmp_path), options={"every_n_steps": 3})
    with local_context(LocalRun(job_name="undisturbed")):
        undisturbed = Loop.make()
        assert commits_of(undisturbed, 2, lambda: None) == 2 * STEPS
    with called_in(2 if later else 1, run):
        commits_of(Loop.make(), 1, lambda: None)
    ((name, _),) = RunDirectory(str(tmp_path)).automatic()
    is_over = threading.Event()

    def rejoin(*_: Any) -> None:
        is_over.clear()
        saved = RunDirectory(str(tmp_path)).checkpoint_path(name)
        engine.enter(replace(engine.context, generation=3, saved=saved))

    with called_in(1, run) as engine:
        monkeypatch.setattr(engine.groups, "must_leave", lambda _: is_over.is_set())
        monkeypatch.setattr(engine.groups, "rejoin", rejoin)
        loop = Loop.make()
        monkeypatch.setattr(engine.run, "is_held", True)  # Its first group has begun the run.
        assert commits_of(loop, 2, is_over.set) == (1 + STEPS if later else 2 * STEPS)
    assert bits(loop.plain) == bits(undisturbed.plain)


def test_what_is_left_before_its_loader_was_read_says_how_the_data_was_cut() -> None:
    """A process may end with it as a snapshot, and the next one refuses another cut."""
    run, cut = RunState(TrainState(), StreamBook()), {"num_micro_batches": 4}
    run.put({**run.take((0, 0, 0)), "data": cut})
    left = ResumeState(run.objects.take(), Cursor(0, 1), run.logbook, cut=run.cut)
    again = RunState(TrainState(), StreamBook())
    again.go_on(left)
    for one in (left, again):
        assert state_of(one, left.state, (0, 0, 0))["data"] == cut
    loader: Any = SimpleNamespace(plan=DataPlan(64, 2, 8))
    for _ in range(2):  # What was refused once does not count the second time.
        with pytest.raises(UsageError, match="num_micro_batches=4; the loader has"):
            again.read(loader)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_loop_that_begins_anew_says_that_nobody_has_read_its_runs_checkpoint(
    is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = LocalRun(job_name="r", run_path=str(tmp_path / "r"), resume_from=str(tmp_path))
    with local_context(run):
        if is_read:
            assert train.get_checkpoint() is not None
        commits_of(Loop.make(), 1, lambda: None)
    assert ("checkpoint_unread" in caplog.text) is not is_read

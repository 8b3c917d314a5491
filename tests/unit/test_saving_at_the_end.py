"""The last checkpoint of a run: it is there, also if the group breaks meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.events.worker import WishBoundary
from elastic.core.policy.cursor import Cursor
from elastic.storage.run_directory import RunDirectory
from elastic.worker import keeping
from elastic.worker.exchange import Exchange
from elastic.worker.keeping import Keeper
from elastic.worker.local import LocalRun, run_local
from elastic.worker.logbook import Logbook
from elastic.worker.rows import StepRow
from elastic.worker.saving import Seat
from elastic.worker.stream_book import StreamBook
from tests.unit.engine_under_test import Loop, square
from tests.unit.saving_under_test import DEADLINE_S, Run, Table


def keepers_of(run: Run) -> list[Keeper]:
    """Return the members' keepers, behind the last epoch of a run of seven steps."""
    found = []
    for rank, saver in enumerate(run.savers):
        saver.configure({"every_n_steps": 100})
        keeper = Keeper(run.objects, Logbook(), StreamBook())
        keeper._saver, keeper.steps = saver, 7
        known = Exchange()
        link = SimpleNamespace(
            save_wish=lambda generation: 0, wish=known.wish, is_called_off=known.is_called_off,
            set_wish=known.set_wish,
        )  # fmt: skip
        keeper._place = SimpleNamespace(  # type: ignore[assignment]
            world_rank=rank, generation=1, link=link, activity=None
        )
        found.append(keeper)
    return found


def rests(keeper: Keeper, *, goes_on: bool = False) -> None:
    """Let a member know that its job rests, or that it goes on after all."""
    wish = WishBoundary(1, "resume" if goes_on else "pause", saves=not goes_on)
    keeper._place.link.set_wish(wish)  # type: ignore[union-attr]


def rows_of(keepers: list[Keeper]) -> list[StepRow]:
    """Return what they tell with the next step."""
    found = []
    for keeper in keepers:
        wish = keeper._place.link.wish(1)  # type: ignore[union-attr]
        told = keeper.flags(wish)
        found.append(StepRow(wish is not None, Cursor(0, keeper.steps), 0, (), *told))
    return found


def at_end(keepers: list[Keeper]) -> None:
    for keeper in keepers:
        keeper.at_end(Cursor(1, 0), None, lambda: False)


def test_it_is_taken_once(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    at_end(keepers)
    at_end(keepers)
    run.savers[0].finish()
    assert [saver.number for saver in run.savers] == [1, 1]
    assert len(run.committed()) == 1


def test_the_next_group_takes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member was lost before its part was written: this was the run's last state."""
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    at_end(keepers[:1])
    for rank, saver in enumerate(run.savers):
        saver.enter(Seat(2, rank, 2))
    monkeypatch.setattr(keeping, "tell_rows", Table(2).tell)
    together(keepers)
    assert [saver.number for saver in run.savers] == [1, 1]
    monkeypatch.setattr("elastic.worker.writing.ORPHANED_S", 0.0)
    at_end(keepers)
    for saver in run.savers:
        saver.finish()
    assert len(run.committed()) == 1


def test_a_wish_that_some_members_have_not_heard_of_yet_is_written_by_all(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    for saver in run.savers:
        saver.configure({})
    keepers[0]._place.link.save_wish = lambda generation: 1  # type: ignore[union-attr]
    rows = rows_of(keepers)
    assert [row.saves for row in rows] == [True, False]
    for keeper in keepers:
        keeper.committed(rows)
        keeper.at_boundary(Cursor(0, 7), None, lambda: False)
    for saver in run.savers:
        assert saver._writer is not None
        assert saver._writer.finish(DEADLINE_S)
    assert len(run.committed()) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_only_shards_that_leave_by_plan_are_in_storage_also_without_automatic_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sharded: bool
) -> None:
    monkeypatch.setattr(Keeper, "is_sharded", sharded)
    run = Run(tmp_path)
    (keeper,) = keepers_of(run)
    run.savers[0].configure({})
    keeper.before_leaving(Cursor(0, 7), None, lambda: False)
    assert len(run.committed()) == int(sharded), "others take it along"


def test_a_job_that_rests_has_its_last_step_in_storage_whoever_heard_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    for saver in run.savers:
        saver.configure({})
    for keeper in keepers:
        keeper.committed([StepRow(False, Cursor(0, 6), 0, (), saves=True)] * 2)
        keeper.at_boundary(Cursor(0, 7), None, lambda: False)
    rests(keepers[1])
    rows = rows_of(keepers)
    rows = [replace(StepRow.of(row.numbers()), busy=True) for row in rows]
    assert [row.rests for row in rows] == [False, True]

    def leave(keeper: Keeper) -> None:
        keeper.committed(rows)
        keeper.at_boundary(Cursor(0, 8), None, lambda: False)
        keeper.before_leaving(Cursor(0, 8), None, lambda: False)

    threads = [threading.Thread(target=leave, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [saver.number for saver in run.savers] == [2, 2], "once: at the boundary"
    assert [marker.about("steps", 0) for _, marker in run.directory.markers()] == [8, 9]


def test_a_job_whose_group_is_over_waits_for_no_storage(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keeper = keepers_of(run)[0]  # The other one has not written its part.
    rests(keeper)
    keeper.committed(rows_of([keeper]))
    keeper.at_boundary(Cursor(0, 8), None, lambda: False)
    began = time.monotonic()
    keeper.before_leaving(Cursor(0, 8), None, lambda: True)
    assert time.monotonic() - began < DEADLINE_S / 3
    assert run.committed() == []


def test_a_job_that_goes_on_after_all_waits_for_no_storage(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keeper = keepers_of(run)[0]  # The other one has not written its part.
    keeper.committed([StepRow(True, Cursor(0, 7), 0, (), rests=True)])  # It has told us of it.
    keeper.at_boundary(Cursor(0, 8), None, lambda: False)
    left = threading.Event()

    def leave() -> None:
        keeper.before_leaving(Cursor(0, 8), None, lambda: False)
        left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert not left.wait(0.2), "it has not heard of it itself yet"
    rests(keeper)
    assert not left.wait(0.2)
    rests(keeper, goes_on=True)
    assert left.wait(DEADLINE_S / 3)
    thread.join()


def test_nor_does_one_that_had_heard_so_before_the_others_told_that_it_rests(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, workers=2)
    keeper = keepers_of(run)[0]  # The other one has not written its part.
    rests(keeper)
    rests(keeper, goes_on=True)
    keeper.committed([StepRow(True, Cursor(0, 7), 0, (), rests=True)])
    keeper.at_boundary(Cursor(0, 8), None, lambda: False)
    began = time.monotonic()
    keeper.before_leaving(Cursor(0, 8), None, lambda: False)
    assert time.monotonic() - began < DEADLINE_S / 3


def test_a_checkpoint_that_was_wished_for_is_not_given_up_for_a_newer_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is taken once the first is written, or has come to nothing."""
    monkeypatch.setattr("elastic.worker.writing.ORPHANED_S", 0.0)
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)

    def step(request: int, late: list[Keeper]) -> None:
        """All are at a boundary; some copy their part only later, as if storage was slow."""
        for keeper in keepers:
            keeper._place.link.save_wish = lambda generation: request  # type: ignore[union-attr]
        rows = rows_of(keepers)
        for keeper in keepers:
            keeper.committed(rows)
            if keeper not in late:
                keeper.at_boundary(Cursor(0, keeper.steps), None, lambda: False)

    step(1, late=keepers[1:])
    step(2, late=keepers)
    assert not keepers[0].is_due
    assert keepers[0].flags(None)[:2] == (True, True), "wished for, and not now"
    slow = keepers[1]
    slow.is_due = True
    slow.steps = 8
    slow.at_boundary(Cursor(0, 8), None, lambda: False)
    assert all(saver._writer and saver._writer.finish(DEADLINE_S) for saver in run.savers)
    assert [marker.about("steps", 0) for _, marker in run.directory.markers()] == [8]
    slow.steps = 9
    step(2, late=[])
    assert all(saver._writer and saver._writer.finish(DEADLINE_S) for saver in run.savers)
    assert [marker.about("steps", 0) for _, marker in run.directory.markers()] == [8, 10]


def together(keepers: list[Keeper]) -> None:
    """Let members agree that were on both sides of the gate."""

    def agree(rank: int) -> None:
        keepers[rank].agree_on_number(rank)

    threads: list[Any] = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)


def memory_files() -> int:
    """Return how many files of snapshots this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("elastic-snapshot" in os.readlink(link) for link in links if os.path.lexists(link))


def wait_for_threads(count: int) -> None:
    """Wait until there are no more than so many threads."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := [one.name for one in threading.enumerate()]) > count:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_in_this_process_leaves_nothing_behind(tmp_path: Path, fails: bool) -> None:
    """A notebook trains a hundred times, and each held memory of twice the state."""
    gc.collect()
    files, threads = memory_files(), threading.active_count()

    def train_func() -> None:
        loop = Loop.make()
        for _, x, y in loop.batches():
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if fails:
            raise ValueError("wrong")

    run = LocalRun(job_name="r", run_path=str(tmp_path), options={"every_n_steps": 1})
    with pytest.raises(ValueError, match="wrong") if fails else contextlib.nullcontext():
        run_local(train_func, run)
    wait_for_threads(threads)
    gc.collect()
    assert memory_files() <= files
    assert RunDirectory(str(tmp_path)).markers()

"""Which automatic checkpoint is the newest: the order of the run, not that of clocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.core.policy.cursor import Cursor
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunRecord, write_run
from elastic.worker.checkpoint import checkpoint_writer as writing
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.engine import state_restore as restoring
from tests.unit.saving_under_test import Run


class SetClock:
    """A clock that somebody sets back with every look at it."""

    def __init__(self, now_ns: int = 1_000_000_000, step_ns: int = -1_000_000) -> None:
        self._now_ns, self._step_ns = now_ns, step_ns

    def unix_ns(self) -> int:
        self._now_ns += self._step_ns
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns


def steps_of(folder: Path) -> list[int]:
    """Return the steps of all automatic checkpoints, newest first, as a recovery reads them."""
    return [steps for steps, _, _ in restoring._candidates(RunDirectory(str(folder)))]


def set_clock(run: Run, clock: SetClock) -> None:
    run.savers[0]._writer._clock = clock  # type: ignore[union-attr]


def test_a_clock_that_is_set_back_hides_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    set_clock(run, SetClock())
    for _ in range(4):
        run.save()
    assert steps_of(tmp_path) == [4, 3]


def test_all_in_the_same_moment(tmp_path: Path) -> None:
    run = Run(tmp_path)
    set_clock(run, SetClock(step_ns=0))
    for _ in range(4):
        run.save()
    assert steps_of(tmp_path) == [4, 3]


def test_what_a_slow_writer_commits_late_is_old(tmp_path: Path) -> None:
    """Rank 0 of an earlier group wakes up, when the one of this group is further."""
    slow, run = Run(tmp_path), Run(tmp_path)
    run.savers[0].enter(RankInfo(generation=2))
    run.steps = 10
    for _ in range(2):
        run.save()
    slow.save()
    assert steps_of(tmp_path)[:2] == [12, 11]


def test_attempts_have_an_order_of_their_own(tmp_path: Path) -> None:
    """The second attempt runs on a node whose clock is behind."""
    first = Run(tmp_path)
    set_clock(first, SetClock(2_000_000_000))
    first.save()
    first.save()
    record = RunRecord(name="r", jobs=("j1", "j2"), started_unix_ns=1)
    write_run(first.directory.files, record)
    second = Run(tmp_path, job="j2")
    second.steps = 2
    set_clock(second, SetClock())
    second.save()
    assert steps_of(tmp_path) == [3, 2]
    second.save()
    assert steps_of(tmp_path) == [4, 3]


def test_a_new_one_is_never_what_is_deleted(tmp_path: Path) -> None:
    """The run's record does not know this attempt, as if somebody had put an old one back."""
    first = Run(tmp_path)
    first.save()
    first.save()
    write_run(first.directory.files, RunRecord(name="r", jobs=("j1",), started_unix_ns=1))
    second = Run(tmp_path, job="j2")
    second.steps = 2
    second.save()
    assert 3 in steps_of(tmp_path)


def test_what_others_have_begun_is_not_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest that counts is damaged, and the run goes on from the one before it."""
    monkeypatch.setattr(writing, "PARTS_S", 0.5)
    first = Run(tmp_path)
    first.steps = 49
    first.save()
    run = Run(tmp_path, workers=2)
    for rank, snapshotter in enumerate(run.savers):
        snapshotter.enter(RankInfo(generation=2, rank=rank, world_size=2))
    run.step()
    for snapshotter in reversed(run.savers):  # Rank 1 is ahead.
        for steps in (1, 2):
            snapshotter.take(run.state, Cursor(0, steps), steps)
            if snapshotter is run.savers[0] or steps == 2:
                snapshotter.finish()
    assert steps_of(tmp_path)[0] == 2


def test_averages_that_are_no_numbers_are_told_as_json(tmp_path: Path) -> None:
    """As those of reports: what reads them is not always Python."""
    run = Run(tmp_path)
    run.step()
    about = {"loss": float("nan"), "gain": float("inf"), "rate": 0.5}
    run.savers[0].take(run.state, Cursor(0, 1), 1, about=about)
    run.savers[0].finish()
    ((_, marker),) = run.directory.markers()
    assert "NaN" not in marker.metrics
    told = json.loads(marker.metrics)
    assert (told["loss"], told["gain"], told["rate"]) == ("nan", "inf", 0.5)


def test_an_attempt_that_was_given_up_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """It was cut off from everything, and wakes up while its successor writes."""
    old, new = Run(tmp_path), Run(tmp_path, job="j2", num_to_keep=4)
    write_run(old.directory.files, RunRecord(name="r", jobs=("j1", "j2"), started_unix_ns=1))
    for _ in range(3):
        new.save()
    begun = new.folder("auto-j2-s000000004-g000001-000004")
    begun.mkdir()
    (begun / "part-00001.distcp").write_bytes(b"of a member that is ahead")
    old.steps = 8
    old.save()
    assert begun.exists()
    assert steps_of(tmp_path) == [3, 2, 1, 9]

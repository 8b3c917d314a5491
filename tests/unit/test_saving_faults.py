"""What storage does to automatic checkpoints, and what it does not do to training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic.core.policy.cursor import Cursor
from elastic.errors import StorageError
from elastic.storage.verify import verify
from elastic.worker.checkpoint import checkpoint_writer as writing
from elastic.worker.checkpoint import snapshotter as saving
from tests.harness.faulty_storage import Faults
from tests.patience import DEADLINE_S
from tests.unit.saving_under_test import Run


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


def run_on(faults: Faults, workers: int = 2) -> Run:
    return Run(f"faulty://{faults.folder}/run", workers=workers)


def assert_newest_is(run: Run, steps: int) -> None:
    """The newest checkpoint that counts is of this step, and whole."""
    name = run.committed()[-1]
    assert dict(run.directory.markers())[name].about("steps") == steps
    assert verify(run.directory.checkpoint_path(name)).is_whole


@pytest.mark.parametrize("kind", ["full", "denied"])
@pytest.mark.parametrize("match", ["*part-00000.d*", "*part-00000.json*", "*manifest*", "*_COMM*"])
def test_what_cannot_be_written_is_given_up(
    faults: Faults, caplog: pytest.LogCaptureFixture, kind: str, match: str
) -> None:
    run = run_on(faults)
    run.save()
    fault = faults.add(kind, on="write", match=match)
    run.save()
    assert faults.hits(fault)
    assert "checkpoint_failed" in caplog.text
    assert_newest_is(run, 1)
    faults.remove()
    run.save()
    assert_newest_is(run, 3)


@pytest.mark.parametrize("match", ["*part-00000.d*", "*part-00001.d*", "*_PREP*", "*_COMM*"])
def test_a_run_whose_last_checkpoint_was_refused_has_not_ended_well(
    faults: Faults, match: str
) -> None:
    run = run_on(faults)
    faults.add("full", on="write", match=match)
    run.save()
    run.savers[0].finish()  # It may have been in the middle of a run that ended early.
    run.savers[0].must_end_stored = True
    with pytest.raises(StorageError, match="at the end of the run could not be stored"):
        run.savers[0].finish()
    faults.remove()
    run.save()
    run.savers[0].finish()


def test_a_rank_that_cannot_report_its_refused_part_fails_the_run(faults: Faults) -> None:
    run = run_on(faults)
    faults.add("full", on="write", match="*part-00001*")
    run.save(wait=False)
    run.savers[1].must_end_stored = True
    with pytest.raises(StorageError, match="at the end of the run could not be stored"):
        run.savers[1].finish()
    faults.remove()
    run.savers[0].finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_whose_last_checkpoint_hangs_has_not_ended_well(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    run = run_on(faults)
    hang = faults.add("hang", on="write", match="*part-00001.d*", times=1)
    run.save(wait=False)
    faults.wait_hit(hang)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "FINISH_REPORTED_S", 0.0)
        patch.setattr(saving, "FINISH_S", 0.0)
        run.savers[rank].finish()
        run.savers[rank].must_end_stored = True
        with pytest.raises(StorageError, match=r"run could not be stored .*in 0 s"):
            run.savers[rank].finish()
    faults.remove()
    run.savers[rank].finish()


@pytest.mark.parametrize("match", ["*manifest*", "*_PREPARED*"])
def test_a_full_disk_is_left_the_room_of_what_came_to_nothing(faults: Faults, match: str) -> None:
    """Else each attempt would leave less for the next one, and none would ever succeed."""
    run = run_on(faults)
    run.save()
    slow = faults.add("hang", on="write", match="*part-00001.d*", times=1)
    full = faults.add("full", on="write", match="*part-00000.d*", times=1)
    run.save(wait=False)
    faults.wait_hit(slow)
    faults.wait_hit(full)
    faults.remove()
    for snapshotter in run.savers:
        snapshotter.finish()
    faults.add("full", on="write", match=match)
    run.save()
    assert run.directory.names() == run.committed()
    assert_newest_is(run, 1)


def test_a_passing_fault_is_waited_out(faults: Faults) -> None:
    run = run_on(faults)
    fault = faults.add("io", on="write", match="*part-0000*", times=2)
    run.save()
    assert faults.hits(fault) == 2
    assert_newest_is(run, 1)


def test_storage_that_hangs_does_not_hold_up_training(faults: Faults) -> None:
    run = run_on(faults)
    run.save()
    fault = faults.add("hang", on="write")
    run.save(wait=False)
    run.save(wait=False)
    assert all(snapshotter.is_busy() for snapshotter in run.savers)  # No third one is begun.
    faults.wait_hit(fault)
    faults.remove()
    for snapshotter in run.savers:
        snapshotter.finish()
    assert_newest_is(run, 3)


def test_what_cannot_be_deleted_takes_up_room_only(
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_on(faults)
    faults.add("denied", on="delete")
    for _ in range(4):
        run.save()
    assert "prune_failed" in caplog.text
    faults.remove()
    run.save()
    assert len(run.committed()) == 2
    assert_newest_is(run, 5)


def test_a_member_that_could_not_write_does_not_keep_the_next_one_waiting(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ORPHANED_S", 0.1)
    run = run_on(faults)
    fault = faults.add("full", on="write", match="*part-00001.d*", times=1)
    run.save(wait=False)
    faults.wait_hit(fault)
    run.save()
    assert len(run.committed()) == 1
    assert_newest_is(run, 2)


def test_a_member_that_could_not_even_say_that_it_did_not_write_says_so_later(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for its part for ten minutes."""
    monkeypatch.setattr(writing, "UNREPORTED_S", 0.05)
    run = run_on(faults)
    faults.add("denied", on="write", match="*part-00001.d*")
    fault = faults.add("denied", on="write", match="*part-00001.failed*")
    run.save(wait=False)
    faults.wait_hit(fault)
    first = run.savers[0]
    assert first._writer is not None
    assert not first._writer.finish(0.2)
    faults.remove()
    assert first._writer.finish(DEADLINE_S)
    assert not run.committed()
    run.save()
    assert_newest_is(run, 2)


def test_a_thread_that_cannot_be_started_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's limit of processes counts threads, too; the others waited for ten minutes."""
    start, refused = threading.Thread.start, list[str]()

    def start_most(thread: threading.Thread) -> None:
        if thread.name == "elastic-writer" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_most)
    run = Run(tmp_path, workers=2)
    run.step()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run.savers[1].take(run.state, Cursor(0, 1), 1)
    assert run.savers[0].take(run.state, Cursor(0, 1), 1).wait(DEADLINE_S)
    assert not run.committed()
    run.save()
    assert_newest_is(run, 2)

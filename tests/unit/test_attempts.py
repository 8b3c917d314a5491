"""Who may use a run directory: new runs, runs to be gone on with, and those that are refused."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic.client import attempts
from elastic.client.attempts import RunAttempt, RunPlan, attempt, note_end
from elastic.client.terminal import EXIT_CONFIG, exit_code
from elastic.core.config import JobSpec
from elastic.core.facts import CheckpointRecord, JobId, JobPhase, ReportKind
from elastic.core.records import JobRecord
from elastic.errors import ConfigError, NameTaken, StorageError, UsageError
from elastic.storage import integrity
from elastic.storage.files import Files
from elastic.storage.integrity import find_damage, verify
from elastic.storage.marker import DAMAGED, MARKER, PREPARED, CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunOwner, RunPhase, RunRecord, read_run, write_run
from tests.strategies import SCRIPT


def plan(path: Path, job_id: str = "j1", **more: object) -> RunPlan:
    return RunPlan(run_path=str(path), name="r", job_id=job_id, **more)  # type: ignore[arg-type]


def job(job_id: str, phase: JobPhase, *recorded: Path) -> JobRecord:
    """What the coordinator knows of an attempt."""
    spec = JobSpec(job_id=JobId(job_id), name="r", entry=SCRIPT, min_workers=1, max_workers=1)
    records = [CheckpointRecord(str(path), 1, at) for at, path in enumerate(recorded)]
    return JobRecord(spec, phase, checkpoints=tuple(records))


def begin(
    path: Path, job_id: str = "j1", *, known: JobPhase | None = None, **more: object
) -> RunAttempt:
    """Begin an attempt; the coordinator says this of the one before."""
    with attempt(
        plan(path, job_id, **more), job_of=lambda job_id: known and job(job_id, known)
    ) as begun:
        return begun


def record(path: Path) -> RunRecord:
    found = read_run(Files(str(path)))
    assert found is not None
    return found


def commit(
    path: Path,
    name: str,
    index: int,
    metrics: dict[str, int],
    job_id: str = "j1",
    kind: ReportKind = ReportKind.SCRIPT,
) -> Path:
    """Commit a checkpoint with one file; return where it is."""
    run = RunDirectory(str(path))
    source = path.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "model").write_text(f"weights {index}")
    files = run.upload(source, name, claim=lambda path: True)
    marker = CheckpointMarker(job_id, 1, index, 1, 1, json.dumps(metrics), files, kind=kind)
    return Path(run.commit(name, marker))


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(
        NameTaken, match=r"exists already, is not empty, and has no run.json.*--name"
    ):
        begin(tmp_path)
    with pytest.raises(NameTaken):
        begin(tmp_path / "metrics.jsonl")
    for text in (b"{}", b"\xff"):
        (tmp_path / "run.json").write_bytes(text)
        with pytest.raises(StorageError, match=r"run.json is not what a run writes"):
            begin(tmp_path)


def test_a_submission_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    def fail_in(run: Path, job_id: str) -> None:
        with attempt(plan(run, job_id, trainer=b"x")):
            raise UsageError("no")

    fresh, empty, begun = tmp_path / "fresh", tmp_path / "empty", tmp_path / "begun"
    empty.mkdir()
    begin(begun)
    for run in (fresh, empty, begun):
        with pytest.raises(UsageError):
            fail_in(run, "j2")
    assert not fresh.exists()
    assert list(empty.iterdir()) == []
    assert record(begun).jobs == ("j1",)
    assert not (begun / attempts.TRAINER_FILE).exists()
    (begun / attempts.TRAINER_FILE).write_bytes(b"of j1")
    with pytest.raises(UsageError):
        fail_in(begun, "j3")
    assert (begun / attempts.TRAINER_FILE).read_bytes() == b"of j1"


def test_storage_that_cannot_be_written_is_refused_by_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{tmp_path}/file/run"):
        begin(tmp_path / "file" / "run")
    nowhere = RunPlan(run_path="nosuch://x/run", name="r", job_id="j")
    with pytest.raises(ConfigError, match="nosuch://x/run"), attempt(nowhere):
        pass


class EndpointConnectionError(Exception):
    """As botocore's: no OSError."""


class UnreachableStorage(MemoryFileSystem):
    """An object store whose host is not there."""

    protocol = "unreachable"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise EndpointConnectionError('Could not connect to "https://s3"')


def test_any_error_of_a_storages_own_client_is_ours() -> None:
    fsspec.register_implementation("unreachable", UnreachableStorage, clobber=True)
    says = r"unreachable://b/r cannot be made \(EndpointConnectionError: Could not connect to "
    there = RunPlan(run_path="unreachable://b/r", name="r", job_id="j")
    with pytest.raises(StorageError, match=says) as refused, attempt(there):
        pass
    assert exit_code(refused.value) == EXIT_CONFIG
    assert refused.value.__suppress_context__  # The frames of a client fill screens.


def test_without_a_reported_checkpoint_it_says_what_there_is(tmp_path: Path) -> None:
    begin(tmp_path / "r", resume_from="/else/c")
    assert begin(tmp_path / "r", "j2").resume_from == "/else/c"
    commit(tmp_path / "r", "auto-0", 0, {}, kind=ReportKind.AUTOMATIC)
    assert "whose newest checkpoint is auto" in begin(tmp_path / "r", "j3").lines[0]
    begin(tmp_path / "other")
    assert "r at its beginning" in begin(tmp_path / "other", "j2").lines[0]
    attempts.note_end(str(tmp_path / "other"), "j2", JobPhase.SUCCEEDED)
    again = begin(tmp_path / "other", "j3", may_repeat=True)
    assert "which has succeeded, at its beginning: it has no checkpoint" in again.lines[0]


@pytest.mark.parametrize("how", ["torn", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, how: str) -> None:
    begin(tmp_path / "r")
    commit(tmp_path / "r", "good", 0, {"epoch": 0})
    bad = commit(tmp_path / "r", "bad", 1, {"epoch": 1})
    if how == "missing":
        (bad / "model").unlink()
    else:
        text = "weig" if how == "torn" else "weights 9"
        (bad / "model").write_text(text)
    begun = begin(tmp_path / "r", "j2")
    assert begun.resume_from.endswith("/good")
    damage, line = begun.lines
    assert f"{bad} is damaged: file model" in damage
    assert "from good (epoch 0)" in line
    assert not (bad / MARKER).exists()
    assert (bad / DAMAGED).exists()


def test_what_the_coordinator_has_recorded_counts_and_no_marker_alone(tmp_path: Path) -> None:
    """The lead was killed before it wrote one; a group that was over wrote another."""
    begin(tmp_path / "r")
    old = commit(tmp_path / "r", "old", 0, {"epoch": 0})
    newest = commit(tmp_path / "r", "newest", 1, {"epoch": 1})
    (newest / MARKER).rename(newest / PREPARED)
    fenced = commit(tmp_path / "r", "fenced", 2, {"epoch": 2})
    known = job("j1", JobPhase.FAILED, old, newest)
    with attempt(plan(tmp_path / "r", "j2"), job_of=lambda job_id: known) as begun:
        assert begun.resume_from == str(newest)
    assert f"{fenced} is not among the coordinator's records" in begun.lines[0]
    assert (newest / MARKER).exists()
    (newest / "model").write_text("weights 9")
    with attempt(plan(tmp_path / "r", "j3"), job_of=lambda job_id: None) as begun:
        assert begun.resume_from == str(fenced)  # Nobody is left who knows better.
    with attempt(plan(tmp_path / "r", "j4"), job_of=lambda job_id: known) as begun:
        assert begun.resume_from == str(old)


def test_storage_that_fails_for_now_sets_nothing_aside(tmp_path: Path) -> None:
    begin(tmp_path / "r")
    path = commit(tmp_path / "r", "a", 0, {})
    (path / "model").unlink()
    (path / "model").symlink_to("model")  # It can be seen and not be read.
    with pytest.raises(StorageError, match="cannot read"):
        begin(tmp_path / "r", "j2")
    assert (path / MARKER).exists()


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    """Storage that is away looks the same; and it may be away from any call on."""
    path = commit(tmp_path / "r", "a", 0, {})
    (path / "model").write_text("weights 9")
    run = RunDirectory(str(tmp_path / "r"))
    away = tmp_path / "away"
    path.rename(away)
    with pytest.raises(StorageError, match="has no marker"):
        find_damage(run, "a")
    away.rename(path)
    assert "file model is changed" in find_damage(run, "a")
    assert "found damaged before" in find_damage(run, "a")  # By another rank, say.


def test_a_new_checkpoint_of_the_same_name_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = commit(tmp_path / "r", "a", 0, {})
    (path / "model").write_text("weights 9")

    def verify_late(checkpoint: Files, marker: CheckpointMarker) -> None:
        (path / MARKER).unlink()
        commit(tmp_path / "r", "a", 1, {})
        verify(checkpoint, marker)

    monkeypatch.setattr(integrity, "verify", verify_late)
    with pytest.raises(StorageError, match="another one"):
        find_damage(RunDirectory(str(tmp_path / "r")), "a")
    assert (path / MARKER).exists()


@pytest.mark.parametrize("known", [JobPhase.RUNNING, JobPhase.PENDING, JobPhase.STOPPING])
def test_a_run_whose_job_is_active_is_refused(tmp_path: Path, known: JobPhase) -> None:
    begin(tmp_path / "r")
    with pytest.raises(NameTaken, match=f"run r is {known.value} as job j1.*elastic stop j1"):
        begin(tmp_path / "r", "j2", known=known)


def test_a_run_that_has_succeeded_is_refused_also_if_only_the_coordinator_knows(
    tmp_path: Path,
) -> None:
    begin(tmp_path / "r")
    for known in (JobPhase.SUCCEEDED, None):
        with pytest.raises(NameTaken, match=r"run r has succeeded.*Result.from_path"):
            begin(tmp_path / "r", "j2", known=known)
    assert record(tmp_path / "r").phase is RunPhase.SUCCEEDED


def test_a_run_that_another_process_trains_is_refused_until_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        begin(tmp_path / "r")
        mine = RunOwner.this_process()
        assert not mine.is_other_and_alive()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        owner = RunOwner(mine.host, process.pid, int(fields[19]))
        files = Files(str(tmp_path / "r"))
        old = RunRecord(name="r", jobs=("j1",), owner=owner)
        write_run(files, old)
        with pytest.raises(NameTaken, match=f"process {process.pid} on this machine"):
            begin(tmp_path / "r", "j2")
        process.kill()
    assert begin(tmp_path / "r", "j2").lines
    reborn = RunOwner(mine.host, os.getppid(), 1)  # Another process has the same number now.
    assert not reborn.is_other_and_alive()


def test_an_older_attempts_end_is_not_the_runs(tmp_path: Path) -> None:
    begin(tmp_path / "r")
    begin(tmp_path / "r", "j2")
    note_end(str(tmp_path / "r"), "j1", JobPhase.SUCCEEDED)
    note_end(str(tmp_path / "r"), "j2", JobPhase.RUNNING)
    assert record(tmp_path / "r").phase is RunPhase.RUNNING


def test_who_holds_the_directorys_lock_for_himself_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `flock RUN python train.py` does."""
    monkeypatch.setattr(attempts, "LOCK_S", 0.1)
    (tmp_path / "r").mkdir()
    held = os.open(tmp_path / "r", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with attempt(RunPlan(run_path=str(tmp_path / "r"), name="r", job_id="j1")):
        pass
    os.close(held)


def test_a_directory_that_goes_while_we_begin_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever made it, and was refused."""

    def look(files: Files) -> None:
        monkeypatch.undo()
        (tmp_path / "r").rmdir()

    monkeypatch.setattr(attempts, "read_run", look)
    with attempt(RunPlan(run_path=str(tmp_path / "r"), name="r", job_id="j1")):
        assert read_run(Files(str(tmp_path / "r"))) is not None


def test_a_directory_whose_record_cannot_be_written_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise StorageError("No space left on device")

    monkeypatch.setattr(attempts, "create_run", full)
    with (
        pytest.raises(StorageError, match="No space"),
        attempt(RunPlan(run_path=str(tmp_path / "r"), name="r", job_id="j1")),
    ):
        pytest.fail("it is not there")
    assert not (tmp_path / "r").exists()


def test_a_submission_that_fails_takes_back_nothing_of_a_later_attempt(tmp_path: Path) -> None:
    first = RunPlan(run_path=str(tmp_path / "r"), name="r", job_id="j1")
    files = Files(first.run_path)
    with contextlib.suppress(KeyError), attempt(first):
        later = read_run(files)
        assert later is not None
        write_run(files, replace(later, jobs=(*later.jobs, "j2")))
        raise KeyError
    found = read_run(files)
    assert found is not None
    assert found.jobs == ("j1", "j2")


def test_a_run_that_goes_on_is_not_taken_from_who_took_it_while_we_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunPlan(run_path=str(tmp_path / "r"), name="r", job_id="j1")
    files = Files(first.run_path)
    with attempt(first):
        pass
    begun = read_run(files)
    assert begun is not None
    write_run(files, begun.ended(RunPhase.FAILED, 1, "no"))

    def polled(*_: object) -> attempts.RunAttempt:
        write_run(files, replace(begun, jobs=("j1", "j2")))
        return attempts.RunAttempt()

    monkeypatch.setattr(attempts, "_resumed", polled)
    with pytest.raises(NameTaken, match="by another process"), attempt(replace(first, job_id="j3")):
        pytest.fail("it is not ours")
    found = read_run(files)
    assert found is not None
    assert found.jobs == ("j1", "j2")

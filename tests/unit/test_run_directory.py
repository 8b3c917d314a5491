"""The run directory: what counts, what does not, and how a refusing disk is told."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from elastic.errors import StorageError
from elastic.storage.marker import MARKER, CheckpointMarker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.train.result import read_history


def marker(unix_ns: int = 1, **files: int) -> CheckpointMarker:
    stored = tuple(StoredFile(path, size) for path, size in files.items())
    return CheckpointMarker("j1", 2, 3, 4, unix_ns, '{"loss": 0.5}', stored)


def take_all(path: str) -> bool:
    return True


def directory_with(path: Path, **texts: str) -> Path:
    path.mkdir(parents=True)
    for name, text in texts.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '"x"'])
def test_a_torn_marker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"xpect|Error|checksum"):
        CheckpointMarker.from_json(text)


def test_a_directory_copied_from_an_older_checkpoint_brings_no_marker(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", **{"model": "x", MARKER: "{}"})
    run = RunDirectory(str(tmp_path / "run"))
    assert run.upload(source, "c1", claim=take_all)[0][:2] == ("model", 1)
    assert not run.is_committed("c1")


def test_storage_that_refuses_is_named_with_path_and_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = RunDirectory(str(tmp_path / "file" / "run"))
    source = directory_with(tmp_path / "source", model="x")
    run.metrics.add(2, {})
    with pytest.raises(StorageError, match=r"metrics-rank2.jsonl: .* directory"):
        run.metrics.flush()
    with pytest.raises(StorageError, match=r"checkpoints/c1: .*Not a directory"):
        run.upload(source, "c1", claim=take_all)
    with pytest.raises(StorageError, match=r"cannot commit .*checkpoints/c1"):
        run.commit("c1", marker())
    with pytest.raises(StorageError, match="it is not a directory"):
        RunDirectory(str(tmp_path)).upload(tmp_path / "file", "c1", claim=take_all)


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(StorageError, match="nosuch"):
        RunDirectory("nosuch://bucket/run")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", model="x" * 10_000)
    run = RunDirectory(str(tmp_path / "run"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="disk full"):
            run.upload(source, "c1", claim=take_all)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.checkpoint("c1").tree() == []


def test_a_late_writer_does_not_replace_a_file_of_a_committed_checkpoint(tmp_path: Path) -> None:
    late = directory_with(tmp_path / "late", model="late")
    newer = directory_with(tmp_path / "newer", model="newer")
    run = RunDirectory(str(tmp_path / "run"))

    def claim(_: str) -> bool:
        # The process stood still here, and the next generation stored a checkpoint of this name.
        run.upload(newer, "best", claim=take_all)
        run.commit("best", marker())
        return True

    with pytest.raises(StorageError, match="exists already"):
        run.upload(late, "best", claim=claim)
    assert run.checkpoint("best").read("model") == b"newer"


def test_a_member_finishes_what_it_had_recorded(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    own = marker(unix_ns=2)
    run.prepare("best", own)
    run.prepare("best", marker(unix_ns=1))  # By a late process, which nobody has recorded.
    assert run.finish("best", own)
    assert run.marker("best") == own


def test_metrics_that_storage_never_takes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.storage.metrics.KEPT_BYTES_MAX", 200)
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    run = RunDirectory(str(tmp_path))
    for step in range(100):
        run.metrics.add(0, {"metrics": {"step": step}})  # Not asked again so soon.
    path.rmdir()
    run.metrics.flush()
    steps = [row["metrics"]["step"] for row in run.read_metrics()]
    assert steps == list(range(steps[0], 100))
    assert 1 < len(steps) < 20
    assert "metrics_lost" in caplog.text


def test_history_has_rank_1s_report_where_rank_0_was_lost_before_its_own(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))

    def report(rank: int, epoch: int) -> None:
        place = f"e{epoch:05d}-s0000010-1"
        run.metrics.add(rank, {"rank": rank, "metrics": {"epoch": epoch}, "at": place})

    for rank, epoch in ((0, 0), (1, 0), (1, 1), (0, 2), (1, 2), (0, 1), (0, 2), (1, 3)):
        report(rank, epoch)
    run.metrics.flush()
    assert [row["metrics"]["epoch"] for row in read_history(str(tmp_path))] == [0, 1, 2, 3]
    report(0, 4)
    report(1, 4)
    found = [(row["rank"], row["metrics"]["epoch"]) for row in read_history(str(tmp_path))]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 3), (0, 4)]

"""The run directory: what counts, what does not, and how a refusing disk is told."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path

import pytest

from elastic.errors import StorageError
from elastic.storage.files import reason_of
from elastic.storage.marker import MARKER, Marker, StoredFile
from elastic.storage.run_directory import RunDirectory


def marker(unix_ns: int = 1, **files: int) -> Marker:
    stored = tuple(StoredFile(path, size) for path, size in files.items())
    return Marker("j1", 2, 3, 4, unix_ns, '{"loss": 0.5}', stored)


def take_all(path: str) -> bool:
    return True


def directory_with(path: Path, **texts: str) -> Path:
    path.mkdir(parents=True)
    for name, text in texts.items():
        (path / name).write_text(text)
    return path


def test_a_marker_is_read_as_it_was_written() -> None:
    written = marker(model=7)
    assert Marker.from_json(written.to_json()) == written


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '"x"'])
def test_a_torn_marker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"xpect|Error|checksum"):
        Marker.from_json(text)


def test_metrics_are_appended_by_rank(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    run.append_metrics(0, {"index": 0})
    run.append_metrics(3, {"index": 0})
    run.append_metrics(0, {"index": 1, "text": "ü"})
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    assert (tmp_path / "run/metrics-rank3.jsonl").exists()


def test_a_checkpoint_exists_only_once_it_is_committed(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", model="weights", optimizer="state")
    (source / "more").mkdir()
    (source / "more" / "shard").write_text("xyz")
    run = RunDirectory(str(tmp_path / "run"))
    files = run.upload(source, "c1", claim=take_all)
    assert [file[:2] for file in files] == [("model", 7), ("more/shard", 3), ("optimizer", 5)]
    assert files[1].crc32 == zlib.crc32(b"xyz")
    assert run.newest_checkpoint() == ""
    assert not run.is_committed("c1")
    path = run.commit("c1", marker())
    assert path == str(tmp_path / "run/checkpoints/c1") == run.newest_checkpoint()
    assert (Path(path) / "more" / "shard").read_text() == "xyz"


def test_a_directory_copied_from_an_older_checkpoint_brings_no_marker(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", **{"model": "x", MARKER: "{}"})
    run = RunDirectory(str(tmp_path / "run"))
    assert run.upload(source, "c1", claim=take_all)[0][:2] == ("model", 1)
    assert not run.is_committed("c1")


def test_only_claimed_files_are_written(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", mine="x", theirs="y")
    run = RunDirectory(str(tmp_path / "run"))
    files = run.upload(source, "c1", claim=lambda path: path == "mine")
    assert [path for path, *_ in files] == ["mine", "theirs"]
    assert [p.name for p in (tmp_path / "run/checkpoints/c1").iterdir()] == ["mine"]


def test_the_newest_checkpoint_is_the_one_committed_last_whatever_its_name(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    for name, unix_ns in (("b", 1), ("c", 3), ("a", 2)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        run.commit(name, marker(unix_ns))
    (tmp_path / "checkpoints" / "torn").mkdir()
    (tmp_path / "checkpoints" / "torn" / MARKER).write_text('{"unix_ns": 9')
    assert run.newest_checkpoint() == str(tmp_path / "checkpoints" / "c")


def test_a_checkpoint_that_is_pruned_while_we_look_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(str(tmp_path))
    for name, unix_ns in (("kept", 1), ("pruned", 2)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        run.commit(name, marker(unix_ns))
    listed = run.files.list

    def list_then_lose(pattern: str) -> list[str]:
        found = listed(pattern)
        (tmp_path / "checkpoints" / "pruned" / MARKER).unlink()
        return found

    monkeypatch.setattr(run.files, "list", list_then_lose)
    assert run.newest_checkpoint() == str(tmp_path / "checkpoints" / "kept")


def test_a_discarded_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", model="x")
    run = RunDirectory(str(tmp_path / "run"))
    run.upload(source, "c1", claim=take_all)
    run.discard("c1")
    run.discard("never-there")
    assert not (tmp_path / "run/checkpoints/c1").exists()


def test_any_file_system_of_fsspec_will_do() -> None:
    run = RunDirectory("memory://bucket/run")
    run.append_metrics(0, {"index": 0})
    run.append_metrics(0, {"index": 1})
    run.commit("c1", marker())
    assert run.newest_checkpoint() == "memory://bucket/run/checkpoints/c1"


def test_storage_that_refuses_is_named_with_path_and_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = RunDirectory(str(tmp_path / "file" / "run"))
    source = directory_with(tmp_path / "source", model="x")
    with pytest.raises(StorageError, match=r"rank 2 .*metrics-rank2.jsonl: .* directory"):
        run.append_metrics(2, {})
    with pytest.raises(StorageError, match=r"checkpoints/c1: .*Not a directory"):
        run.upload(source, "c1", claim=take_all)
    with pytest.raises(StorageError, match=r"cannot commit .*checkpoints/c1"):
        run.commit("c1", marker())
    with pytest.raises(StorageError, match="it is not a directory"):
        RunDirectory(str(tmp_path)).upload(tmp_path / "file", "c1", claim=take_all)


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(StorageError, match="nosuch"):
        RunDirectory("nosuch://bucket/run")


def test_a_full_disk_is_called_by_its_name() -> None:
    assert reason_of(OSError(errno.ENOSPC, "No space left on device")).startswith("disk full")
    assert reason_of(PermissionError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert reason_of(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.root
def test_a_full_disk_is_told_from_a_real_one(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "source", model="x")
    (tmp_path / "run/checkpoints/c1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/c1/model.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="disk full"):
        RunDirectory(str(tmp_path / "run")).upload(source, "c1", claim=take_all)


def test_metrics_that_storage_did_not_take_are_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.storage.metrics.AGAIN_S", 0.0)
    run = RunDirectory(str(tmp_path))
    run.append_metrics(0, {"metrics": {"step": 0}})
    path = tmp_path / "metrics.jsonl"
    path.rename(tmp_path / "aside")
    path.mkdir()  # Stands for a disk that takes nothing.
    for step in (1, 2):
        with pytest.raises(StorageError, match=r"metrics\.jsonl"):
            run.append_metrics(0, {"metrics": {"step": step}})
    path.rmdir()
    (tmp_path / "aside").rename(path)
    run.append_metrics(0, {"metrics": {"step": 3}})
    assert [row["metrics"]["step"] for row in run.read_metrics()] == [0, 1, 2, 3]


def test_metrics_that_storage_never_takes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.storage.metrics.KEPT_BYTES_MAX", 200)
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    run = RunDirectory(str(tmp_path))
    with pytest.raises(StorageError):
        run.append_metrics(0, {"metrics": {"step": 0}})
    for step in range(1, 100):
        run.append_metrics(0, {"metrics": {"step": step}})  # Not asked again so soon.
    path.rmdir()
    run.flush_metrics()
    steps = [row["metrics"]["step"] for row in run.read_metrics()]
    assert steps == list(range(steps[0], 100))
    assert 1 < len(steps) < 20
    assert "metrics_lost" in caplog.text


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x1cb", "\udc80", "naïve", "a\nb"])
def test_what_is_reported_comes_back_whatever_characters_are_in_it(
    tmp_path: Path, text: str
) -> None:
    run = RunDirectory(str(tmp_path))
    run.append_metrics(0, {"index": 0, "metrics": {"said": text}})
    run.append_metrics(0, {"index": 1, "metrics": {text: 1}})
    assert [row["metrics"] for row in run.read_metrics()] == [{"said": text}, {text: 1}]


def test_a_line_that_a_kill_tore_takes_no_other_with_it(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path)).append_metrics(0, {"index": 0, "metrics": {"a": 1}})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"index": 1, "met')
    after = RunDirectory(str(tmp_path))
    after.append_metrics(0, {"index": 2, "metrics": {"a": 3}})
    assert [row["index"] for row in after.read_metrics()] == [0, 2]

"""Nothing is written over a checkpoint that counts, and none is removed for its name's sake."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastic.errors import DamagedCheckpoint, StorageError
from elastic.storage.files import Files
from elastic.storage.integrity import read_marker
from elastic.storage.marker import CheckpointMarker, StoredFile
from elastic.storage.metrics import MetricsLog, MetricsReader, read_metrics
from elastic.storage.run_directory import RunDirectory
from tests.patience import wait_for


def source_of(folder: Path, content: str = "weights") -> Path:
    folder.mkdir()
    (folder / "model").write_text(content)
    return folder


def marker_of(files: tuple[StoredFile, ...] = ()) -> CheckpointMarker:
    return CheckpointMarker("j", 1, 0, 1, 1, "{}", files)


def test_an_upload_under_a_name_that_counts_leaves_it_whole(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    files = run.upload(source_of(tmp_path / "a"), "latest", claim=lambda _: True)
    run.commit("latest", marker_of(files))
    with pytest.raises(StorageError, match="latest exists already; use another name"):
        run.upload(source_of(tmp_path / "b", "other"), "latest", claim=lambda _: True)
    assert (tmp_path / "run" / "checkpoints" / "latest" / "model").read_text() == "weights"


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?"])
def test_a_name_with_a_patterns_characters_is_no_pattern(name: str) -> None:
    memory = fsspec.filesystem("memory")
    files = Files("memory://names[1]/run")
    memory.pipe_file("/names1/run/a1/x", b"another run's")
    for each in ("a1", "a2", name):
        memory.pipe_file(f"/names[1]/run/{each}/x", b"1")
    files.delete(name)
    assert memory.find("/names[1]") == ["/names[1]/run/a1/x", "/names[1]/run/a2/x"]
    assert memory.find("/names1") == ["/names1/run/a1/x"]
    memory.pipe_file("/names[1]/run/file[1]", b"1")
    memory.pipe_file("/names[1]/run/folder[1]/below/x", b"1")
    files.delete("file[1]")
    files.delete("folder[1]")
    assert not memory.exists("/names[1]/run/folder[1]")
    assert memory.find("/names[1]") == ["/names[1]/run/a1/x", "/names[1]/run/a2/x"]
    with pytest.raises(StorageError, match="cannot delete"):
        files.delete("none[1]")
    memory.rm("/names1", recursive=True)


def test_what_was_found_damaged_is_not_taken_for_whole_later(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    files = run.upload(source_of(tmp_path / "a"), "c", claim=lambda _: True)
    run.commit("c", marker_of(files))
    run.set_aside("c", "file model is changed")
    with pytest.raises(DamagedCheckpoint, match="found damaged before: file model is changed"):
        read_marker(run.checkpoint("c"))


def test_folders_behind_links_are_part_of_a_checkpoint_and_broken_links_are_refused(
    tmp_path: Path,
) -> None:
    run, source = RunDirectory(str(tmp_path / "run")), source_of(tmp_path / "a")
    (source_of(tmp_path / "big") / "more").mkdir()
    (tmp_path / "big" / "more" / "shard").write_text("s")
    (source / "shards").symlink_to(tmp_path / "big")
    (tmp_path / "big" / "more" / "up").symlink_to(tmp_path / "big")
    found = run.upload(source, "c", claim=lambda _: True)
    assert [file.path for file in found] == ["model", "shards/model", "shards/more/shard"]
    (source / "step_10").mkdir()
    (source / "step_10" / "weights").write_text("w")
    (source / "latest").symlink_to("step_10")
    (source / "me").symlink_to(".")
    found = run.upload(source, "both", claim=lambda _: True)
    assert [file.path for file in found] == [
        "latest/weights", "model", "shards/model", "shards/more/shard", "step_10/weights",
    ]  # fmt: skip
    os.symlink(tmp_path / "nowhere", source / "gone")
    with pytest.raises(StorageError, match="No such file"):
        run.upload(source, "d", claim=lambda _: True)


def reported(number: int, generation: int = 1) -> dict[str, Any]:
    return {"generation": generation, "unix_ns": number + 1, "metrics": {"n": number}}


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [row["metrics"]["n"] for row in rows]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failed_write_neither_loses_nor_doubles_a_line(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """`is_lost`: the store has written the lines, and only its answer was lost."""
    monkeypatch.setattr(Files, "is_object_store", True)
    files = Files(f"memory://metrics-parts-{is_lost}", patience_s=0)
    log = MetricsLog(files, 0, flush_s=0.0)
    for number in range(3):
        log.append(reported(number))
    real = Files.write

    def fail(files: Files, name: str, data: bytes) -> None:
        if is_lost:
            real(files, name, data)
        raise StorageError("no answer")

    monkeypatch.setattr(Files, "write", fail)
    with pytest.raises(StorageError):
        log.append(reported(3))
    log.append(reported(4, generation=2))
    monkeypatch.setattr(Files, "write", real)
    monkeypatch.setattr(log, "_not_before", 0.0)
    log.append(reported(5, generation=2))
    assert numbers(read_metrics(files, 0)) == [0, 1, 2, 3, 4, 5]


def test_lines_of_a_rank_that_a_process_no_longer_has_are_written_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Files, "is_object_store", True)
    run = RunDirectory("memory://metrics-of-two-ranks")
    for number in range(3):
        run.metrics.add(1, reported(number))
    wait_for(lambda: not run.metrics._requests, "the thread that writes")
    assert numbers(run.read_metrics(1)) == [0]  # The others wait: a part is rewritten each time.
    run.metrics._logs[1]._not_before = 0.0
    run.metrics.add(0, reported(3, generation=2))
    wait_for(lambda: numbers(run.read_metrics(1)) == [0, 1, 2], "lines of both ranks")


def test_a_reader_returns_each_row_once_whatever_the_writers_clocks_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Files, "is_object_store", True)
    files = Files("memory://metrics-clocks")
    reader = MetricsReader(files, 0)
    MetricsLog(files, 0, flush_s=0.0).append(reported(10))
    assert numbers(reader.read()) == [10]
    behind = MetricsLog(files, 0, flush_s=0.0)
    behind.append(reported(5))
    assert numbers(reader.read()) == [5]
    behind.append(reported(6))
    assert numbers(reader.read()) == [6]
    assert reader.read() == []
    assert numbers(MetricsReader(files, 0).read()) == [10, 5, 6]


def test_a_store_that_takes_a_part_at_a_time_gets_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Files, "is_object_store", True)
    monkeypatch.setattr("elastic.storage.metrics.PART_BYTES_MAX", 1)
    monkeypatch.setattr("elastic.storage.metrics.KEPT_BYTES_MAX", 5 * len(json.dumps(reported(0))))
    monkeypatch.setattr("elastic.storage.metrics.AGAIN_S", 0.0)
    files = Files("memory://metrics-throttled", patience_s=0)
    log = MetricsLog(files, 0, flush_s=0.0)
    real, calls = Files.write, iter(range(1000))

    def write(files: Files, name: str, data: bytes) -> None:
        if next(calls) % 2:
            raise StorageError("slow down")
        real(files, name, data)

    monkeypatch.setattr(Files, "write", write)
    for number in range(9):
        with contextlib.suppress(StorageError):
            log.append(reported(number))
    monkeypatch.setattr(Files, "write", real)
    log.flush()
    assert numbers(read_metrics(files, 0)) == [*range(9)]

"""Storage that fails for a moment is asked again; storage that says no is named at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import InvariantViolation, StorageError
from elastic.storage.files import Files
from elastic.storage.marker import MARKER, CheckpointMarker, StoredFile
from elastic.storage.outputs import OutputFile
from elastic.storage.run_directory import RunDirectory
from tests.harness.faulty_storage import Faults


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


def faulty(path: Path, patience_s: float = 30.0) -> Files:
    return Files(f"faulty://{path}/run", patience_s=patience_s)


def marker(job_id: str = "j1", unix_ns: int = 1) -> CheckpointMarker:
    return CheckpointMarker(job_id, 2, 3, 4, unix_ns, "{}", ())


# ------------------------------------------------------------------------------------ patience


@pytest.mark.parametrize("kind", ["io", "timeout", "stale"])
def test_a_fault_that_passes_is_waited_out(tmp_path: Path, faults: Faults, kind: str) -> None:
    files = faulty(tmp_path)
    fault = faults.add(kind, on="write", match="*/model*", times=2)
    assert files.write("c/model", b"weights") == StoredFile("c/model", 7, zlib.crc32(b"weights"))
    assert faults.hits(fault) == 2
    faults.add(kind, on="read", times=1)
    assert files.read("c/model") == b"weights"
    faults.add(kind, on="read", times=1)
    assert files.checksum("c/model").crc32 == zlib.crc32(b"weights")
    faults.add(kind, on="read", times=1)
    assert files.exists("c/model")
    faults.add(kind, on="list", times=1)
    assert files.list("*/*") == ["c/model"]
    faults.add(kind, on="delete", times=1)
    files.delete("c")
    assert not files.exists("c")


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, faults: Faults
) -> None:
    run = RunDirectory(f"faulty://{tmp_path}/run", patience_s=0)
    run.commit("c1", marker())
    faults.add("io", on="list")
    with pytest.raises(StorageError, match="cannot list"):
        run.newest_checkpoint()


def test_a_tree_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, faults: Faults
) -> None:
    files = faulty(tmp_path, patience_s=0)
    assert files.tree() == []
    files.write("deep/model", b"x")
    assert files.tree() == [StoredFile("deep/model", 1)]
    faults.add("io", on="list", match="*/deep")
    with pytest.raises(StorageError, match="cannot list"):
        files.tree()


def test_marks_of_folders_in_an_object_store_are_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(str(tmp_path))
    found = {str(tmp_path) + name: {"size": 0} for name in ("/", "/k=0/", "/k=0/a")}
    monkeypatch.setattr(Files, "is_object_store", True)
    monkeypatch.setattr(files.fs, "find", lambda path, detail: found)
    assert files.tree() == [StoredFile("k=0/a", 0)]
    with pytest.raises(InvariantViolation, match="all of"):
        files.delete("")


def test_a_function_that_writes_a_file_is_called_anew(tmp_path: Path, faults: Faults) -> None:
    faults.add("io", on="write", match="*/big.*.partial", times=1)
    calls = 0

    def produce(output: OutputFile) -> None:
        nonlocal calls
        calls += 1
        output.write(b"first")
        if calls == 1:
            faults.add("io", on="write", match="*/big.*.partial", times=1)
        output.write(b"second")

    files = faulty(tmp_path)
    assert files.put("big", produce).size == len(b"firstsecond")
    assert calls == 2
    assert files.read("big") == b"firstsecond"


def test_a_block_that_writes_a_file_is_not_run_twice(tmp_path: Path, faults: Faults) -> None:
    faults.add("io", on="write", times=1)
    with pytest.raises(StorageError), faulty(tmp_path).writing("model") as output:
        output.write(b"x")
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("url", ["{}/run", "faulty://{}/run", "memory://{}/run"])
def test_a_file_that_breaks_off_leaves_nothing_under_its_name(tmp_path: Path, url: str) -> None:
    files = Files(url.format(tmp_path))
    files.write("kept", b"old")

    def break_off(output: OutputFile) -> None:
        output.write(b"half")
        raise RuntimeError("in the middle")

    for name in ("kept", "new"):
        with pytest.raises(StorageError, match="in the middle"):
            files.put(name, break_off)
    assert files.read("kept") == b"old"
    assert files.list("*") == ["kept"]


# -------------------------------------------------------------------------------- exclusive files


def test_a_disk_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files = Files(str(tmp_path))
    assert files.create("marker", b"first")
    assert not files.create("marker", b"second")
    assert os.listdir(tmp_path) == ["marker"]


@pytest.mark.parametrize("url", ["{}/run", "faulty://{}/run"])
def test_a_checkpoint_is_committed_once_and_the_same_twice_is_no_error(
    tmp_path: Path, url: str
) -> None:
    run = RunDirectory(url.format(tmp_path))
    run.commit("c1", marker())
    run.commit("c1", marker())
    with pytest.raises(StorageError, match=r"c1: generation 2 of job j1 has committed"):
        run.commit("c1", marker("j2"))
    assert run.markers() == [("c1", marker())]


def test_a_name_that_a_torn_marker_holds_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/c1").mkdir(parents=True)
    (tmp_path / "checkpoints/c1" / MARKER).write_text('{"format"')
    with pytest.raises(StorageError, match="somebody has committed"):
        RunDirectory(str(tmp_path)).commit("c1", marker())


# ---------------------------------------------------------------------------------- other storage


@pytest.mark.parametrize(
    ("url", "package"), [("gs://bucket/run", "gcsfs"), ("abfs://bucket/run", "adlfs")]
)
def test_a_package_that_is_missing_is_named(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StorageError, match=f"pip install {package}"):
        Files(url)


# ------------------------------------------------------------------------------ the faults as such


def test_a_torn_file_is_told_by_nobody_but_its_checksum(tmp_path: Path, faults: Faults) -> None:
    faults.add("torn", match="*/model*")
    faults.add("slow", seconds=0.01)
    files = faulty(tmp_path)
    written = files.write("model", b"weights!")
    assert files.checksum("model") == StoredFile("model", 4, zlib.crc32(b"weig"))
    assert written.size == 8


def test_other_processes_meet_the_same_faults(tmp_path: Path, faults: Faults) -> None:
    fault = faults.add("full", on="write", times=1)
    script = (
        "from elastic.storage.files import Files\n"
        f"Files('faulty://{tmp_path}/run').write('model', b'x')\n"
    )
    environment = {**os.environ, "PYTHONPATH": faults.python_path()}
    for words in ("disk full", ""):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert words in done.stderr
        assert bool(done.returncode) == bool(words)
    assert faults.hits(fault) == 1
    assert (tmp_path / "run/model").read_bytes() == b"x"


def test_a_fault_that_does_not_exist_is_refused(faults: Faults) -> None:
    with pytest.raises(ValueError, match="kind='fire'"):
        faults.add("fire")


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a machine that loses its power has a marker, and not what the marker stands for."""
    calls: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    for name in ("mkdir", "fsync", "replace", "link"):
        note(name)
    files = Files(str(tmp_path / "run"))
    files.write("one/part", b"weights")
    assert calls == ["mkdir", "fsync", "mkdir", "fsync", "fsync", "replace", "fsync"]
    calls.clear()
    files.write("part", b"weights")
    assert calls == ["fsync", "replace", "fsync"]
    calls.clear()
    assert files.create(MARKER, b"{}")
    assert calls == ["fsync", "link", "fsync"]

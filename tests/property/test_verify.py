"""No damage to a checkpoint goes unseen, and the damaged file is named."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import NotFound
from elastic.storage.marker import MARKER, UNKNOWN, CheckpointMarker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.storage.verify import VerifyResult, checkpoints_at, verify
from tests.harness.faulty_storage import Faults

CONTENTS = {
    "model.bin": bytes(range(256)) * 3,
    "deep/optimizer": b"state",
    "one": b"1",
    "empty": b"",
}


def commit(run_path: Path, name: str = "c1") -> Path:
    """Commit a checkpoint as a worker does; return its directory."""
    run = RunDirectory(str(run_path))
    with tempfile.TemporaryDirectory() as source:
        for path, content in CONTENTS.items():
            (Path(source) / path).parent.mkdir(exist_ok=True)
            (Path(source) / path).write_bytes(content)
        files = run.upload(Path(source), name, claim=lambda _: True)
    return Path(run.commit(name, CheckpointMarker("j1", 2, 3, 4, 5, '{"loss": 0.5}', files)))


@contextmanager
def checkpoint() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield commit(Path(folder))


def named(verdict: VerifyResult) -> list[str]:
    assert not verdict.is_whole
    for file, how in verdict.damages:
        assert f"{file}: {how}" in str(verdict)
    return [file for file, _ in verdict.damages]


FILES = st.sampled_from([*CONTENTS, MARKER])


def test_what_was_committed_is_whole() -> None:
    with checkpoint() as path:
        verdict = verify(str(path))
        assert verdict.is_whole
        assert verdict.marker is not None
        assert verdict.marker.num_bytes == sum(map(len, CONTENTS.values()))
        assert str(verdict) == f"checkpoint {path} is whole"


@settings(deadline=None)
@given(FILES, st.integers(0), st.integers(1, 255))
def test_any_byte_that_is_flipped_is_seen(name: str, at: int, mask: int) -> None:
    with checkpoint() as path:
        content = bytearray((path / name).read_bytes())
        if content:
            before = json.loads(content) if name == MARKER else None
            content[at % len(content)] ^= mask
            (path / name).write_bytes(content)
            verdict = verify(str(path))
            # The marker's checksum is of what it says: a space more or less says the same.
            if name == MARKER and verdict.is_whole:
                assert json.loads(content) == before
            else:
                assert named(verdict) == [name]


@settings(deadline=None)
@given(FILES, st.integers(0), st.binary(min_size=1, max_size=8))
def test_any_file_that_is_cut_or_grown_is_seen(name: str, at: int, more: bytes) -> None:
    with checkpoint() as path:
        content = (path / name).read_bytes()
        blank = name == MARKER and not more.strip(b" \n\t\r")
        for changed in ([content[: at % len(content)]] if content else []) + [content + more][
            blank:
        ]:
            (path / name).write_bytes(changed)
            assert named(verify(str(path))) == [name]


@pytest.mark.parametrize("name", [*CONTENTS, MARKER])
def test_a_file_that_is_missing_is_named(name: str) -> None:
    with checkpoint() as path:
        (path / name).unlink()
        assert named(verify(str(path))) == [name]
        (path / name).mkdir()
        assert named(verify(str(path))) == [name]


def test_a_marker_without_files_names_them_all_and_files_without_a_marker_the_marker() -> None:
    with checkpoint() as path:
        for child in path.iterdir():
            if child.name != MARKER:
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        assert named(verify(str(path))) == sorted(CONTENTS)
    with checkpoint() as path:
        (path / MARKER).unlink()
        assert verify(str(path)).damages == ((MARKER, "never committed"),)


def test_sizes_say_how_a_file_is_damaged(tmp_path: Path) -> None:
    path = commit(tmp_path)
    (path / "model.bin").write_bytes(b"x" * 7)
    (path / "one").write_bytes(b"12")
    (path / "deep/optimizer").write_bytes(b"State")
    hows = dict(verify(str(path)).damages)
    assert hows["model.bin"] == "truncated: 7 bytes instead of 768"
    assert hows["one"] == "grown: 2 bytes instead of 1"
    assert hows["deep/optimizer"].startswith("changed: checksum ")


def test_a_file_whose_checksum_nobody_knows_is_told_apart(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    run.checkpoint("c1").write("model", b"abc")
    marker = CheckpointMarker("j1", 2, 3, 4, 5, "{}", (StoredFile("model", 3, UNKNOWN),))
    verdict = verify(run.commit("c1", marker))
    assert verdict.is_whole
    assert verdict.unchecked == ("model",)


def test_a_file_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    path = commit(tmp_path / "run")
    Faults(tmp_path).add("io", on="read", match="*/model.bin")
    (damage,) = verify(f"faulty://{path}", patience_s=0).damages
    assert damage == ("model.bin", "cannot be read (Input/output error)")


def test_a_torn_write_is_found(tmp_path: Path) -> None:
    Faults(tmp_path).add("torn", match="*/model.bin*", times=2)
    run = RunDirectory(f"faulty://{tmp_path}/run")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.bin").write_bytes(b"weights!")
    files = run.upload(tmp_path / "source", "c1", claim=lambda _: True)
    verdict = verify(run.commit("c1", CheckpointMarker("j1", 2, 3, 4, 5, "{}", files)))
    assert verdict.damages == (("model.bin", "truncated: 4 bytes instead of 8"),)


def test_a_run_directory_has_all_its_checkpoints_looked_at(tmp_path: Path) -> None:
    first, second = commit(tmp_path, "c1"), commit(tmp_path, "c2")
    (tmp_path / "checkpoints" / "torn").mkdir()
    paths = checkpoints_at(f"{tmp_path}/")
    assert paths == (str(first), str(second), str(tmp_path / "checkpoints" / "torn"))
    assert [verify(path).is_whole for path in paths] == [True, True, False]
    assert checkpoints_at(str(first)) == (str(first),)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither a checkpoint"):
        checkpoints_at(str(tmp_path))
    with pytest.raises(NotFound, match="does not exist"):
        checkpoints_at(str(tmp_path / "nothing"))

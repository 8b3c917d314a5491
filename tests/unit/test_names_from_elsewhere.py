"""Names and files that others wrote, before they become paths: nothing leads out of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from elastic.errors import GroupError, StorageError
from elastic.storage.files import Files
from elastic.storage.marker import CheckpointMarker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.report_votes import ReportPart, ReportVotes

MARKER = CheckpointMarker("j", 1, 0, 1, 0, "{}", ())
OUTSIDE = ("..", "../../precious", "a/../../..", "/etc", "a//b", "./a", "a/", "\0", "a/./b")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("all of it")
    (tmp_path / "run" / "checkpoints" / "good").mkdir(parents=True)
    return RunDirectory(str(tmp_path / "run"), patience_s=0)


@pytest.mark.parametrize("name", [*OUTSIDE, "good/inner", ""])
def test_no_name_of_a_checkpoint_leads_out_of_the_run(
    run: RunDirectory, tmp_path: Path, name: str
) -> None:
    acts: tuple[Callable[[], object], ...] = (
        lambda: run.remove(name), lambda: run.commit(name, MARKER),
        lambda: run.clear(name, kept=()), lambda: run.set_aside(name, "x"),
        lambda: run.is_committed(name), lambda: run.finish(name),
    )  # fmt: skip
    for act in acts:
        with pytest.raises(StorageError, match="expected"):
            act()
    run.discard(name)
    assert (tmp_path / "precious" / "thesis").read_text() == "all of it"
    assert (tmp_path / "run" / "checkpoints" / "good").is_dir()


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_of_a_file_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    files = Files(str(tmp_path / "run"), patience_s=0)
    for act in (files.read, files.delete, files.exists, files.checksum, files.folder):
        with pytest.raises(StorageError, match="leads elsewhere"):
            act(name)
    with pytest.raises(StorageError, match="leads elsewhere"):
        files.write(name, b"")
    marker = CheckpointMarker("j", 1, 0, 1, 0, "{}", (StoredFile(name, 1, 2),))
    with pytest.raises(ValueError, match="leads elsewhere"):
        CheckpointMarker.from_json(marker.to_json())


@pytest.mark.parametrize(
    "said",
    [
        "no json", '[-1, "../../precious", [], "x"]', '[2, "c", [], ""]', '["0", "c", [], ""]',
        '[1, "c", [], ""]', "[]", '[0, "c", [[1, 2, 3, 4, 5, 6]], ""]', "7", '[1, 2, [], ""]',
    ],
)  # fmt: skip
def test_parts_that_no_members_wrote_break_the_group_and_are_nobodys_failure(said: str) -> None:
    store = HashStore()
    votes = ReportVotes(store, 0, world_size=2)
    votes.add_part(0, ReportPart(1, "c"))
    assert [part.rank for part in votes.parts(0)] == [1]
    store.append("report/0/parts", said + "\n")
    with pytest.raises(GroupError, match="report 0"):
        votes.parts(0)
    store.set("report/0/outcome", said)
    if said != '[-1, "../../precious", [], "x"]' and not said.endswith('""]'):
        with pytest.raises(GroupError, match="report 0"):
            votes.wait_outcome(0)


def test_a_pipe_a_device_or_a_file_without_end_is_no_file_to_read(tmp_path: Path) -> None:
    files = Files(str(tmp_path), patience_s=0)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        for act in (files.read, files.checksum):
            with pytest.raises(StorageError, match="no regular file"):
                act(name)
        with pytest.raises(StorageError, match="no regular file"), files.reading(name):
            pass
    files.write("long", bytes(11))
    with pytest.raises(StorageError, match="more than 10 bytes"):
        files.read("long", 10)

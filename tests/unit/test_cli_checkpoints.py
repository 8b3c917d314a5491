"""`elastic verify`: what is in storage, without a coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elastic.client.cli import main
from elastic.client.text_format import num_bytes
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory


def elastic(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def commit(run: RunDirectory, name: str) -> Path:
    file = run.checkpoint(name).write("model", b"weights")
    return Path(
        run.commit(name, CheckpointMarker("j1", 1, 0, 1, 1, "{}", (file._replace(path="model"),)))
    )


def test_a_whole_run_exits_0_and_a_damaged_one_1_with_the_files_name(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    first, second = commit(run, "c1"), commit(run, "c2")
    done = elastic("verify", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("  whole  ") == 2
    (second / "model").write_bytes(b"weight")
    done = elastic("verify", tmp_path)
    assert done.exit_code == 1
    assert "model: truncated: 6 bytes instead of 7" in done.stdout
    done = elastic("verify", second, "-o", "json")
    assert done.exit_code == 1
    (told,) = json.loads(done.stdout)
    assert told["damages"] == [{"file": "model", "how": "truncated: 6 bytes instead of 7"}]
    assert elastic("verify", first).exit_code == 0


def test_what_is_not_there_exits_2(tmp_path: Path) -> None:
    done = elastic("verify", tmp_path / "nothing")
    assert done.exit_code == 2
    assert "does not exist; give the path of" in done.stderr
    assert elastic("verify", tmp_path).exit_code == 2
    assert "PATH is empty" in elastic("verify", "").stderr


@pytest.mark.parametrize("there", ["checkpoints", "run.json"])
def test_a_run_without_checkpoints_has_nothing_damaged(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir()
    done = elastic("verify", tmp_path)
    assert done.exit_code == 0
    assert "has no checkpoints" in done.stdout


def test_storage_that_cannot_be_reached_exits_78() -> None:
    done = elastic("verify", "nosuch://bucket/run")
    assert done.exit_code == 78


def test_amounts_of_bytes_are_said_as_people_say_them() -> None:
    told = [num_bytes(size) for size in (0, 999, 1000, 3_200_000, 5 * 10**12, 10**16)]
    assert told == ["0 B", "999 B", "1.0 kB", "3.2 MB", "5.0 TB", "10000.0 TB"]

"""A driver is killed in the middle of its run, and the same script run again goes on with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.scripts import RESUMING, Script
from tests.patience import wait_for

Start = Callable[..., Script]


def committed(run: Path) -> list[Path]:
    """Return the markers of a run's checkpoints, oldest first."""
    return sorted(run.glob("checkpoints/*/_COMMITTED"), key=lambda path: path.stat().st_mtime_ns)


def killed_in_the_middle(start: Start, tmp_path: Path) -> Path:
    """Run the script until it has three checkpoints, and kill the driver; return the run."""
    run = tmp_path / "storage" / "long"
    script = start("fit", script=RESUMING)
    wait_for(lambda: len(committed(run)) == 3, "three checkpoints")
    script.process.kill()
    assert script.wait() == -signal.SIGKILL
    script.assert_nothing_is_left()
    assert json.loads((run / "run.json").read_text())["phase"] == "running"
    (tmp_path / "storage" / "go").touch()
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def leave(path: Path) -> None:
    """Do no harm."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "epoch", "says"),
    [
        pytest.param(leave, 2, "", marks=pytest.mark.slow), (flip, 1, "changed: checksum"),
        pytest.param(tear, 1, "truncated: 100 bytes", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_same_script_goes_on_at_the_newest_checkpoint_that_is_sound(
    start: Start, tmp_path: Path, harm: Callable[[Path], None], epoch: int, says: str
) -> None:
    run = killed_in_the_middle(start, tmp_path)
    newest = committed(run)[-1].parent
    harm(newest / "dict.pt")
    script = start("fit", script=RESUMING)
    assert script.wait() == 0, script.said()
    script.assert_nothing_is_left()
    said = script.said()
    assert f"(epoch {epoch}); use another name to begin anew\n" in said
    if says:
        assert f"checkpoint {newest} is damaged: file dict.pt is {says}" in said
    assert f"returned [{epoch + 1}, 2]" in said
    assert "kept [0, 1, 2, 3, 4]" in said
    assert json.loads((run / "run.json").read_text())["phase"] == "succeeded"
    again = start("fit", script=RESUMING)
    assert again.wait() == 0, again.said()
    assert "resumes run long, which has succeeded, from" in again.said()
    assert "returned [5, 2]" in again.said()
    assert "kept [0, 1, 2, 3, 4]" in again.said()


def test_a_running_job_goes_on_from_the_checkpoint_before_a_damaged_one(
    start: Start, tmp_path: Path
) -> None:
    """Though `max_failures` is 0: it is no failure of the script's."""
    storage = tmp_path / "storage"
    script = start("fit", script=RESUMING)
    wait_for(lambda: len(committed(storage / "long")) == 3, "three checkpoints")
    newest = committed(storage / "long")[-1].parent
    flip(newest / "dict.pt")
    for rank in range(2):
        os.kill(int((storage / f"pid-{rank}").read_text()), signal.SIGKILL)
    (storage / "go").touch()
    assert script.wait() == 0, script.said()
    assert f"checkpoint {newest} is damaged: file dict.pt is changed: checksum" in script.said()
    assert "returned [2, 2]" in script.said()
    assert "kept [0, 1, 2, 3, 4]" in script.said()
    assert not (newest / "_COMMITTED").exists()
    script.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_is_restored_from_its_directory_alone(start: Start, tmp_path: Path) -> None:
    killed_in_the_middle(start, tmp_path)
    script = start("restore", script=RESUMING)
    assert script.wait() == 0, script.said()
    script.assert_nothing_is_left()
    assert "returned [3, 2]" in script.said()
    assert "history [0, 1, 2, 3, 4]" in script.said()
    other = start("branch", script=RESUMING)
    assert other.wait() == 0, other.said()
    assert "branched after [0, 0] of 0" in other.said()


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_resumed_by_a_second_script(
    start: Start, tmp_path: Path
) -> None:
    run = tmp_path / "storage" / "long"
    first = start("fit", script=RESUMING)
    wait_for(lambda: len(committed(run)) == 3, "three checkpoints")
    second = start("fit", script=RESUMING)
    assert second.wait() == 1, second.said()
    assert f"NameTaken: run long is running in {run}: process {first.process.pid}" in second.said()
    (tmp_path / "storage" / "go").touch()
    assert first.wait() == 0
    assert json.loads((run / "run.json").read_text())["phase"] == "succeeded"

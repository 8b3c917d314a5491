"""Checkpoints in the background: storage is slow, and workers are killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.scripts import Script
from tests.patience import wait_for

Start = Callable[..., Script]
UPLOADING = Path(__file__).with_name("uploading.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


def assert_done(script: Script, returned: str, *files: str) -> None:
    assert script.wait() == 0, script.said()
    script.assert_nothing_is_left()
    said = script.said()
    assert f"returned {returned}\n" in said, said
    assert f"files {list(files)}\n" in said, said


@pytest.mark.slow
def test_training_goes_on_while_storage_is_slow(start: Start, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    script = start("plain", script=UPLOADING)
    for rank in range(2):
        wait_for((storage / f"uploading-{rank}").exists, f"rank {rank} to upload")
    metrics = storage / "run" / "metrics.jsonl"
    wait_for(lambda: '{"epoch": 1, "goes_on": true}' in metrics.read_text(), "a report meanwhile")
    assert len(list(storage.glob("run/checkpoints/*/_COMMITTED"))) == 1
    (storage / "go").touch()
    assert_done(script, "began at 0", "rank0.pt", "rank1.pt")
    assert "kept [0, 1, 2, 3]" in script.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "returned", "kept"),
    [
        ("plain", "began at 1", "0, 1, 2, 3"),
        ("in_place", "went on in place", "0, (2, )?3"),
    ],
)
def test_a_worker_that_dies_during_an_upload_costs_a_checkpoint_and_no_training(
    start: Start, tmp_path: Path, case: str, returned: str, kept: str
) -> None:
    storage = tmp_path / "storage"
    script = start(case, script=UPLOADING)
    for rank in range(2):
        wait_for((storage / f"uploading-{rank}").exists, f"rank {rank} to upload")
    os.kill(int((storage / "pid-1").read_text()), signal.SIGKILL)
    wait_for(lambda: "generation 2" in script.said(), "the next group")
    (storage / "go").touch()
    assert_done(script, returned, "rank0.pt", "rank1.pt")
    # In place, a report that waits for the upload when the group breaks is given up with it.
    assert re.search(rf"kept \[{kept}\]", script.said())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "launcher", "files"),
    [
        ("there", (), ["shard0", "shard1"]),
        ("there_here", TORCHRUN, ["shard0", "shard1"]),
        ("plain_here", TORCHRUN, ["rank0.pt", "rank1.pt"]),
    ],
)
def test_checkpoints_come_into_the_run_directory_wherever_the_script_runs(
    start: Start, tmp_path: Path, case: str, launcher: tuple[str, ...], files: list[str]
) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "go").touch()
    script = start(case, *launcher, script=UPLOADING)
    returned = ", ".join(files) if case != "plain_here" else "began at 0"
    assert_done(script, returned, *files)

"""Scripts for torchrun that lose workers go on in processes of their own, and with all of them."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.scripts import Script
from tests.chaos.whole_script import BATCH, EPOCHS, KILLED, STEPS
from tests.patience import wait_for

SCRIPT = Path(__file__).with_name("whole_script.py")
REMEMBERING = """
import functools, os

@functools.cache
def rank():
    return int(os.environ["RANK"])
"""


def free_ports() -> int:
    """Return the first of some ports that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1]) - 10


@pytest.mark.slow
def test_a_script_that_loses_workers_finds_nothing_of_the_run_before(
    start: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "remembering.py").write_text(REMEMBERING)
    monkeypatch.setenv("FIRST_PORT", str(free_ports()))
    words = ("--standalone", "--min=1", "--max=3", "--max-restarts=0", f"--storage={tmp_path}/runs")
    run = start("whole", "-m", "elastic.client.cli", "run", *words, script=SCRIPT)
    assert run.wait() == 0, run.said()
    folder = tmp_path / "storage"
    assert len([*folder.glob("died-*")]) == len(KILLED)
    assert not (folder / "skipped").exists(), (folder / "skipped").read_text()
    for epoch in range(EPOCHS):
        rows = [
            row.split()
            for file in folder.glob(f"seen-{epoch}-*")
            for row in file.read_text().splitlines()
        ]
        # Replaced within moments, as few as one being enough: nobody trained without the others.
        assert {world for _, world in rows} == {"3"}
        seen = collections.Counter(int(sample) for sample, _ in rows)
        assert seen == collections.Counter(range(STEPS * 3 * BATCH)), (epoch, run.said())
    assert sorted((folder / "goodbyes").read_text().split()) == ["0", "1", "2"]
    children = (folder / "children").read_text().split()
    assert len(children) == 3 * (1 + len(KILLED))
    wait_for(lambda: not any(psutil.pid_exists(int(child)) for child in children), "their end")
    run.assert_nothing_is_left()

"""`python script.py`, nothing else: a cluster of its own comes up, and goes however it ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("drivers.py")
MARK = "ELASTIC_TEST_SCRIPT"
PATIENCE_S = 60.0
GOODBYE_S = 10.0


class Script:
    """A driver script, and all processes that came of it."""

    def __init__(self, case: str, tmp_path: Path, *launcher: str) -> None:
        self.mark = secrets.token_hex(8)
        self.out, self.err = tmp_path / "stdout", tmp_path / "stderr"
        known = {key: value for key, value in os.environ.items() if "ELASTIC_COORD" not in key}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(SCRIPT), case, str(tmp_path / "storage")],
                env={**known, MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def said(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self.processes(), "all processes to end", GOODBYE_S)


def until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """End what a failed test left."""
    started: list[Script] = []
    yield started
    for script in started:
        for process in script.processes():
            process.kill()
        script.process.wait()


@pytest.fixture
def start(scripts: list[Script], tmp_path: Path) -> Callable[..., Script]:
    def start_one(case: str, *launcher: str) -> Script:
        scripts.append(Script(case, tmp_path, *launcher))
        return scripts[-1]

    return start_one


def test_a_script_trains_twice_and_its_failure_is_told_once_and_last(
    start: Callable[..., Script],
) -> None:
    script = start("run_twice_and_fail")
    assert script.wait() == 1, script.said()
    script.assert_nothing_is_left()
    out, err = script.out.read_text(), script.err.read_text()
    assert "both runs are right" in out, script.said()
    assert "second init: elastic.init was called already" in out
    assert "rank 0 begins" in out
    assert "rank 1 begins" not in out
    assert err.count("ValueError: bad batch at step 7\n") == 1
    assert err.endswith("ValueError: bad batch at step 7\n")
    assert "TrainingFailed: run drivers-" in err
    assert "no node is connected" not in err


def test_a_script_that_is_killed_takes_its_cluster_with_it(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    script = start("train_on")
    pid = tmp_path / "storage" / "pid"
    until(lambda: pid.exists() and bool(pid.read_text()), "the worker to train")
    assert int(pid.read_text()) in [process.pid for process in script.processes()]
    script.process.kill()
    assert script.wait() == -signal.SIGKILL
    script.assert_nothing_is_left()


def test_an_interrupt_ends_a_wait_and_everything_with_it(start: Callable[..., Script]) -> None:
    script = start("wait_for_h100")
    until(lambda: "H100" in script.said(), "the reason for waiting")
    script.process.send_signal(signal.SIGINT)
    assert script.wait() in (-signal.SIGINT, 130), script.said()
    script.assert_nothing_is_left()
    (line,) = [line for line in script.said().splitlines() if "waits since" in line]
    assert "H100" in line
    assert script.said().endswith("was told to stop\n")


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node=2")])
def test_a_script_trains_in_its_own_process_or_in_those_of_torchrun(
    start: Callable[..., Script], launcher: tuple[str, ...]
) -> None:
    if launcher:
        launcher = (*launcher, "--standalone")
    script = start("run_here", *launcher)
    assert script.wait() == 0, script.said()
    assert script.out.read_text().count("both runs are right") == 1
    script.assert_nothing_is_left()

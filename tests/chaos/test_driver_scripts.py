"""`python script.py`, nothing else: a cluster of its own comes up, and goes however it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.scripts import Script
from tests.patience import wait_for


@pytest.mark.slow
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
    assert "WorkerGroupError: run drivers-" in err
    assert "no node is connected" not in err


def test_a_script_that_is_killed_takes_its_cluster_with_it(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    script = start("train_on")
    pid = tmp_path / "storage" / "pid"
    wait_for(lambda: pid.exists() and bool(pid.read_text()), "the worker to train")
    assert int(pid.read_text()) in [process.pid for process in script.processes()]
    script.process.kill()
    assert script.wait() == -signal.SIGKILL
    script.assert_nothing_is_left()


def test_an_interrupt_ends_a_wait_and_everything_with_it(start: Callable[..., Script]) -> None:
    script = start("wait_for_a_slot")
    wait_for(lambda: "more slots" in script.said(), "the reason for waiting")
    script.process.send_signal(signal.SIGINT)
    assert script.wait() in (-signal.SIGINT, 130), script.said()
    script.assert_nothing_is_left()
    lines = [line for line in script.said().splitlines() if "waits since" in line]
    assert any("more slots" in line for line in lines)
    assert script.said().endswith("no checkpoint was recorded: it would begin anew\n")


@pytest.mark.slow
def test_a_script_that_asks_for_what_is_not_here_is_told_at_once(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    script = start("ask_for_h100")
    assert script.wait() == 1, script.said()
    script.assert_nothing_is_left()
    assert "would wait for ever: no connected node has accelerator H100" in script.said()
    assert not (tmp_path / "storage").exists()


@pytest.mark.slow
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

"""Validations whose process, worker, or whole cluster is killed are taken up, and judged once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.scripts import Script
from tests.patience import DEADLINE_S, wait_for

Start = Callable[..., Script]
VALIDATING = Path(__file__).with_name("validating.py")


def begun(storage: Path) -> list[tuple[int, int]]:
    """Return process and epoch of each validation that has begun, in order."""
    path = storage / "begun"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(epoch)) for pid, epoch in (line.split() for line in lines)]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def findings(run: Path) -> list[dict]:
    paths = sorted(run.glob("checkpoints/*/_VALIDATED"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.slow
def test_what_is_killed_while_it_validates_is_taken_up_and_training_has_its_bits(
    start: Start, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    script = start("fit_beside_undisturbed", script=VALIDATING)
    wait_for(lambda: len(begun(storage)) == 1, "a validation")
    process = psutil.Process(begun(storage)[0][0])
    rank_zero = process.parent()
    process.kill()
    wait_for(lambda: len(begun(storage)) == 2, "it to be done again")
    assert rank_zero.is_running(), "a validation that dies is no matter for its worker"
    rank_zero.kill()
    wait_for(lambda: len(begun(storage)) == 3, "the next rank 0 to take it up")
    wait_for(lambda: is_gone(begun(storage)[1][0]), "the validation to end with its worker")
    assert [epoch for _, epoch in begun(storage)] == [0, 0, 0], "one at a time"
    (storage / "open").touch()
    wait_for(lambda: len(findings(storage / "judged")) >= 2, "two findings", 120.0)
    assert script.process.wait(DEADLINE_S) == 0, script.said()
    script.assert_nothing_is_left()
    said = script.said()
    # The least score but for the newest, which is kept in any case.
    assert "judged kept [[('epoch', 0), ('score', 0.0)], [('epoch', 2), ('score', 20.0)]]" in said
    assert "the same bits" in said
    scores = [found["metrics"]["score"] for found in findings(storage / "judged")]
    # One whose record nobody could note any more may be left; it counts nowhere.
    assert {0.0, 20.0} <= set(scores) <= {0.0, 10.0, 20.0}


@pytest.mark.slow
def test_validations_of_a_driver_that_was_killed_are_taken_up_by_the_next(
    start: Start, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    script = start("go_on", script=VALIDATING)
    committed = storage / "judged" / "checkpoints"
    wait_for(lambda: len(begun(storage)) == 1, "a validation")
    wait_for(lambda: len(list(committed.glob("*/_COMMITTED"))) >= 3, "all checkpoints")
    script.process.kill()
    assert script.wait() == -signal.SIGKILL
    script.assert_nothing_is_left()
    assert not findings(storage / "judged")
    assert len(list(committed.glob("*/_COMMITTED"))) >= 3, "none is deleted before it is judged"
    (storage / "open").touch()
    again = start("go_on", script=VALIDATING)
    wait_for(lambda: len(findings(storage / "judged")) >= 2, "two findings", 180.0)
    assert again.process.wait(DEADLINE_S) == 0, again.said()
    again.assert_nothing_is_left()
    assert "('score', 20.0)" in again.said()
    assert {epoch for _, epoch in begun(storage)} == {0, 1, 2}
    assert all(found["status"] == "VALIDATED" for found in findings(storage / "judged"))

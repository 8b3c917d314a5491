"""Validations beside training: what odd wishes, descriptors and ends of processes come to."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.kernel import DEAD, process_state
from elastic.core.config import JobSpec
from elastic.core.events.worker import Validated
from elastic.core.facts import CheckpointStatus, JobId, ReportKind
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import ReportAnswer
from elastic.worker.checkpoint.validating import ValidationPlan, Validator
from elastic.worker.checkpoint.validation_child import (
    FOUND_BYTES_MAX,
    ValidationChild,
    ValidationExit,
)
from tests.patience import DEADLINE_S, wait_for
from tests.strategies import SCRIPT

SPEC = JobSpec(job_id=JobId("j1"), name="a", entry=SCRIPT, min_workers=1, max_workers=1)


class Coordinator:
    """Takes whatever it is told."""

    def __init__(self) -> None:
        self.told: list[Validated] = []

    def post(self, item: Validated) -> None:
        self.told.append(item)

    def expect_answer(self, generation: int, kind: ReportKind, index: int) -> ReportAnswer:
        answer = ReportAnswer()
        answer.accepted = True
        answer.ready.set()
        return answer


@pytest.fixture
def started() -> Iterator[Callable[[Path, Coordinator], Validator]]:
    """Start a validator, rank 0's, that has something to look for."""
    begun: list[Validator] = []

    def start(path: Path, coordinator: Coordinator) -> Validator:
        validator = Validator(RunDirectory(str(path)), SPEC, coordinator)
        begun.append(validator)
        validator.configure(ValidationPlan(lambda path, fn_kwargs: "{}"))
        validator.enter(1, 0)
        return validator

    yield start
    for validator in begun:
        validator.close()


def is_finished(validator: Validator) -> bool:
    """Return whether it comes to its end within reason."""
    deadline = time.monotonic() + DEADLINE_S
    validator.finish(lambda: time.monotonic() > deadline)
    return time.monotonic() < deadline


def test_a_wish_that_nobody_understands_fails_by_itself_and_holds_up_nothing(
    started: Callable[[Path, Coordinator], Validator], tmp_path: Path
) -> None:
    run, coordinator = RunDirectory(str(tmp_path)), Coordinator()
    marker = CheckpointMarker("j1", 1, 0, 1, 0, "{}", (), validation='{"fn_kwargs": 7}')
    Path(run.checkpoint_path("c0")).mkdir(parents=True)
    run.commit("c0", marker)
    assert is_finished(started(tmp_path, coordinator))
    assert [one.status for one in coordinator.told] == [CheckpointStatus.VALIDATION_FAILED]


def end_by_number(path: str, fn_kwargs: dict[str, Any]) -> str:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)
    return "{}"


def find_much(path: str, fn_kwargs: dict[str, Any]) -> str:
    return '{"text": "' + "x" * FOUND_BYTES_MAX + '"}'


def leave_a_child(path: str, fn_kwargs: dict[str, Any]) -> str:
    pid = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    return json.dumps({"pid": pid, "group": os.getpgid(pid), "session": os.getsid(pid)})


def wait_ended(call: Callable[[str, dict[str, Any]], str]) -> ValidationExit:
    """Return how a validation ends."""
    child = ValidationChild(call, "/run/c0", {}, DEADLINE_S)
    return wait_for(child.ended)


def wait_dead(pid: int) -> None:
    """Wait until a process does nothing any more."""
    wait_for(lambda: process_state(pid) in DEAD)


def test_an_end_by_a_signal_without_a_name_is_told_by_its_number() -> None:
    ended = wait_ended(end_by_number)
    assert ended.finding.reason == f"its process ended by signal {signal.SIGRTMIN + 1}"
    assert not ended.is_final


def test_more_than_a_record_can_hold_is_refused_by_its_size() -> None:
    ended = wait_ended(find_much)
    assert ended.finding.status is CheckpointStatus.VALIDATION_FAILED
    assert f"at most {FOUND_BYTES_MAX} are kept" in ended.finding.reason
    assert ended.is_final


def test_what_a_validation_starts_ends_with_it_and_is_in_the_workers_session() -> None:
    found = wait_ended(leave_a_child).finding.metrics
    assert found["session"] == os.getsid(0), "the agent sweeps it there, if the worker is lost"
    assert found["group"] != os.getpgid(0)
    wait_dead(found["pid"])

"""What the coordinator keeps of validations, and why it does not take a report."""

from __future__ import annotations

from typing import Any

from elastic.core.events.worker import LoopStateChanged, ResolveReport, TrainLeft, Validated
from elastic.core.facts import (
    CheckpointRecord,
    CheckpointStatus,
    RefusalCode,
    ReportKind,
)
from tests.unit.coordinator_under_test import Coordinator, running
from tests.unit.worker_under_test import announce, forming, training

PENDING, VALIDATED = CheckpointStatus.PENDING_VALIDATION, CheckpointStatus.VALIDATED


def report(coordinator: Coordinator, number: int, **fields: Any) -> None:
    coordinator.reports("n1/1", number, checkpoint=f"/run/c{number}", **fields)


def validate(coordinator: Coordinator, number: int, word: int = 1, **fields: Any) -> None:
    """Let rank 0 tell what the validation of a checkpoint found out."""
    told = {"checkpoint": f"/run/c{number}", "status": VALIDATED, **fields}
    coordinator.reports("n1/1", word, kind=ReportKind.VALIDATION, **told)


def kept(coordinator: Coordinator) -> list[CheckpointRecord]:
    return list(coordinator.job("a").record.checkpoints)


def test_a_checkpoint_stays_pending_over_a_restart_of_the_coordinator() -> None:
    coordinator = running(run_path="/run", nodes=1)
    report(coordinator, 0, status=PENDING)
    coordinator.restart()
    coordinator.agent("n1")
    assert [one.status for one in kept(coordinator)] == [PENDING]
    validate(coordinator, 0)
    assert [one.status for one in kept(coordinator)] == [VALIDATED]


# ---------------------------------------------------------------- the worker


def found_out(generation: int) -> Validated:
    return Validated(generation, 1, "{}", "/run/c", VALIDATED)


def test_between_two_groups_whoever_tells_is_told_to_try_again() -> None:
    worker = forming(1)
    (answer,) = worker.event(found_out(1))
    assert isinstance(answer, ResolveReport)
    assert (answer.accepted, answer.code) == (False, RefusalCode.GENERATION_OVER)


def test_a_group_that_ends_answers_who_waits() -> None:
    worker = training(1)
    worker.event(LoopStateChanged(inside=True))
    worker.event(found_out(1))
    worker.told(announce(2))
    effects = worker.event(TrainLeft(1, at_boundary=False))
    (answer,) = [one for one in effects if isinstance(one, ResolveReport)]
    assert (answer.index, answer.code) == (1, RefusalCode.GENERATION_OVER)

"""What the coordinator keeps of validations, and why it does not take a report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.core.events.coordinator import Persist
from elastic.core.events.worker import ResolveReport, TrainLeft, Validated
from elastic.core.messages import Report, ReportAck, Reported
from elastic.core.world import (
    FIRST_AUTOMATIC,
    FIRST_VALIDATION,
    CheckpointRecord,
    CheckpointStatus,
    RefusalCode,
    is_automatic,
    is_of_script,
)
from tests.unit.coordinator_under_test import Coordinator, running
from tests.unit.worker_under_test import ME, announce, forming, training

PENDING, VALIDATED = CheckpointStatus.PENDING_VALIDATION, CheckpointStatus.VALIDATED


def report(coordinator: Coordinator, number: int, **fields: Any) -> None:
    coordinator.reports("n1/1", number, checkpoint=f"/run/c{number}", **fields)


def validate(coordinator: Coordinator, number: int, word: int = 1, **fields: Any) -> None:
    """Let rank 0 tell what the validation of a checkpoint found out."""
    told = {"checkpoint": f"/run/c{number}", "status": VALIDATED, **fields}
    coordinator.reports("n1/1", FIRST_VALIDATION + word, **told)


def kept(coordinator: Coordinator) -> list[CheckpointRecord]:
    return list(coordinator.job("a").record.checkpoints)


def test_what_a_validation_found_out_is_durable_in_its_checkpoints_record() -> None:
    coordinator = running(run_path="/run", nodes=1)
    report(coordinator, 0, status=PENDING, metrics='{"loss": 1}')
    assert [one.status for one in kept(coordinator)] == [PENDING]
    validate(coordinator, 0, metrics='{"loss": 1, "score": 2}')
    (record,) = kept(coordinator)
    assert (record.status, json.loads(record.metrics)) == (VALIDATED, {"loss": 1, "score": 2})
    assert (record.generation, record.index) == (1, 0), "it is the report's still"
    assert len(coordinator.of(Persist)) == 1
    assert coordinator.job("a").record.metrics == '{"loss": 1}', "it is no report of its own"
    assert [n["status"] for n in coordinator.noted("checkpoint_validated")] == ["VALIDATED"]


def test_the_first_word_about_a_checkpoint_stands() -> None:
    coordinator = running(run_path="/run", nodes=1)
    report(coordinator, 0, status=PENDING)
    validate(coordinator, 0, 1, metrics='{"score": 1}')
    validate(coordinator, 0, 2, metrics='{"score": 2}')
    assert [json.loads(one.metrics) for one in kept(coordinator)] == [{"score": 1}]
    assert [ack.accepted for ack in coordinator.sent(ReportAck)] == [True], "it need not ask again"
    assert not coordinator.of(Persist)


def test_what_is_told_again_by_each_new_rank_zero_does_not_end_a_row_of_losses() -> None:
    coordinator = running(run_path="/run", nodes=2)
    report(coordinator, 0, status=PENDING)
    validate(coordinator, 0)
    coordinator.exits("n2/1")
    coordinator.training("n1/1")
    assert coordinator.job("a").record.losses == 1
    validate(coordinator, 0, 2)
    assert [ack.accepted for ack in coordinator.sent(ReportAck)] == [True]
    assert coordinator.job("a").record.losses == 1


def test_a_checkpoint_that_nobody_asked_to_validate_or_that_is_not_known_stays_as_it_is() -> None:
    coordinator = running(run_path="/run", nodes=1)
    report(coordinator, 0)
    validate(coordinator, 0, 1, metrics='{"score": 1}')
    validate(coordinator, 7, 2, metrics='{"score": 1}')
    assert [(one.path, one.metrics, one.status) for one in kept(coordinator)] == [
        ("/run/c0", "{}", CheckpointStatus.COMMITTED)
    ]


def test_the_coordinator_keeps_what_is_to_be_validated_and_then_the_best() -> None:
    coordinator = running(run_path="/run", nodes=1, num_to_keep=2, score_attribute="score")
    for number in range(4):
        report(coordinator, number, status=PENDING)
    assert [one.index for one in kept(coordinator)] == [0, 1, 2, 3]
    for number, score in enumerate((5, 9, 7)):
        validate(coordinator, number, number, metrics=json.dumps({"score": score}))
    assert [one.index for one in kept(coordinator)] == [1, 3]


def test_a_checkpoint_stays_pending_over_a_restart_of_the_coordinator() -> None:
    coordinator = running(run_path="/run", nodes=1)
    report(coordinator, 0, status=PENDING)
    coordinator.restart()
    coordinator.agent("n1")
    assert [one.status for one in kept(coordinator)] == [PENDING]
    validate(coordinator, 0)
    assert [one.status for one in kept(coordinator)] == [VALIDATED]


def refusals(coordinator: Coordinator) -> list[RefusalCode]:
    return [ack.code for ack in coordinator.sent(ReportAck) if not ack.accepted]


def test_a_refused_report_says_why_to_programs_too() -> None:
    coordinator = running(run_path="/run", nodes=2)
    old = coordinator.reported("n1/1", 0, checkpoint="/run/c")
    strange = Report(**{**vars(old.report), "job_id": "nosuch"})
    coordinator.says("n1", Reported(strange))
    assert refusals(coordinator) == [RefusalCode.JOB_UNKNOWN]
    coordinator.exits("n2/1")
    coordinator.says("n1", old)
    assert refusals(coordinator) == [RefusalCode.GENERATION_OVER]
    coordinator.stop("a")
    coordinator.says("n1", old)
    assert refusals(coordinator) == [RefusalCode.JOB_ENDED]


@pytest.mark.parametrize(
    ("index", "automatic", "script"),
    [
        (0, False, True),
        (FIRST_AUTOMATIC - 1, False, True),
        (FIRST_AUTOMATIC, True, False),
        (FIRST_VALIDATION - 1, True, False),
        (FIRST_VALIDATION, False, False),
    ],
)
def test_numbers_tell_who_speaks(index: int, automatic: bool, script: bool) -> None:
    assert (is_automatic(index), is_of_script(index)) == (automatic, script)


# ---------------------------------------------------------------- the worker


def found_out(generation: int) -> Validated:
    return Validated(generation, FIRST_VALIDATION + 1, "{}", "/run/c", VALIDATED)


def test_a_worker_passes_on_what_was_found_out_and_the_answer() -> None:
    worker = training(1)
    (sent,) = worker.event(found_out(1))
    told = sent.message.report  # type: ignore[union-attr]
    assert (told.index, told.status, told.checkpoint) == (FIRST_VALIDATION + 1, VALIDATED, "/run/c")
    ack = ReportAck(ME, 1, FIRST_VALIDATION + 1, False, "no", RefusalCode.JOB_ENDED)
    assert worker.told(ack) == [
        ResolveReport(1, FIRST_VALIDATION + 1, False, "no", RefusalCode.JOB_ENDED)
    ]


def test_between_two_groups_whoever_tells_is_told_to_try_again() -> None:
    worker = forming(1)
    (answer,) = worker.event(found_out(1))
    assert isinstance(answer, ResolveReport)
    assert (answer.accepted, answer.code) == (False, RefusalCode.GENERATION_OVER)


def test_a_group_that_ends_answers_who_waits() -> None:
    worker = training(1)
    worker.event(found_out(1))
    worker.told(announce(2))
    effects = worker.event(TrainLeft(1, at_boundary=False))
    (answer,) = [one for one in effects if isinstance(one, ResolveReport)]
    assert (answer.index, answer.code) == (FIRST_VALIDATION + 1, RefusalCode.GENERATION_OVER)

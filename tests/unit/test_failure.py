"""What a lost worker costs: nothing, a back-off, or the job; and how it is said."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.policy.failure import (
    CRASH_SIGNALS,
    FINAL_ERRORS,
    FREE_LOSSES,
    OUT_OF_MEMORY,
    History,
    describe,
    judge_exit,
)
from elastic.core.world import ExitCause, ExitKind, Failure, JobId
from tests.strategies import SCRIPT

CONFIG = CoordinatorConfig(crash_loop_limit=5, restart_delay_s_max=3.0)
BOOM = Failure("ValueError", "boom", "Traceback: boom", position="report 3")
CODE_1 = ExitCause(ExitKind.CODE, 1)
KILLED = ExitCause(ExitKind.SIGNAL, signal.SIGKILL)
LOST = ExitCause(ExitKind.LOST)
STARVED = replace(KILLED, detail=f"SIGKILL, {OUT_OF_MEMORY}")


def spec(max_failures: int) -> JobSpec:
    return JobSpec(
        job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=1, max_workers=2,
        max_failures=max_failures,
    )  # fmt: skip


@pytest.mark.parametrize("failure", [None, BOOM])
def test_an_exit_that_we_ordered_costs_nothing(failure: Failure | None) -> None:
    before = History(3, 4, BOOM)
    judged = judge_exit(spec(0), before, ExitCause(ExitKind.STOPPED), failure, CONFIG).value
    assert (judged.job_fails, judged.history, judged.delay_ns) == (False, before, 0)


@pytest.mark.parametrize(
    "cause",
    [
        ExitCause(ExitKind.CODE, 0),
        CODE_1,
        ExitCause(ExitKind.CODE, 255),
        *[ExitCause(ExitKind.SIGNAL, number) for number in CRASH_SIGNALS],
    ],
)
def test_codes_and_native_crashes_are_charged_to_user_code(cause: ExitCause) -> None:
    judged = judge_exit(spec(1), History(), cause, None, CONFIG).value
    assert (judged.job_fails, judged.history.failures, judged.history.losses) == (False, 1, 0)
    assert judge_exit(spec(1), judged.history, cause, None, CONFIG).value.job_fails


@pytest.mark.parametrize(
    ("cause", "losses"),
    [
        (KILLED, 0),
        (ExitCause(ExitKind.SIGNAL, signal.SIGTERM), 0),
        (ExitCause(ExitKind.SIGNAL, 99), 0),
        (LOST, 0),
        (STARVED, 1),
        (ExitCause(ExitKind.HUNG), 1),
        (ExitCause(ExitKind.SPAWN_FAILED), 1),
    ],
)
def test_what_happens_to_a_machine_is_not_charged_to_user_code(
    cause: ExitCause, losses: int
) -> None:
    judged = judge_exit(spec(0), History(), cause, None, CONFIG).value
    assert (judged.job_fails, judged.delay_ns, judged.history) == (False, 0, History(0, losses))


@pytest.mark.parametrize("cause", [KILLED, LOST, CODE_1])
def test_an_exception_is_charged_to_user_code_however_the_process_ended(cause: ExitCause) -> None:
    decision = judge_exit(spec(0), History(), cause, BOOM, CONFIG)
    assert decision.value.job_fails
    assert decision.reason == "ValueError: boom (failure 1, max_failures=0)"


@pytest.mark.parametrize(
    ("max_failures", "before", "fails"),
    [(0, 0, True), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True), (-1, 10**6, False)],
)
def test_the_job_fails_once_its_budget_is_spent(
    max_failures: int, before: int, fails: bool
) -> None:
    judged = judge_exit(spec(max_failures), History(before), CODE_1, None, CONFIG).value
    assert judged.job_fails is fails
    assert judged.history.failures == before + 1


@pytest.mark.parametrize(
    ("last", "fails"),
    [
        (BOOM, True),
        (replace(BOOM, traceback="Traceback: elsewhere"), True),
        (None, False),
        (replace(BOOM, position="report 4"), False),
        (replace(BOOM, message="boom 2"), False),
        (replace(BOOM, error_type="KeyError"), False),
    ],
)
@pytest.mark.parametrize("max_failures", [9, -1])
def test_the_same_error_at_the_same_place_twice_in_a_row_is_not_tried_again(
    last: Failure | None, fails: bool, max_failures: int
) -> None:
    decision = judge_exit(spec(max_failures), History(1, 0, last), CODE_1, BOOM, CONFIG)
    assert decision.value.job_fails is fails
    assert ("twice in a row at report 3" in decision.reason) is fails


def test_an_error_that_another_attempt_cannot_mend_is_not_tried_again() -> None:
    failure = Failure(FINAL_ERRORS[0], "node n2 sees another directory")
    decision = judge_exit(spec(-1), History(), CODE_1, failure, CONFIG)
    assert decision.value.job_fails
    assert "node n2 sees another directory" in decision.reason


def test_exits_without_an_exception_are_not_held_to_be_the_same_error() -> None:
    judged = judge_exit(spec(9), History(1, 0, None), CODE_1, None, CONFIG).value
    assert not judge_exit(spec(9), judged.history, CODE_1, None, CONFIG).value.job_fails


def test_losses_in_a_row_are_replaced_at_once_and_then_ever_later_until_the_job_fails() -> None:
    history, delays, fails = History(), [], []
    for _ in range(6):
        judged = judge_exit(spec(0), history, STARVED, None, CONFIG).value
        history = judged.history
        delays.append(judged.delay_ns)
        fails.append(judged.job_fails)
    assert delays == [ns(s) for s in (0, 0, 0.5, 1, 2, 0)]
    assert fails == [False] * 5 + [True]


def test_the_back_off_stops_at_its_bound() -> None:
    judged = judge_exit(spec(0), History(losses=4), STARVED, None, CONFIG).value
    assert judged.delay_ns == ns(2)
    lower = replace(CONFIG, restart_delay_s_max=1.5)
    assert judge_exit(spec(0), History(losses=4), STARVED, None, lower).value.delay_ns == ns(1.5)
    none = replace(CONFIG, restart_delay_s_max=0)
    assert judge_exit(spec(0), History(losses=4), STARVED, None, none).value.delay_ns == 0


@pytest.mark.parametrize("losses", [100, 1_100, 100_000])
def test_a_row_of_losses_of_any_length_can_be_counted(losses: int) -> None:
    patient = replace(CONFIG, crash_loop_limit=10**6)
    judged = judge_exit(spec(0), History(losses=losses), STARVED, None, patient).value
    assert judged.delay_ns == ns(CONFIG.restart_delay_s_max)


def test_a_crash_loop_says_where_to_look_and_which_limit_it_hit() -> None:
    decision = judge_exit(spec(0), History(losses=5), STARVED, None, CONFIG)
    assert decision.reason == (
        "6 workers lost in a row without progress, the last one killed by SIGKILL "
        "(SIGKILL, out of memory): look at its log; the limit is crash_loop_limit=5"
    )


def test_a_failure_of_user_code_leaves_the_row_of_losses_as_it_is() -> None:
    judged = judge_exit(spec(9), History(0, FREE_LOSSES, None), CODE_1, BOOM, CONFIG).value
    assert judged.history == History(1, FREE_LOSSES, BOOM)
    assert judge_exit(spec(9), judged.history, KILLED, None, CONFIG).value.history.last is BOOM


@pytest.mark.parametrize(
    ("cause", "phrase"),
    [
        (ExitCause(ExitKind.CODE, 3), "exited with code 3"),
        (ExitCause(ExitKind.CODE, 3, "sys.exit"), "exited with code 3 (sys.exit)"),
        (KILLED, "killed by SIGKILL"),
        (ExitCause(ExitKind.SIGNAL, 11, "core dumped"), "killed by SIGSEGV (core dumped)"),
        (ExitCause(ExitKind.SIGNAL, 99), "killed by signal 99"),
        (ExitCause(ExitKind.STOPPED), "stopped"),
        (ExitCause(ExitKind.STOPPED, 0, "job stopped"), "stopped (job stopped)"),
        (ExitCause(ExitKind.HUNG, 0, "SIGSTOP"), "killed because it hung (SIGSTOP)"),
        (LOST, "lost with its node"),
        (ExitCause(ExitKind.SPAWN_FAILED, 0, "ENOMEM"), "could not be started (ENOMEM)"),
    ],
)
def test_an_exit_is_said_in_words(cause: ExitCause, phrase: str) -> None:
    assert describe(cause) == phrase


@pytest.mark.parametrize("kind", list(ExitKind))
def test_every_kind_of_exit_is_judged_and_said(kind: ExitKind) -> None:
    decision = judge_exit(spec(9), History(), ExitCause(kind), None, CONFIG)
    assert decision.reason
    assert describe(ExitCause(kind))

"""What a lost worker costs: nothing, a back-off, or the job; and how it is said."""

from __future__ import annotations

from elastic.core.config import CoordinatorConfig, JobSpec
from elastic.core.facts import ExitCause, ExitKind, Failure, JobId
from elastic.core.policy.failure import (
    FINAL_ERRORS,
    FailureHistory,
    judge_exit,
)
from tests.strategies import SCRIPT

CONFIG = CoordinatorConfig(crash_loop_limit=5, restart_delay_s_max=3.0)
CODE_1 = ExitCause(ExitKind.CODE, 1)


def spec(max_failures: int) -> JobSpec:
    return JobSpec(
        job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=1, max_workers=2,
        max_failures=max_failures,
    )  # fmt: skip


def test_an_error_that_another_attempt_cannot_mend_is_not_tried_again() -> None:
    failure = Failure(FINAL_ERRORS[0], "node n2 sees another directory")
    decision = judge_exit(spec(-1), FailureHistory(), CODE_1, failure, CONFIG)
    assert decision.value.job_fails
    assert "node n2 sees another directory" in decision.reason

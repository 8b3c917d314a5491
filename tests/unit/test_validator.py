"""The thread that has checkpoints validated: what it does without anything to validate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.core.events.worker import Validated
from elastic.core.facts import JobId, ReportKind
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import ReportAnswer
from elastic.worker.checkpoint.validating import ValidationPlan, Validator
from elastic.worker.process.local import LocalRun, _retention
from tests.patience import wait_for


class Line:
    """Leads to a coordinator that takes everything."""

    def post(self, item: Validated) -> None:
        del item

    def expect_answer(self, generation: int, kind: ReportKind, index: int) -> ReportAnswer:
        del generation, kind, index
        answer = ReportAnswer(accepted=True)
        answer.ready.set()
        return answer


def nothing(path: str, fn_kwargs: dict[str, Any]) -> str:
    raise AssertionError(f"nobody reported {path} {fn_kwargs}")


def wait_for_thread(validator: Validator) -> None:
    """Wait until its thread has taken note of what it was told."""
    wait_for(lambda: not validator._requests.is_pending)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 0)])
def test_its_thread_rests_when_there_is_nothing_to_do_in_whatever_place(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    run = LocalRun(job_name="r", run_path=str(tmp_path))
    validator = Validator(RunDirectory(str(tmp_path)), _retention(run, JobId("j1")), Line())
    validator.configure(ValidationPlan(nothing))
    try:
        for generation, rank in enumerate(ranks, 1):
            validator.enter(generation, rank)
            wait_for_thread(validator)
        validator.finish(lambda: False)
    finally:
        validator.close()

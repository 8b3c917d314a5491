"""A user wants a checkpoint now: who is told, how often, and what an automatic one counts as."""

from __future__ import annotations

import pytest

from elastic.core.messages import SaveState
from tests.unit.coordinator_under_test import Coordinator, running

# ---------------------------------------------------------------- the coordinator


def saves(coordinator: Coordinator) -> list[tuple[str, int, int]]:
    return [(m.worker_id, m.generation, m.request) for m in coordinator.sent(SaveState)]


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        ("nosuch", "not_found", "no job nosuch"),
        ("ended", "failed_precondition", "has ended already: stopped"),
        ("waits", "failed_precondition", "does not train now (waiting: "),
        ("homeless", "failed_precondition", "no run directory"),
    ],
)
def test_a_wish_that_cannot_come_true_is_refused_by_name(job: str, error: str, text: str) -> None:
    coordinator = running("homeless", nodes=1)
    coordinator.submit("waits", run_path="/run")
    coordinator.submit("ended", run_path="/run")
    coordinator.stop("ended")
    reply = coordinator.checkpoint(job)
    assert reply.error == error
    assert text in reply.text
    assert saves(coordinator) == []

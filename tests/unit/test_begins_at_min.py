"""A job that has a state to resume begins with min workers; others join at a boundary."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.coordinator_under_test import CONFIG, Coordinator


@pytest.mark.parametrize(
    ("how", "waits"),
    [({}, True), ({"resume_from": "/earlier/c"}, False), ({"resumes": True}, False)],
)
def test_who_resumes_does_not_wait_for_max(how: dict[str, Any], waits: bool) -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.agent("n2")
    coordinator.submit("a", 1, 2, **how)
    coordinator.ready("n1/1")
    assert coordinator.job("a").record.generation == (0 if waits else 1)
    coordinator.advance(CONFIG.start_timeout_s)
    assert coordinator.members("a") == "g1: n1/1"

"""The agent's machine: its connection, what it starts, and what it tells of its workers."""

from __future__ import annotations

import pytest

from elastic.core.events.shared import Tick
from elastic.core.messages import (
    Assign,
    LeaveGroup,
    StartWorker,
)
from elastic.errors import InvariantViolation
from tests.unit.agent_under_test import (
    W1,
    announce,
    registered,
    spec,
    with_worker,
)

# ---------------------------------------------------------------- starting workers


def test_an_announcement_before_the_process_is_warm_is_passed_on_after_the_assignment() -> None:
    agent = registered()
    agent.hear(StartWorker(W1, spec()))
    for generation in (1, 3, 2):
        agent.hear(announce(W1, generation))
    leave = LeaveGroup(W1, 3, False, "over")
    agent.hear(leave)
    agent.warm(1)
    assert agent.told(1) == [Assign(W1, spec(), "10.0.0.1"), announce(W1, 3), leave]


# ---------------------------------------------------------------- what is illegal


def test_time_that_falls_is_a_bug_and_tells_the_story() -> None:
    agent = with_worker()
    agent.now_ns = 0
    with pytest.raises(InvariantViolation, match="time fell") as caught:
        agent.do(Tick())
    assert any("StartWorker(worker_id='n/1'" in line for line in caught.value.story)

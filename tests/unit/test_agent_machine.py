"""The agent's machine: its connection, what it starts, and what it tells of its workers."""

from __future__ import annotations

import pytest

from elastic.core.events.agent import Kill, ProcessExited
from elastic.core.events.shared import Tick
from elastic.core.facts import ExitKind, WorkerPhase
from elastic.core.messages import (
    Announce,
    Assign,
    LeaveGroup,
    StartWorker,
)
from elastic.errors import InvariantViolation
from tests.unit.agent_under_test import (
    CRASHED,
    W1,
    announce,
    of,
    registered,
    reported_by,
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


@pytest.mark.parametrize("order", [LeaveGroup(W1, 1, False, "lost"), announce(W1, 2)])
def test_a_process_that_would_begin_its_script_again_is_killed_and_has_not_failed(
    order: LeaveGroup | Announce,
) -> None:
    agent = with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 1, spent=True))
    agent.hear(LeaveGroup(W1, 1, True, "join"))
    assert agent.told(1), "it has the time to come to a boundary"
    effects = agent.hear(order)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert not agent.told(1), "nothing of it runs any more"
    # Whatever came first, what the script made of its broken group or the signal.
    agent.do(ProcessExited(1, CRASHED))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED

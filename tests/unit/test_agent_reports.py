"""The agent's machine: reports that its workers make, until the coordinator has them for good."""

from __future__ import annotations

import pytest

from elastic.core.events.agent import (
    AgentEffect,
    ProcessExited,
)
from elastic.core.facts import WorkerPhase
from elastic.core.machine.agent_connection import UnacknowledgedReports
from elastic.core.messages import ForgetWorker, ReportAck, Reported, Welcome
from tests.unit.agent_under_test import (
    CRASHED,
    W1,
    Agent,
    reconnect,
    reported,
    reported_by,
    with_worker,
)


def test_reports_are_sent_again_in_order_after_the_welcome_until_they_are_acknowledged() -> None:
    agent = with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 1))
    for index in range(3):
        agent.process(1, reported(W1, 1, index))
        assert agent.sent() == [reported(W1, 1, index)]
    agent.process(1, reported(W1, 1, 2))
    assert agent.sent() == [], "the same report is one report"
    agent.hear(ReportAck(W1, 1, 0, False, "generation 1 is over"))
    reconnect(agent)
    assert agent.sent(Reported) == []
    agent.hear(Welcome("c"))
    assert agent.sent(Reported) == [reported(W1, 1, 1), reported(W1, 1, 2)]


def acknowledged(*checkpoints: str) -> Agent:
    """Return an agent whose worker has reported these, and had answers."""
    agent = with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 1))
    for index, checkpoint in enumerate(checkpoints):
        agent.process(1, reported(W1, 1, index, checkpoint))
        agent.hear(ReportAck(W1, 1, index, True))
    return agent


@pytest.mark.parametrize("why", ["durable", "left", "forgotten"])
def test_metrics_that_nobody_needs_any_more_are_not_told_again(why: str) -> None:
    agent = acknowledged("", "/c") if why == "durable" else acknowledged("")
    if why == "left":
        agent.process(1, reported_by(W1, WorkerPhase.FORMING, 2))
    elif why == "forgotten":
        agent.do(ProcessExited(1, CRASHED))
        agent.hear(ForgetWorker(W1))
    reconnect(agent)
    agent.hear(Welcome("c"))
    assert agent.sent(Reported) == []


def test_reports_are_bounded_and_those_with_a_checkpoint_are_never_dropped() -> None:
    notes: list[AgentEffect] = []
    kept = UnacknowledgedReports(notes, limit=3)
    for index in range(10):
        kept.add(reported(W1, 1, index, checkpoint="/c" if index in (0, 1) else ""))
    assert [one.report.index for one in kept.all()] == [0, 1, 9]
    assert len(notes) == 7

"""The agent's machine: how a node drains and ends."""

from __future__ import annotations

from elastic.core.events.agent import (
    Connected,
    ConnectionLost,
    DrainSignalled,
    ExitAgent,
    Kill,
    ProcessExited,
    Spawn,
)
from elastic.core.facts import (
    WorkerPhase,
)
from elastic.core.messages import (
    Drain,
    Release,
    ReportAck,
    Reported,
    StartWorker,
    Welcome,
)
from tests.unit.agent_under_test import (
    CRASHED,
    W1,
    W2,
    S,
    of,
    reconnect,
    reported,
    reported_by,
    spec,
    with_worker,
)

# ---------------------------------------------------------------- drain


def test_what_an_operator_wants_is_known_to_the_next_coordinator() -> None:
    agent = with_worker()
    agent.hear(Drain("upgrade", 30 * S))
    agent.hear(Drain("upgrade", 30 * S))
    agent.hear(Drain("later", 60 * S))
    hello = reconnect(agent)
    assert (hello.draining, hello.drain_reason) == (True, "upgrade")
    assert 29 * S < hello.drain_timeout_ns <= 30 * S


def test_a_draining_node_takes_no_worker_and_keeps_no_spare() -> None:
    agent = with_worker()
    agent.warm(2)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [2]
    agent.hear(StartWorker(W2, spec()))
    assert not of(agent.last, Spawn)
    cause = agent.exit_of(W2)
    assert cause is not None
    assert "about to leave: SIGTERM" in cause.detail


def test_a_signal_without_time_hastens_an_end_that_has_begun() -> None:
    agent = with_worker()
    agent.hear(Release("drained"))
    assert not of(agent.last, ExitAgent)
    effects = agent.do(DrainSignalled("SIGTERM", 0))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(75, "drained")


def test_a_cut_off_node_stays_while_it_drains_for_reports_that_nobody_has_taken() -> None:
    agent = with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 1))
    agent.process(1, reported(W1, 1, 0))
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert not of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)
    agent.at_deadline()
    agent.do(Connected(agent.session))
    agent.hear(Welcome("c"))
    assert agent.sent(Reported) == [reported(W1, 1, 0)]


def test_a_cut_off_node_that_drains_does_not_stay_for_reports_that_were_answered_once() -> None:
    agent = with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 1))
    agent.process(1, reported(W1, 1, 0))
    agent.hear(ReportAck(W1, 1, 0, True))
    reconnect(agent)
    # It was no leader that answered: nothing is told again.
    agent.do(ConnectionLost(agent.session, "no leader", 0.0))
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)

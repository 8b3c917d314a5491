"""The agent's machine: how a node drains and ends."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.cluster_messages import Drain
from elastic.core.events.agent import (
    AgentEffect,
    Connected,
    ConnectionLost,
    DrainSignalled,
    ExitAgent,
    Kill,
    ProcessExited,
    ProcessStarted,
    Spawn,
)
from elastic.core.events.shared import Tick
from elastic.core.messages import (
    DrainNotice,
    Ping,
    Pong,
    Release,
    ReportAck,
    Reported,
    StartWorker,
    Stop,
    Welcome,
)
from elastic.core.world import (
    ExitCause,
    ExitKind,
    WorkerPhase,
)
from tests.unit.agent_under_test import (
    CRASHED,
    W1,
    W2,
    Agent,
    S,
    connecting,
    of,
    reconnect,
    reported,
    said_by,
    spec,
    with_spare,
    with_worker,
)

# ---------------------------------------------------------------- drain


def test_a_drain_is_told_at_once_and_in_every_hello() -> None:
    agent = with_worker()
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert agent.sent(DrainNotice) == [DrainNotice("SIGTERM", 30 * S)]
    agent.pass_time(10)
    hello = reconnect(agent)
    assert (hello.draining, hello.drain_reason) == (True, "SIGTERM")
    assert 19 * S < hello.drain_timeout_ns < 20 * S
    agent.hear(Welcome("c"))
    assert agent.sent(DrainNotice) == [], "hello has said it"


def test_what_an_operator_wants_is_known_to_the_next_coordinator() -> None:
    agent = with_worker()
    agent.hear(Drain("upgrade", 30 * S))
    agent.hear(Drain("upgrade", 30 * S))
    agent.hear(Drain("later", 60 * S))
    hello = reconnect(agent)
    assert (hello.draining, hello.drain_reason) == (True, "upgrade")
    assert 29 * S < hello.drain_timeout_ns <= 30 * S


def test_an_operators_drain_ends_in_time_without_any_coordinator() -> None:
    agent = with_worker()
    agent.hear(Drain("upgrade", 30 * S))
    agent.do(ConnectionLost(agent.session, "gone", 0.0))
    effects = agent.pass_time(30)
    assert of(effects, Kill)


def test_a_drain_signalled_between_hello_and_welcome_is_told_after_it() -> None:
    agent = with_worker()
    reconnect(agent)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert agent.sent() == []
    agent.hear(Welcome("c"))
    assert len(agent.sent(DrainNotice)) == 1


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


def test_a_released_agent_ends_when_its_workers_have() -> None:
    agent = with_worker()
    agent.warm(2)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    agent.hear(Release("drained"))
    assert agent.told(1) == [Stop("drained", 5 * S)]
    effects = agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
    assert agent.exit_of(W1) is not None, "the last word comes before the end"
    assert effects[-1] == ExitAgent(75, "drained")
    assert agent.do(Tick()) == []
    assert agent.machine.next_deadline_ns() is None


def test_a_released_agent_without_workers_ends_at_once() -> None:
    agent = with_spare()
    effects = agent.hear(Release("operator"))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(75, "operator")


def test_a_drain_ends_by_its_deadline_at_the_latest() -> None:
    agent = with_worker()
    agent.do(DrainSignalled("SIGTERM", 20 * S))
    began_ns = agent.now_ns
    effects: list[AgentEffect] = []
    stops: list[float] = []
    while not of(effects, ExitAgent):
        effects = agent.at_deadline()
        for message in agent.told(1):
            if isinstance(message, Ping):
                agent.process(1, Pong(message.number))
            else:
                assert message == Stop("the time to drain is over: SIGTERM", 5 * S)
                stops.append((agent.now_ns - began_ns) / S)
    assert stops == [15.0]
    assert [type(effect) for effect in effects] == [Kill, ExitAgent]
    assert agent.now_ns - began_ns == 20 * S
    assert effects[-1].code == 75


@pytest.mark.parametrize("first_s", [30, 0], ids=["after a first signal", "at once"])
def test_a_signal_without_time_ends_everything_now(first_s: int) -> None:
    agent = with_worker()
    agent.do(ProcessStarted(2, 1002))
    effects = agent.do(DrainSignalled("SIGTERM", first_s * S))
    if first_s:
        assert [kill.process_id for kill in of(effects, Kill)] == [2]
        effects = agent.do(DrainSignalled("SIGTERM again", 0))
    assert 1 in {kill.process_id for kill in of(effects, Kill)}
    assert effects[-1] == ExitAgent(75, "the time to drain is over: SIGTERM")
    assert agent.machine.next_deadline_ns() is None


def test_a_signal_without_time_hastens_an_end_that_has_begun() -> None:
    agent = with_worker()
    agent.hear(Release("drained"))
    assert not of(agent.last, ExitAgent)
    effects = agent.do(DrainSignalled("SIGTERM", 0))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(75, "drained")


@pytest.mark.parametrize("make", [Agent, connecting], ids=["never stepped", "connecting"])
def test_a_node_that_nobody_knows_and_that_runs_nothing_leaves_at_once(make: Any) -> None:
    agent = make()
    effects = agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert effects[-1] == ExitAgent(75, "SIGTERM")


def test_a_cut_off_node_stays_while_it_drains_until_its_last_worker_is_gone() -> None:
    agent = with_worker()
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    assert not of(agent.do(DrainSignalled("SIGTERM", 30 * S)), ExitAgent)
    assert of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)


def test_a_cut_off_node_stays_while_it_drains_for_reports_that_nobody_has_taken() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
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
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
    agent.process(1, reported(W1, 1, 0))
    agent.hear(ReportAck(W1, 1, 0, True))
    reconnect(agent)
    # It was no leader that answered: nothing is told again.
    agent.do(ConnectionLost(agent.session, "no leader", 0.0))
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)

"""Stopped workers that may be the last to have their job's newest state are not killed."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events.agent import ConnectionLost, Kill, ProcessStopped
from elastic.core.messages import Announce, Progress, StartWorker, Warm
from tests.unit.agent_under_test import W1, W2, Agent, announce, of, spec, with_worker


def in_group(agent: Agent, size: int) -> None:
    """Have the agent's first worker in a group of so many."""
    told = announce(W1, 1)
    agent.hear(Announce(replace(told.assignment, world_size=size)))


def test_the_only_member_may_stay_stopped() -> None:
    agent = with_worker()
    in_group(agent, 1)
    agent.do(ProcessStopped(1, True))
    assert not of(agent.pass_time(60), Kill)


def test_a_member_among_others_is_killed_when_it_stays_stopped() -> None:
    agent = with_worker()
    in_group(agent, 2)
    agent.do(ProcessStopped(1, True))
    assert of(agent.pass_time(0.5), Kill)


def test_nobody_is_killed_for_it_while_no_coordinator_hears_of_it() -> None:
    agent = with_worker()
    in_group(agent, 2)
    agent.do(ConnectionLost(agent.session, "reset", 0.5))
    agent.do(ProcessStopped(1, True))
    assert not of(agent.pass_time(3), Kill)


def test_who_was_kept_has_its_time_again_when_another_runs() -> None:
    agent = with_worker()
    agent.hear(StartWorker(W2, spec()))
    agent.process(2, Warm(1002))
    in_group(agent, 2)
    agent.hear(Announce(replace(announce(W2, 1).assignment, world_size=2, rank=1)))
    agent.do(ProcessStopped(1, True))
    agent.do(ProcessStopped(2, True))
    assert not of(agent.pass_time(5), Kill)
    agent.do(ProcessStopped(1, False))
    assert not of(agent.pass_time(0.3), Kill)
    assert [kill.process_id for kill in of(agent.pass_time(0.3), Kill)] == [2]


def test_one_that_joins_has_no_state_before_its_first_step() -> None:
    agent = with_worker()
    agent.hear(StartWorker(W2, spec()))
    agent.process(2, Warm(1002))
    in_group(agent, 1)
    agent.process(1, Progress(W1, 1, 1))
    for rank, worker in enumerate((W1, W2)):
        told = replace(announce(worker, 2).assignment, world_size=2, rank=rank, holders=1)
        agent.hear(Announce(told))
    agent.do(ProcessStopped(1, True))
    assert not of(agent.pass_time(5), Kill)
    agent.do(ProcessStopped(1, False))
    agent.process(1, Progress(W1, 2, 2))
    agent.process(2, Progress(W2, 2, 2))
    agent.do(ProcessStopped(1, True))
    assert [kill.process_id for kill in of(agent.pass_time(0.6), Kill)] == [1]

"""The agent's machine: workers that are stopped, spares that fail, processes that hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.events.agent import (
    Kill,
    ProcessExited,
    ProcessMessageReceived,
    ProcessStarted,
    Spawn,
)
from elastic.core.events.shared import Tick
from elastic.core.facts import (
    EntryKind,
    ExitCause,
    ExitKind,
    WorkerPhase,
)
from elastic.core.messages import (
    LeaveGroup,
    Pong,
    StartWorker,
    StopWorker,
)
from elastic.core.policy.hang import FIRST_TIMES
from tests.unit.agent_under_test import (
    CONFIG,
    KILLED,
    W1,
    S,
    announce,
    of,
    registered,
    reported_by,
    spec,
    with_spare,
    with_worker,
)

# ---------------------------------------------------------------- stopping workers


def test_a_second_stop_may_shorten_the_grace_period() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 20 * S, "slow"))
    agent.hear(StopWorker(W1, 1 * S, "fast"))
    assert of(agent.pass_time(1.0), Kill)


# ---------------------------------------------------------------- spares that fail


def test_a_spare_that_never_warms_up_is_killed_and_counts_as_failed() -> None:
    agent = registered()
    agent.do(ProcessStarted(1, 50))
    effects = agent.pass_time(301)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert of(effects, Spawn) == [Spawn(2)]
    assert agent.do(ProcessExited(1, KILLED)) == []


# ---------------------------------------------------------------- hangs


def test_the_agents_own_sleep_is_not_a_workers_silence() -> None:
    agent = with_worker()
    agent.at_deadline()
    agent.do(Tick(), after_s=3600)
    assert not of(agent.last, Kill)
    agent.process(1, Pong(1))
    assert not of(agent.pass_time(1), Kill)


@pytest.mark.parametrize("times", [1, FIRST_TIMES, 0])
def test_native_code_may_keep_a_worker_silent_for_as_long_as_it_has_said(times: int) -> None:
    agent = with_worker()
    agent.pass_time(1)
    agent.process(1, Pong(1, times))
    limit_s = times * CONFIG.control_timeout_s
    assert not of(agent.pass_time(limit_s or 3600), Kill)
    assert bool(of(agent.pass_time(2 * CONFIG.ping_interval_s), Kill)) == bool(times)


# ---------------------------------------------------------------- scripts that end their process

LEFT_WELL = ExitCause(ExitKind.CODE, 0)


def with_trained(phase: WorkerPhase = WorkerPhase.TRAINING, kind: Any = EntryKind.SCRIPT) -> Any:
    """Return an agent whose worker W1 is in that phase of generation 1."""
    agent = with_spare()
    job = spec()
    agent.hear(StartWorker(W1, replace(job, entry=replace(job.entry, kind=kind))))
    agent.do(ProcessMessageReceived(1, reported_by(W1, phase, 1)))
    return agent


def test_a_worker_that_ended_itself_is_gone_when_it_is_stopped_or_needed_again() -> None:
    for order, detail in (
        (StopWorker(W1, S, "job ended"), "job ended"),
        (announce(W1, 2), "its script had ended its process"),
    ):
        agent = with_trained()
        agent.do(ProcessExited(1, LEFT_WELL))
        agent.hear(LeaveGroup(W1, 1, True, "node n2 joins"))
        assert agent.exit_of(W1) is None
        agent.hear(order)
        assert agent.exit_of(W1) == ExitCause(ExitKind.STOPPED, detail=detail)

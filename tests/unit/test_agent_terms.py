"""Which leader an agent obeys: the newest that it has met, of each store."""

from __future__ import annotations

from elastic.core.events.agent import Connected, Disconnect
from elastic.core.messages import StartWorker, Welcome, WorkerUpdate
from tests.unit.agent_under_test import W1, Agent, connecting, of, reconnect, spec


def welcomed(*welcomes: Welcome) -> Agent:
    """An agent that these coordinators welcomed, one after the other."""
    agent = connecting()
    agent.do(Connected(agent.session))
    agent.hear(welcomes[0])
    for welcome in welcomes[1:]:
        reconnect(agent)
        agent.hear(welcome)
    return agent


def obeys(agent: Agent) -> bool:
    """Whether the coordinator of the session that stands may command it."""
    agent.hear(StartWorker(W1, spec()))
    return bool(agent.sent(WorkerUpdate))


def test_a_leader_that_was_replaced_commands_nobody_and_another_one_is_looked_for() -> None:
    """It was frozen or cut off, and does not know of the next term yet."""
    agent = welcomed(Welcome("new", term=5, history="h"))
    reconnect(agent)
    stale = agent.session
    assert of(agent.hear(Welcome("old", term=4, history="h")), Disconnect) == [Disconnect(stale)]
    assert not obeys(agent)
    reconnect_after_pause(agent)
    agent.hear(Welcome("new", term=5, history="h"))
    assert obeys(agent)


def reconnect_after_pause(agent: Agent) -> None:
    agent.at_deadline()
    agent.do(Connected(agent.session))

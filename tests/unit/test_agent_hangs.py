"""What an agent does about hangs: it answers probes, passes pulses on, and has stacks written."""

from __future__ import annotations

from elastic.core.events.agent import LinksProbed, ProbeLinks, ShowStacks
from elastic.core.facts import JobId, NodeId
from elastic.core.messages import (
    DumpStacks,
    Link,
    LinksTried,
    Probe,
    ProbeAck,
    Pulse,
    StopWorker,
    TryLinks,
)
from tests.unit.agent_under_test import W1, W2, S, with_worker


def test_a_probe_is_answered_at_once() -> None:
    agent = with_worker()
    agent.hear(Probe(9))
    assert agent.sent() == [ProbeAck(9)]


def test_a_pulse_of_a_worker_is_passed_on_and_not_that_of_another_one() -> None:
    agent = with_worker()
    agent.process(1, Pulse(W1, 3, 300, 0))
    assert agent.sent() == [Pulse(W1, 3, 300, 0)]
    agent.process(1, Pulse(W2, 3, 300, 0))
    assert agent.sent() == []


def test_a_worker_is_made_to_show_its_stacks() -> None:
    agent = with_worker()
    assert agent.hear(DumpStacks(W1, "n/9 waits")) == [ShowStacks(1)]
    assert dict(agent.notes[-1].fields)["reason"] == "n/9 waits"


def test_whoever_is_unknown_or_on_its_way_out_shows_no_stacks() -> None:
    agent = with_worker()
    assert agent.hear(DumpStacks(W2, "why")) == []
    agent.hear(StopWorker(W1, 5 * S, "why"))
    assert agent.hear(DumpStacks(W1, "why")) == []


def test_an_agent_tries_the_links_that_it_is_asked_about_and_tells_what_it_found() -> None:
    agent = with_worker()
    order = TryLinks(JobId("a"), (Link(NodeId("n2"), "host:1"),))
    assert agent.hear(order) == [ProbeLinks(order)]
    answer = LinksTried(JobId("a"), unreachable=(NodeId("n2"),))
    agent.do(LinksProbed(answer))
    assert agent.sent() == [answer]

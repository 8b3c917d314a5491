"""A node with good credentials and bad intentions: the coordinator's machine outlives all it says.

What it says is drawn from the whole protocol, with ids, generations and phases of jobs that really
run, and is sent over the wire first. An honest node's job must still be stoppable in the end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.facts import JobId, NodeId, WorkerId, WorkerPhase, WorkerReport
from elastic.core.messages import Hello, Report, Reported, WorkerUpdate
from elastic.errors import ConfigError, PeerError
from elastic.wire.codec_stream import FROM_AGENT
from tests.effort import examples
from tests.strategies import AGENT_MESSAGES, facts
from tests.unit.coordinator_under_test import Coordinator, PlayedAgent

hostile = settings(
    max_examples=examples(75),
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
JOB, GOOD = JobId("job"), WorkerId("good/1")
NODES = st.sampled_from(["good", "bad", "other"]).map(NodeId)
AIMED: dict[str, st.SearchStrategy[Any]] = {
    "worker_id": st.sampled_from(["good/1", "bad/1", "bad/2", "bad/x", "/", ""]).map(WorkerId),
    "job_id": st.sampled_from(["job", "none", ""]).map(JobId),
    "node_id": NODES,
    "generation": st.integers(0, 4) | st.just(2**64 - 1),
    "incarnation": st.integers(0, 3),
    "index": st.integers(-1, 4),
    "num_slots": st.integers(-1, 4) | st.just(2**31 - 1),
}
"""Fields that decide whether a message is about something that is there."""


def aimed(draw: st.DrawFn, fact: Any) -> Any:
    """Return the same message about what is there, for the most part."""
    if isinstance(fact, tuple):
        return tuple(aimed(draw, item) for item in fact)
    if not dataclasses.is_dataclass(fact) or isinstance(fact, type):
        return fact
    changes = {}
    for field in dataclasses.fields(fact):
        if field.name in AIMED and draw(st.integers(0, 7)):
            changes[field.name] = draw(AIMED[field.name])
        else:
            changes[field.name] = aimed(draw, getattr(fact, field.name))
    return dataclasses.replace(fact, **changes)


@st.composite
def bad_words(draw: st.DrawFn) -> Any:
    """Draw a message that the wire lets through, None if it does not."""
    try:
        return FROM_AGENT.decode(FROM_AGENT.encode(aimed(draw, draw(AGENT_MESSAGES))))
    except (PeerError, ConfigError):
        return None


@st.composite
def bad_greetings(draw: st.DrawFn) -> Any:
    """Draw a Hello that the wire lets through, None if it does not."""
    try:
        return FROM_AGENT.decode(FROM_AGENT.encode(aimed(draw, draw(facts(Hello)))))
    except (PeerError, ConfigError):
        return None


def besieged() -> Coordinator:
    """A coordinator with an honest node and another one; a job trains on both."""
    cluster = Coordinator()
    cluster.agent("good", slots=1)
    cluster.agent("bad", slots=2)
    cluster.submit("job", 1, 3)
    cluster.ready("good/1", *(str(worker) for worker in cluster.agents["bad"].workers))
    cluster.advance(3)
    return cluster


@hostile
@given(words=st.lists(bad_words() | st.floats(0, 5), max_size=15))
def test_nothing_that_a_node_says_ends_the_coordinator(words: list[Any]) -> None:
    cluster = besieged()
    for word in words:
        if isinstance(word, float):
            cluster.advance(word)
        elif word is not None and not isinstance(word, Hello) and cluster.agents["bad"].session:
            cluster.says("bad", word)
    assert cluster.stop("job").error in ("", "failed_precondition")


@hostile
@given(greetings=st.lists(st.tuples(bad_greetings(), st.floats(0, 2)), max_size=5))
def test_no_greeting_of_a_node_ends_the_coordinator(greetings: list[Any]) -> None:
    from elastic.core.events.coordinator import AgentConnected
    from elastic.core.facts import SessionId

    cluster = besieged()
    for number, (greeting, pause_s) in enumerate(greetings):
        if greeting is None:
            continue
        session = SessionId(f"bad-{number}")
        cluster.agents[f"bad-{number}"] = PlayedAgent(greeting.node, session)
        cluster.names[session] = f"bad-{number}"
        cluster.step(AgentConnected(session, greeting))
        cluster.advance(pause_s)
    assert cluster.stop("job").error in ("", "failed_precondition")


def test_an_agent_speaks_for_the_workers_of_its_own_node_only() -> None:
    cluster = besieged()
    before = cluster.job("job")
    for phase in (WorkerPhase.EXITED, WorkerPhase.FINISHED, WorkerPhase.BROKEN):
        cluster.says("bad", WorkerUpdate(WorkerReport(GOOD, JOB, phase, before.record.generation)))
    said = Report(GOOD, JOB, before.record.generation, 0, 0, "{}", "/somewhere/else")
    cluster.says("bad", Reported(said))
    cluster.advance(1)
    after = cluster.job("job")
    # The time of workers goes on, whatever is said.
    assert replace(after.record, goodput=before.record.goodput) == before.record
    assert [w.report for w in after.workers] == [w.report for w in before.workers]


@pytest.mark.parametrize("serial", ["²", "9" * 5000, "-1", "x", ""])
def test_a_worker_whose_number_is_none_does_not_end_the_coordinator(serial: str) -> None:
    cluster = besieged()
    worker_id = WorkerId(f"bad/{serial}")
    message = WorkerUpdate(WorkerReport(worker_id, JOB, WorkerPhase.READY, 0))
    cluster.says("bad", FROM_AGENT.decode(FROM_AGENT.encode(message)))
    cluster.submit("another", 1, 1)
    assert cluster.stop("job").error == ""

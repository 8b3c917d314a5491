"""The coordinator's machine: jobs, groups, losses, drains, and what users and agents are told."""

from __future__ import annotations

import pytest

from elastic.core.config import ns
from elastic.core.events.coordinator import (
    Recovered,
    Reply,
    SubmitRequested,
)
from elastic.core.events.shared import Tick
from elastic.core.facts import (
    JobId,
    NodePhase,
)
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.core.messages import (
    LeaveGroup,
)
from elastic.errors import InvariantViolation
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running, spec


def left(coordinator: Coordinator, *, at_boundary: bool) -> list[str]:
    found = [m for m in coordinator.sent(LeaveGroup) if m.at_boundary is at_boundary]
    return [f"{message.worker_id} g{message.generation}" for message in found]


# ---------------------------------------------------------------- the door


def test_the_first_event_must_be_the_recovery_and_there_is_only_one() -> None:
    with pytest.raises(InvariantViolation, match=r"first event must be Recovered, got Tick"):
        CoordinatorMachine(CONFIG).step(Tick(), 0)
    with pytest.raises(InvariantViolation, match="Recovered came twice"):
        Coordinator().step(Recovered(()))


def test_time_that_falls_is_refused_with_both_moments() -> None:
    coordinator = Coordinator()
    coordinator.advance(5)
    coordinator.step(Tick())
    with pytest.raises(InvariantViolation, match="time fell from 5000000000 to 1"):
        coordinator.machine.step(Tick(), 1)


def test_who_only_asks_is_answered_and_nothing_is_submitted() -> None:
    coordinator = Coordinator()
    asked = SubmitRequested("r1", spec("a"), dry_run=True)
    coordinator.step(asked)
    assert coordinator.effects == (Reply("r1", "", JobId("a")),)
    assert not coordinator.machine.view(coordinator.now_ns).jobs
    coordinator.submit("a")
    coordinator.step(asked)
    assert "already_exists" in str(coordinator.effects)


# ---------------------------------------------------------------- losses


def test_a_node_that_goes_silent_after_a_member_said_that_the_group_broke_is_lost_at_once() -> None:
    coordinator = running()
    coordinator.broken("n1/1")
    assert coordinator.members("a").startswith("g1")
    coordinator.disconnect("n2")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_no_worker_starts_on_a_node_that_does_not_answer() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.disconnect("n1")
    coordinator.submit("a")
    assert coordinator.job("a").workers == ()
    assert coordinator.job("a").reason.startswith("waiting: needs 1 more workers, no node")
    coordinator.agent("n1")
    assert [one.report.worker_id for one in coordinator.job("a").workers] == ["n1/1"]


# ---------------------------------------------------------------- drains


def test_an_agent_that_comes_back_still_draining_says_so_in_its_hello() -> None:
    coordinator = running(low=2)
    coordinator.disconnect("n2")
    coordinator.agent("n2", draining=True, drain_reason="spot notice", drain_timeout_ns=ns(9))
    assert coordinator.node("n2").phase is NodePhase.DRAINING
    assert coordinator.node("n2").reason == "spot notice"
    assert left(coordinator, at_boundary=True) == ["n1/1 g1", "n2/1 g1", "n3/1 g1"]
    coordinator.disconnect("n2")
    coordinator.agent("n2")
    assert coordinator.node("n2").phase is NodePhase.DRAINING


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("n9", "not_found", "no node n9 is known here; known: n1, n2"),
        ("n2", "failed_precondition", "node n2 is disconnected, only a connected one can drain"),
    ],
)
def test_a_node_that_cannot_drain_is_refused_with_the_reason(
    name: str, error: str, says: str
) -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    reply = coordinator.drain(name)
    assert (reply.error, reply.text) == (error, says)

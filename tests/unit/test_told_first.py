"""In a large group everybody hears that it is over before the next one is worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.config import CoordinatorConfig
from elastic.core.events.coordinator import Persist
from elastic.core.events.shared import Tick
from elastic.core.messages import Announce, LeaveGroup, StartWorker
from elastic.core.policy import membership
from elastic.core.world import JobPhase
from elastic.errors import ConfigError
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running

LARGE = replace(CONFIG, tell_first_min=4)


def large(*, nodes: int = 4, low: int = 1) -> Coordinator:
    return running(nodes=nodes, low=low, config=LARGE)


def told(coordinator: Coordinator) -> list[str]:
    """Return who was just told that its group is over, and that another follows."""
    orders = coordinator.sent(LeaveGroup)
    assert all(order.follows and not order.at_boundary for order in orders)
    assert {order.generation for order in orders} <= {1}
    return [order.worker_id for order in orders]


def test_survivors_hear_of_the_end_at_once_and_of_the_next_group_in_the_next_step() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    assert told(coordinator) == ["n1/1", "n3/1", "n4/1"]
    assert not coordinator.sent(Announce)
    assert not coordinator.of(Persist)
    coordinator.advance(1e-9)
    assert coordinator.members("a") == "g2: n1/1 n3/1 n4/1"
    assert len(coordinator.of(Persist)) == 1
    assert len(coordinator.sent(Announce)) == 3
    assert not coordinator.sent(LeaveGroup)


def test_the_lost_worker_is_replaced_after_all_were_told() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    assert not coordinator.sent(StartWorker)
    coordinator.advance(1e-9)
    if not coordinator.sent(StartWorker):  # Four were told, three are in: it is no large one now.
        coordinator.advance(1e-9)
    assert [order.worker_id for order in coordinator.sent(StartWorker)] == ["n2/2"]


def test_a_large_group_is_announced_before_workers_are_started_for_it() -> None:
    coordinator = Coordinator(LARGE)
    for name in ("n1", "n2", "n3", "n4"):
        coordinator.agent(name)
    coordinator.submit("a", 4, 5)
    coordinator.ready("n1/1", "n2/1", "n3/1", "n4/1")
    coordinator.agent("n5")
    coordinator.advance(CONFIG.start_patience_s)
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1 n4/1"
    assert coordinator.report_of("n5/1")


def test_a_smaller_group_is_told_of_both_at_once() -> None:
    coordinator = large(nodes=3)
    coordinator.exits("n2/1")
    assert not coordinator.sent(LeaveGroup)
    assert len(coordinator.sent(Announce)) == 2


def test_nobody_is_told_twice_of_the_same_end() -> None:
    coordinator = large(nodes=5)
    coordinator.exits("n2/1")
    assert len(told(coordinator)) == 4
    coordinator.exits("n3/1")
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.members("a") == "g2: n1/1 n4/1 n5/1"


def test_a_lost_node_is_told_of_as_a_lost_worker() -> None:
    coordinator = large()
    coordinator.disconnect("n4")
    assert not coordinator.sent(LeaveGroup)
    coordinator.advance(LARGE.node_grace_s + 0.001)
    assert told(coordinator) == ["n1/1", "n2/1", "n3/1"]
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def test_with_too_few_left_they_hear_that_no_group_follows_for_now() -> None:
    coordinator = large(low=4)
    coordinator.exits("n2/1")
    assert len(told(coordinator)) == 3
    coordinator.advance(1e-9)
    assert [order.follows for order in coordinator.sent(LeaveGroup)] == [False] * 3
    assert coordinator.job("a").record.phase is JobPhase.PENDING


def test_members_that_said_they_are_out_form_the_next_group() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1 n4/1"


def test_a_coordinator_that_dies_in_between_is_followed_by_one_that_says_it_again() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    coordinator.agents["n2"].workers.clear()
    coordinator.restart()
    for name in ("n1", "n2", "n3", "n4"):
        coordinator.agent(name)
    coordinator.advance(LARGE.adoption_grace_s)
    assert coordinator.members("a") == "g2: n1/1 n3/1 n4/1"


def test_a_lost_member_that_comes_back_in_between_is_in_the_next_group_at_once() -> None:
    coordinator = large()
    coordinator.disconnect("n4")
    coordinator.now_ns = coordinator.machine.next_deadline_ns() or 0
    coordinator.step(Tick())
    assert told(coordinator) == ["n1/1", "n2/1", "n3/1"]
    coordinator.agent("n4")
    assert [order.generation for order in coordinator.sent(LeaveGroup)] == [1]
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1 n4/1"
    assert coordinator.job("a").record.losses == 1


def test_who_comes_back_while_word_of_another_is_awaited_hears_it_too() -> None:
    coordinator = large(nodes=5)
    coordinator.disconnect("n4")
    coordinator.now_ns = coordinator.machine.next_deadline_ns() or 0
    coordinator.step(Tick())
    coordinator.disconnect("n5")
    coordinator.agent("n4")
    assert [order.worker_id for order in coordinator.sent(LeaveGroup)] == ["n4/1"]


def test_members_told_by_a_coordinator_that_died_in_between_do_not_wait_for_who_was_not() -> None:
    """The lost one comes back, to a coordinator that never lost it, and trains on alone."""
    coordinator = large()
    coordinator.disconnect("n4")
    coordinator.now_ns = coordinator.machine.next_deadline_ns() or 0
    coordinator.step(Tick())
    assert len(told(coordinator)) == 3
    coordinator.restart()
    for name in ("n1", "n2", "n3", "n4"):
        coordinator.agent(name)
    coordinator.ready("n1/1", "n2/1", "n3/1")
    coordinator.advance(membership.UNASKED_S - 0.1)
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1 n4/1"
    coordinator.advance(0.2)
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1 n4/1"


def test_a_job_that_ends_in_between_says_nothing_more_of_groups() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    coordinator.stop("a")
    coordinator.advance(1)
    assert not coordinator.sent(Announce)
    assert coordinator.job("a").record.phase in (JobPhase.STOPPED, JobPhase.STOPPING)


def test_a_group_of_nobody_is_not_large() -> None:
    with pytest.raises(ConfigError, match="tell_first_min=0: expected >= 1"):
        CoordinatorConfig(tell_first_min=0)


def test_a_group_that_may_stand_after_all_is_not_told_that_it_is_over() -> None:
    """Word of a member is awaited, and what it has kept may be the last that was missing."""
    coordinator = large()
    coordinator.disconnect("n3")
    coordinator.agent("n3", reports_due=1)
    coordinator.exits("n2/1")
    assert not coordinator.sent(LeaveGroup)
    coordinator.reports("n3/1", 0)
    assert len(told(coordinator)) == 3


def test_a_member_that_has_finished_is_not_told_to_leave() -> None:
    coordinator = large()
    coordinator.finished("n1/1", "42")
    coordinator.exits("n2/1")
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.members("a") == "g2: n1/1 n3/1 n4/1"

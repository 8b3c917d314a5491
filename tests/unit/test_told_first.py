"""In a large group everybody hears that it is over before the next one is worked out."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events.shared import Tick
from elastic.core.messages import LeaveGroup
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running

LARGE = replace(CONFIG, announce_end_early_min=4)


def large(*, nodes: int = 4, low: int = 1) -> Coordinator:
    return running(nodes=nodes, low=low, config=LARGE)


def told(coordinator: Coordinator) -> list[str]:
    """Return who was just told that its group is over, and that another follows."""
    orders = coordinator.sent(LeaveGroup)
    assert all(order.follows and not order.at_boundary for order in orders)
    assert {order.generation for order in orders} <= {1}
    return [order.worker_id for order in orders]


def test_members_that_said_they_are_out_form_the_next_group() -> None:
    coordinator = large()
    coordinator.exits("n2/1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1 n4/1 n3/1"  # The last takes its place.


def test_a_lost_member_that_comes_back_in_between_is_in_the_next_group_at_once() -> None:
    coordinator = large()
    coordinator.disconnect("n4")
    coordinator.now_ns = coordinator.machine.next_deadline_ns() or 0
    coordinator.step(Tick())
    assert told(coordinator) == ["n1/1", "n2/1", "n3/1"]
    coordinator.agent("n4")
    assert [order.generation for order in coordinator.sent(LeaveGroup)] == [1]
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1 n4/1"
    assert coordinator.job("a").record.losses == 0

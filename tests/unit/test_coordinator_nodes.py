"""What an operator asks of nodes: cordons and drains, and what is shown of them."""

from __future__ import annotations

from elastic.core.cluster_messages import Drain
from elastic.core.config import ns
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running


def test_a_reason_that_no_store_would_keep_is_refused_and_the_node_is_as_it_was() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    refused = coordinator.cordon("n1", "x" * 600_000)
    assert refused.error == "exhausted"
    assert "shorter reason" in refused.text
    assert coordinator.cordon("n1", "upgrade").error == ""


def test_an_agent_is_told_of_an_operators_drain_and_again_when_it_comes_back() -> None:
    coordinator = running()
    coordinator.drain("n2", 60, "upgrade")
    assert coordinator.sent(Drain) == [Drain("upgrade", ns(60))]
    coordinator.disconnect("n2")
    coordinator.advance(0.2)
    coordinator.agent("n2")
    (again,) = coordinator.sent(Drain)
    assert again.reason == "upgrade"
    assert ns(59) < again.timeout_ns < ns(60)


def test_the_answer_to_a_drain_says_how_long_the_node_has() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    assert coordinator.drain("n1", 60).text == str(ns(60))
    coordinator.advance(10)
    assert coordinator.drain("n1", 300).text == str(ns(50)), "the sooner one counts"
    assert coordinator.drain("n1", 5).text == str(ns(5))


def test_a_node_that_takes_no_workers_has_no_free_slots_to_show() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name, slots=2)
    coordinator.drain("n1", 60)
    coordinator.disconnect("n2")
    shown = coordinator.machine.view(coordinator.now_ns).nodes
    assert [(view.node.node_id, view.free_slots) for view in shown] == [
        ("n1", 0), ("n2", 0), ("n3", 2),
    ]  # fmt: skip


def test_a_drain_at_once_leaves_the_agent_time_to_see_its_workers_stopped() -> None:
    coordinator = running()
    coordinator.drain("n2", 0)
    assert [order.timeout_ns for order in coordinator.sent(Drain)] == [ns(CONFIG.stop_grace_s)]

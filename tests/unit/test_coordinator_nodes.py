"""What an operator asks of nodes: cordons and drains, and what is shown of them."""

from __future__ import annotations

from tests.unit.coordinator_under_test import Coordinator


def test_a_reason_that_no_store_would_keep_is_refused_and_the_node_is_as_it_was() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    refused = coordinator.cordon("n1", "x" * 600_000)
    assert refused.error == "exhausted"
    assert "shorter reason" in refused.text
    assert coordinator.cordon("n1", "upgrade").error == ""

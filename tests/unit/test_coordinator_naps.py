"""A coordinator that did not run for a while: streams that have ended for that, and who is gone."""

from __future__ import annotations

import pytest

from elastic.core.config import ns
from elastic.core.events.coordinator import WokeFromSuspend
from elastic.core.facts import NodePhase
from elastic.core.machine.node_liveness import AWAY_GRACE_S
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running


def slept(coordinator: Coordinator, *, is_reported_first: bool) -> Coordinator:
    """Let all streams end during a nap, of which the machine hears before or after them."""
    if is_reported_first:
        coordinator.step(WokeFromSuspend(ns(40)))
    for name in ("n1", "n2"):
        coordinator.disconnect(name)
    if not is_reported_first:
        coordinator.advance(CONFIG.node_grace_s / 2)
        coordinator.step(WokeFromSuspend(ns(40)))
    return coordinator


@pytest.mark.parametrize("is_reported_first", [True, False])
def test_a_group_that_trained_meanwhile_goes_on(is_reported_first: bool) -> None:
    coordinator = slept(running(nodes=2), is_reported_first=is_reported_first)
    for name in ("n1", "n2"):
        coordinator.advance(3 * CONFIG.node_grace_s)
        coordinator.agent(name)
    coordinator.advance(2 * CONFIG.adoption_grace_s)
    assert coordinator.members("a") == "g1: n1/1 n2/1"
    assert coordinator.noted("node_lost") == []
    assert coordinator.noted("woke") == [{"slept_s": "40.0"}]


def test_naps_in_a_row_keep_nobody_for_ever() -> None:
    coordinator = slept(running(nodes=2), is_reported_first=True)
    coordinator.agent("n1")
    coordinator.broken("n1/1")
    coordinator.step(WokeFromSuspend(ns(1)))
    coordinator.advance(AWAY_GRACE_S)
    assert coordinator.node("n2").phase is NodePhase.LOST

"""A coordinator that did not run for a while: streams that have ended for that, and who is gone."""

from __future__ import annotations

import pytest

from elastic.coord.naps import nap_ns
from elastic.core.config import ns
from elastic.core.events.coordinator import Woke
from elastic.core.machine.absence import AWAY_GRACE_S, WAKING_S
from elastic.core.world import NodePhase
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running


def slept(coordinator: Coordinator, *, is_told_first: bool) -> Coordinator:
    """Let all streams end during a nap, of which the machine hears before or after them."""
    if is_told_first:
        coordinator.step(Woke(ns(40)))
    for name in ("n1", "n2"):
        coordinator.disconnect(name)
    if not is_told_first:
        coordinator.advance(CONFIG.node_grace_s / 2)
        coordinator.step(Woke(ns(40)))
    return coordinator


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_group_that_trained_meanwhile_goes_on(is_told_first: bool) -> None:
    coordinator = slept(running(nodes=2), is_told_first=is_told_first)
    for name in ("n1", "n2"):
        coordinator.advance(3 * CONFIG.node_grace_s)
        coordinator.agent(name)
    coordinator.advance(2 * CONFIG.adoption_grace_s)
    assert coordinator.members("a") == "g1: n1/1 n2/1"
    assert coordinator.noted("node_lost") == []
    assert coordinator.noted("woke") == [{"slept_s": "40.0"}]


def test_who_does_not_come_back_is_lost_in_the_end() -> None:
    coordinator = slept(running(nodes=2), is_told_first=True)
    coordinator.agent("n1")
    coordinator.advance(CONFIG.adoption_grace_s)
    assert coordinator.node("n2").phase is NodePhase.LOST


def test_who_does_not_come_back_is_lost_soon_when_its_group_is_known_to_be_broken() -> None:
    coordinator = slept(running(nodes=2), is_told_first=True)
    coordinator.agent("n1")
    coordinator.broken("n1/1")
    coordinator.advance(AWAY_GRACE_S)
    assert coordinator.node("n2").phase is NodePhase.LOST


def test_what_ends_later_has_no_such_excuse() -> None:
    coordinator = running(nodes=2)
    coordinator.step(Woke(ns(40)))
    coordinator.advance(WAKING_S)
    coordinator.steps("n2/1", 5)
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s)
    assert coordinator.node("n2").phase is NodePhase.LOST


def test_an_end_that_is_heard_of_late_has() -> None:
    """Ten thousand are heard of one after the other."""
    coordinator = running(nodes=2)
    coordinator.advance(1)
    coordinator.step(Woke(ns(40)))
    coordinator.advance(WAKING_S)
    coordinator.disconnect("n2")
    coordinator.advance(3 * CONFIG.node_grace_s)
    assert coordinator.node("n2").phase is NodePhase.DISCONNECTED


def test_naps_in_a_row_keep_nobody_for_ever() -> None:
    coordinator = slept(running(nodes=2), is_told_first=True)
    coordinator.agent("n1")
    coordinator.broken("n1/1")
    coordinator.step(Woke(ns(1)))
    coordinator.advance(AWAY_GRACE_S)
    assert coordinator.node("n2").phase is NodePhase.LOST


def test_who_was_away_before_has_a_moment_more() -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s / 2)
    coordinator.step(Woke(ns(0.1)))
    coordinator.advance(AWAY_GRACE_S)
    assert coordinator.node("n2").phase is NodePhase.LOST


@pytest.mark.parametrize(
    ("took_s", "worked_s", "found_s"),
    [(0.26, 0.0, 0.0), (1.2, 0.0, 0.0), (1.25, 0.0, 1.0), (40.25, 0.1, 40.0), (3.25, 2.9, 0.0)],
)
def test_a_nap_is_long_and_costs_no_processor(
    took_s: float, worked_s: float, found_s: float
) -> None:
    assert nap_ns(ns(took_s), ns(worked_s)) == ns(found_s)

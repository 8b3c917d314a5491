"""Many agents at once: what follows from all that they said is decided once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from elastic.core.events.coordinator import CoordinatorEvent, EventBatch
from tests.unit.coordinator_under_test import Coordinator


class Crowd(Coordinator):
    """A coordinator whose events can be held back, to come all at once."""

    held: list[CoordinatorEvent] | None = None

    def step(self, event: CoordinatorEvent) -> None:
        """Take one event, or keep it."""
        if self.held is None:
            super().step(event)
        else:
            self.held.append(event)

    def hold(self) -> None:
        """Keep what comes."""
        self.held = []

    def let_go(self) -> None:
        """Take all that was kept, as one."""
        events, self.held = self.held or [], None
        self.step(EventBatch(tuple(events)))


def crowd(nodes: int) -> tuple[Crowd, list[str]]:
    coordinator = Crowd()
    names = [f"n{number:03d}" for number in range(nodes)]
    coordinator.hold()
    for name in names:
        coordinator.agent(name)
    coordinator.let_go()
    coordinator.submit("a", 2, nodes)
    return coordinator, [f"{name}/1" for name in names]


# ---------------------------------------------------------------- what it costs


def calls_of(act: Callable[[], object]) -> int:
    """Return how many functions are called: what it costs, however loaded the machine is."""
    found = 0

    def count(_: FrameType, kind: str, __: object) -> None:
        nonlocal found
        found += kind in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def coming_up(nodes: int) -> int:
    """Return the calls in which all members of a new group tell that they train, one by one."""
    coordinator, workers = crowd(nodes)
    coordinator.ready(*workers)
    coordinator.hold()
    coordinator.training(*workers)
    said, coordinator.held = coordinator.held or [], None
    return calls_of(lambda: [coordinator.step(one) for one in said])


def test_a_group_of_twice_as_many_costs_twice_as_much_to_come_up() -> None:
    assert coming_up(400) < 2.5 * coming_up(200)

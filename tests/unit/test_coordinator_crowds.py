"""Many agents at once: what follows from all that they said is decided once."""

from __future__ import annotations

from elastic.core.events.coordinator import CoordinatorEvent, Persist, Several
from elastic.core.messages import Announce
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
        self.step(Several(tuple(events)))


def crowd(nodes: int) -> tuple[Crowd, list[str]]:
    coordinator = Crowd()
    names = [f"n{number:03d}" for number in range(nodes)]
    coordinator.hold()
    for name in names:
        coordinator.agent(name)
    coordinator.let_go()
    coordinator.submit("a", 2, nodes)
    return coordinator, [f"{name}/1" for name in names]


def test_workers_that_are_ready_at_once_make_one_group() -> None:
    coordinator, workers = crowd(50)
    coordinator.hold()
    coordinator.ready(*workers)
    coordinator.let_go()
    assert coordinator.members("a") == f"g1: {' '.join(workers)}"
    assert len(coordinator.of(Persist)) == 1
    ranks = [message.assignment.rank for message in coordinator.sent(Announce)]
    assert ranks == list(range(50))


def test_deaths_that_are_told_at_once_cost_one_generation() -> None:
    coordinator, workers = crowd(50)
    coordinator.ready(*workers)
    coordinator.training(*workers)
    coordinator.hold()
    for worker in workers[:20]:
        coordinator.exits(worker)
    coordinator.let_go()
    assert coordinator.members("a") == f"g2: {' '.join(workers[20:])}"
    assert len(coordinator.noted("group_formed")) == 2
    assert len(coordinator.of(Persist)) == 1


def test_a_worker_that_dies_and_one_that_finds_the_group_broken_are_one_loss() -> None:
    coordinator, workers = crowd(3)
    coordinator.ready(*workers)
    coordinator.training(*workers)
    coordinator.hold()
    coordinator.broken(workers[1])
    coordinator.exits(workers[0])
    coordinator.let_go()
    assert coordinator.members("a") == f"g2: {' '.join(workers[1:])}"
    assert coordinator.noted("group_formed")[1]["cause"] == "lost"

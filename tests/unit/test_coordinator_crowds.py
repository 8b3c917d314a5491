"""Many agents at once: what follows from all that they said is decided once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from elastic.core.events.coordinator import CoordinatorEvent, Persist, Several
from elastic.core.messages import Announce
from elastic.core.policy import queue
from elastic.core.policy.packing import Room
from elastic.core.policy.queue import Claim
from elastic.core.world import NodeId, Resources, WorkerId
from elastic.wire.codec_stream import encode_coordinator_message
from tests.unit.coordinator_under_test import CONFIG, Coordinator, spec


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


def test_what_the_last_of_many_says_counts_at_once() -> None:
    coordinator, workers = crowd(20)
    coordinator.ready(*workers)
    coordinator.training(*workers[1:])
    assert coordinator.noted("group_training") == []
    coordinator.training(workers[0])
    assert len(coordinator.noted("group_training")) == 1
    assert coordinator.machine.next_deadline_ns() is None


def test_one_of_many_that_dies_while_they_come_up_is_replaced_at_once() -> None:
    coordinator, workers = crowd(20)
    coordinator.ready(*workers)
    coordinator.training(*workers[:10])
    coordinator.exits(workers[15])
    assert coordinator.members("a") == f"g2: {' '.join([*workers[:15], *workers[16:]])}"


def test_members_that_leave_one_by_one_are_grouped_anew_with_the_last_of_them() -> None:
    coordinator, workers = crowd(20)
    coordinator.ready(*workers[:10])
    coordinator.advance(CONFIG.start_patience_s)
    coordinator.training(*workers[:10])
    coordinator.ready(*workers[10:])
    coordinator.ready(*workers[:9])
    assert len(coordinator.noted("group_formed")) == 1
    coordinator.ready(workers[9])
    assert coordinator.members("a") == f"g2: {' '.join(workers)}"


def planning(nodes: int) -> int:
    """Return the calls of one plan for three jobs that share all nodes."""
    rooms = [Room(NodeId(f"n{number:05d}"), 1, Resources()) for number in range(nodes)]
    third = nodes // 3
    seats = [(WorkerId(f"{room.node_id}/1"), room.node_id) for room in rooms]
    claims = [
        Claim(spec("a", third, nodes), 1, tuple(seats[: 2 * third]), trains=True),
        Claim(spec("b", third, nodes), 2, tuple(seats[2 * third :]), trains=True),
        Claim(spec("c", third, nodes), 3),
    ]
    return calls_of(lambda: queue.decide(claims, rooms, ()))


def test_a_plan_for_twice_as_many_nodes_costs_little_more_than_twice_as_much() -> None:
    assert planning(1200) < 2.6 * planning(600)


def test_what_a_member_is_told_does_not_grow_with_its_group() -> None:
    def size(nodes: int) -> int:
        coordinator, workers = crowd(nodes)
        coordinator.hold()
        coordinator.ready(*workers)
        coordinator.let_go()
        return max(len(encode_coordinator_message(m)) for m in coordinator.sent(Announce))

    # Ranks and sizes are numbers of more digits, and no more than that.
    assert size(10_000) <= size(10) + 12


def coming_back(nodes: int) -> int:
    """Return the calls in which the agents of a group tell a new coordinator what they run."""
    coordinator, workers = crowd(nodes)
    coordinator.ready(*workers)
    coordinator.training(*workers)
    coordinator.restart()
    coordinator.hold()
    for worker in workers:
        coordinator.agent(worker.partition("/")[0])
    return calls_of(coordinator.let_go)


def test_twice_as_many_that_come_back_cost_twice_as_much() -> None:
    assert coming_back(400) < 2.5 * coming_back(200)

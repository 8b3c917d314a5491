"""Members that save their state at the boundary where they leave, because none goes on with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.config import ns
from elastic.core.messages import LeaveGroup, Preemption, SaveState
from elastic.core.world import FIRST_AUTOMATIC, JobId, JobPhase, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running

AT_ONCE = replace(CONFIG, preemption_min_run_s=0, preemption_deadline_s=60)


def paused(*, in_place: bool = True) -> Coordinator:
    """Job a trains on n1, n2 and n3; its user pauses it, and it is told to leave."""
    coordinator = running(nodes=3, low=2, run_path="/runs/a", config=AT_ONCE)
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=in_place)
    coordinator.pause("a")
    if in_place:
        saved(coordinator)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True, True, True]
    return coordinator


def saved(coordinator: Coordinator, number: int = 1) -> None:
    """Let a checkpoint be recorded that was taken after this wish."""
    index = FIRST_AUTOMATIC + number
    coordinator.reports("n1/1", index, checkpoint=f"/runs/a/auto-{number}", request=number)


def phase(coordinator: Coordinator) -> JobPhase:
    return coordinator.job("a").record.phase


def stand_still(coordinator: Coordinator, worker: str, seconds: int) -> None:
    """Let a worker say each second that its main thread does not move."""
    for second in range(seconds):
        coordinator.pulse(worker, stands=1 + second)
        coordinator.advance(1)


# ---------------------------------------------------------------- how long they are waited for


def test_a_save_that_takes_longer_on_one_member_than_on_others_is_waited_for() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    coordinator.advance(600)
    assert phase(coordinator) is JobPhase.RUNNING
    assert coordinator.job("a").reason == "pauses: 2 of 3 members have saved their part and left"
    coordinator.ready("n1/1")
    assert phase(coordinator) is JobPhase.PAUSED


def test_but_not_without_end() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    coordinator.advance(659.9)
    assert phase(coordinator) is JobPhase.RUNNING
    coordinator.advance(0.2)
    assert phase(coordinator) is JobPhase.PAUSED


def test_nor_for_a_member_that_stands_still() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    stand_still(coordinator, "n1/1", 29)
    assert phase(coordinator) is JobPhase.RUNNING
    stand_still(coordinator, "n1/1", 40)
    assert phase(coordinator) is JobPhase.PAUSED


def test_one_that_moves_again_is_waited_for() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    stand_still(coordinator, "n1/1", 25)
    coordinator.pulse("n1/1")
    coordinator.advance(100)
    assert phase(coordinator) is JobPhase.RUNNING


def test_nor_is_code_without_a_loop_waited_for_any_longer() -> None:
    coordinator = paused(in_place=False)
    coordinator.ready("n2/1", "n3/1")
    coordinator.advance(30.1)
    assert phase(coordinator) is JobPhase.PAUSED


def test_who_makes_room_has_until_its_deadline() -> None:
    coordinator = running(nodes=3, low=3, run_path="/runs/a", config=AT_ONCE)
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.submit("b", priority=5)
    saved(coordinator)
    coordinator.ready("n2/1", "n3/1")
    coordinator.advance(59.9)
    assert phase(coordinator) is JobPhase.RUNNING
    coordinator.advance(0.2)
    assert phase(coordinator) is JobPhase.PENDING


# ---------------------------------------------------------------- when it goes on after all


@pytest.mark.parametrize("left", [(), ("n2/1", "n3/1")])
def test_a_pause_that_is_taken_back_is_not_waited_for(left: tuple[str, ...]) -> None:
    coordinator = paused()
    coordinator.ready(*left)
    coordinator.advance(10)
    coordinator.resume("a")
    assert [(m.at_boundary, m.saves) for m in coordinator.sent(LeaveGroup)] == [(True, False)] * 3
    coordinator.disconnect("n1")
    coordinator.agent("n1")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False], "said again"
    coordinator.ready(*{"n1/1", "n2/1", "n3/1"}.difference(left))
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"
    assert coordinator.noted("change_planned")[-1]["cause"] == "resume"


def test_nor_for_longer_than_for_any_other_boundary() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    coordinator.advance(20)
    coordinator.resume("a")
    assert coordinator.sent(LeaveGroup)
    coordinator.advance(10.1)
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def test_a_pause_that_is_wished_for_again_is_saved_again() -> None:
    coordinator = paused()
    coordinator.resume("a")
    coordinator.pause("a")
    assert [m.request for m in coordinator.sent(SaveState)] == [2, 2, 2]
    saved(coordinator, 2)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True, True, True]


def test_a_job_that_need_not_make_room_any_more_goes_on_at_once() -> None:
    coordinator = running(nodes=3, low=3, run_path="/runs/a", config=AT_ONCE)
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.submit("b", priority=5)
    saved(coordinator)
    coordinator.stop("b")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False, False, False]


# ---------------------------------------------------------------- another coordinator meanwhile


def succeeded(coordinator: Coordinator) -> Coordinator:
    """The coordinator dies; its successor hears of all agents within a moment."""
    coordinator.restart()
    for name in coordinator.agents:
        coordinator.advance(0.1)
        coordinator.agent(name)
    return coordinator


def test_a_successor_waits_for_those_who_save_as_well() -> None:
    coordinator = paused()
    coordinator.ready("n2/1")
    succeeded(coordinator)
    coordinator.ready("n3/1")
    coordinator.advance(590)
    assert phase(coordinator) is JobPhase.RUNNING
    assert coordinator.job("a").reason == "pauses: 2 of 3 members have saved their part and left"
    coordinator.ready("n1/1")
    assert phase(coordinator) is JobPhase.PAUSED


def test_a_successor_tells_those_who_have_not_heard_of_it() -> None:
    coordinator = paused()
    coordinator.restart()
    coordinator.agent("n1")
    assert [(m.at_boundary, m.saves) for m in coordinator.sent(LeaveGroup)] == [(True, True)]


@pytest.mark.parametrize("left", [(), ("n2/1", "n3/1")])
def test_a_successor_tells_them_that_they_need_not_save_any_more(left: tuple[str, ...]) -> None:
    coordinator = paused()
    coordinator.ready(*left)
    succeeded(coordinator)
    coordinator.resume("a")
    assert [(m.at_boundary, m.saves) for m in coordinator.sent(LeaveGroup)] == [(True, False)] * 3
    succeeded(coordinator)
    coordinator.ready(*{"n1/1", "n2/1", "n3/1"}.difference(left))
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def makes_room() -> Coordinator:
    """Job a makes room for b: its members were told to save where they leave, and one is out."""
    coordinator = running(nodes=3, low=3, run_path="/runs/a", config=AT_ONCE)
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.submit("b", priority=5)
    saved(coordinator)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True] * 3
    coordinator.ready("n2/1")
    return coordinator


@pytest.mark.parametrize("seconds", [0, 40])
def test_who_makes_room_does_so_for_a_successor_too(seconds: float) -> None:
    coordinator = succeeded(makes_room())
    coordinator.advance(seconds)
    assert coordinator.sent(LeaveGroup) == []
    coordinator.ready("n1/1", "n3/1")
    assert phase(coordinator) is JobPhase.PENDING
    assert coordinator.job("a").record.preempted_by == "b (priority 5 over 0)"


def test_and_is_cut_off_by_it_in_the_end() -> None:
    coordinator = succeeded(makes_room())
    coordinator.advance(59.5)
    assert phase(coordinator) is JobPhase.RUNNING
    coordinator.advance(0.6)
    assert phase(coordinator) is JobPhase.PENDING


def test_unless_nobody_wants_the_room_any_more() -> None:
    coordinator = makes_room()
    coordinator.stop("b")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False] * 3
    coordinator = makes_room()
    record = coordinator.store.pop(JobId("b"))
    succeeded(coordinator)
    assert record.spec.priority == 5
    coordinator.advance(2)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False] * 3
    coordinator.ready("n1/1", "n3/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def test_members_of_nodes_that_all_leave_save_for_a_successor_too() -> None:
    coordinator = swapped()
    coordinator.ready("n2/1")
    coordinator.restart()
    for name in ("n3", "n1", "n2"):
        coordinator.agent(name, draining=name != "n3", drain_timeout_ns=ns(120))
    assert {m.saves for m in coordinator.sent(LeaveGroup)} <= {True}
    coordinator.advance(100)
    assert coordinator.members("a").startswith("g1"), "the other one has time to save it"
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n3/1"


# ---------------------------------------------------------------- nodes that leave


def two_train(*, low: int, high: int = 2) -> Coordinator:
    """Job a trains on n1 and n2, in a loop that newcomers can enter."""
    coordinator = Coordinator(replace(AT_ONCE, start_patience_s=0))
    for name in ("n1", "n2"):
        coordinator.agent(name)
    coordinator.submit("a", low, high, run_path="/runs/a")
    coordinator.ready("n1/1", "n2/1")
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.advance(0.1)
    return coordinator


def swapped(*, seconds: float = 120) -> Coordinator:
    """Job a trains on n1 and n2; both drain, and what replaces them is ready in the same step."""
    coordinator = two_train(low=1)
    coordinator.notice("n1", seconds)
    coordinator.agent("n3")
    coordinator.notice("n2", seconds)
    coordinator.ready("n3/1")
    return coordinator


def test_members_that_all_leave_save_where_they_leave_however_soon_others_are_there() -> None:
    coordinator = swapped()
    assert coordinator.sent(LeaveGroup), "n3/1 is there"
    assert {m.saves for m in coordinator.sent(LeaveGroup)} == {True}
    coordinator.ready("n2/1")
    coordinator.advance(100)
    assert coordinator.members("a").startswith("g1"), "the other one has time to save it"
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n3/1"


def test_and_are_cut_off_when_their_nodes_must_leave() -> None:
    coordinator = swapped(seconds=20)
    coordinator.ready("n2/1")
    coordinator.advance(20.1)
    assert coordinator.members("a") == "g2: n3/1"


def test_members_that_were_asked_to_let_others_in_are_told_when_none_of_them_stays() -> None:
    coordinator = Coordinator(replace(AT_ONCE, start_patience_s=0))
    coordinator.agent("n1")
    coordinator.submit("a", 1, 3, run_path="/runs/a")
    coordinator.ready("n1/1")
    coordinator.update("n1/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.advance(0.1)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False], "n3/1 joins"
    coordinator.notice("n1", 120)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True]
    assert coordinator.sent(SaveState), "and at once, for nobody knows whether it has the time"


def test_members_that_are_out_already_when_all_are_to_leave_hand_on_what_they_have() -> None:
    """They had been asked to let another one in, and none of them has saved anything."""
    coordinator = two_train(low=2, high=3)
    coordinator.scale("a", 1, 3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False, False], "n3/1 joins"
    coordinator.ready("n1/1")
    coordinator.notice("n1", 120)
    coordinator.notice("n2", 120)
    assert coordinator.sent(LeaveGroup) == [], "n1/1 saves nothing any more"
    coordinator.ready("n2/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"
    assert [m.worker_id for m in coordinator.sent(Preemption)] == ["n1/1", "n2/1", "n3/1"]
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    planned = coordinator.noted("change_planned")[-1]
    assert (planned["generation"], planned["cause"]) == ("2", "drain"), "n3/1 has it by now"
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert coordinator.members("a") == "g3: n3/1"
    assert coordinator.job("a").record.preemptions == 2


def test_or_save_it_in_the_next_group_if_that_has_no_room_for_others() -> None:
    coordinator = two_train(low=2)
    coordinator.scale("a", 1, 2)
    coordinator.notice("n1", 120)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False, False], "n2/1 stays"
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.ready("n1/1")
    coordinator.notice("n2", 120)
    coordinator.ready("n2/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    coordinator.update("n1/1", WorkerPhase.FORMING)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True, True]
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.ready("n1/1", "n2/1")
    assert coordinator.members("a") == "g3: n3/1"


def test_they_save_it_in_the_next_group_if_nobody_is_there_to_have_it() -> None:
    coordinator = two_train(low=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.ready("n1/1")
    coordinator.notice("n1", 120)
    coordinator.notice("n2", 120)
    coordinator.exits("n3/1", STOPPED)
    coordinator.ready("n2/1")
    assert coordinator.members("a").startswith("g2: n1/1 n2/1")
    assert {m.generation for m in coordinator.sent(SaveState)} == {2}


def test_a_member_that_stays_takes_the_state_along() -> None:
    coordinator = two_train(low=2)
    coordinator.agent("n3")
    coordinator.notice("n1", 120)
    coordinator.ready("n3/1")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False, False]
    coordinator.exits("n3/1", STOPPED)
    assert coordinator.members("a").startswith("g1")

"""Members that save their state at the boundary where they leave, because none goes on with it."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import ns
from elastic.core.facts import JobPhase, ReportKind, WorkerPhase
from elastic.core.messages import LeaveGroup, SaveState
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running

AT_ONCE = replace(CONFIG, preemption_deadline_s=60)


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
    path, kind = f"/runs/a/auto-{number}", ReportKind.AUTOMATIC
    coordinator.reports("n1/1", number, checkpoint=path, request=number, kind=kind)


def phase(coordinator: Coordinator) -> JobPhase:
    return coordinator.job("a").record.phase


def stand_still(coordinator: Coordinator, worker: str, seconds: int) -> None:
    """Let a worker say each second that its main thread does not move."""
    for second in range(seconds):
        coordinator.pulse(worker, stands=1 + second)
        coordinator.advance(1)


# ---------------------------------------------------------------- how long they are waited for


def test_one_that_moves_again_is_waited_for() -> None:
    coordinator = paused()
    coordinator.ready("n2/1", "n3/1")
    stand_still(coordinator, "n1/1", 25)
    coordinator.pulse("n1/1")
    coordinator.advance(100)
    assert phase(coordinator) is JobPhase.RUNNING


# ---------------------------------------------------------------- when it goes on after all


def test_a_pause_that_is_wished_for_again_is_saved_again() -> None:
    coordinator = paused()
    coordinator.resume("a")
    coordinator.pause("a")
    assert [m.request for m in coordinator.sent(SaveState)] == [2, 2, 2]
    saved(coordinator, 2)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True, True, True]


# ---------------------------------------------------------------- stopped at the end


def test_a_stop_behind_the_loop_waits_for_the_end_of_the_train_function() -> None:
    """Its last checkpoint is being written, as where a tuner stops a trial at its last report."""
    coordinator = two_train(low=2)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=False)
    coordinator.stop("a")
    coordinator.advance(AT_ONCE.preemption_deadline_s - 1)
    assert phase(coordinator) is JobPhase.RUNNING
    coordinator.finished("n1/1")
    coordinator.finished("n2/1")
    coordinator.exits("n1/1", STOPPED)
    coordinator.exits("n2/1", STOPPED)
    assert phase(coordinator) is JobPhase.SUCCEEDED


def test_what_follows_the_loop_has_a_time_of_its_own() -> None:
    """The stop came in the last epoch, whose evaluation took longer than a stop may."""
    coordinator = two_train(low=2)
    coordinator.stop("a")
    coordinator.advance(AT_ONCE.preemption_deadline_s + 30)
    assert phase(coordinator) is JobPhase.RUNNING
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=False)
    coordinator.advance(AT_ONCE.preemption_deadline_s - 1)
    assert phase(coordinator) is JobPhase.RUNNING


def test_but_not_for_ever_and_not_if_it_is_to_end_at_once() -> None:
    for now, seconds in ((False, AT_ONCE.preemption_deadline_s), (True, 0.0)):
        coordinator = two_train(low=2)
        for worker in ("n1/1", "n2/1"):
            coordinator.update(worker, WorkerPhase.TRAINING, in_place=False)
        coordinator.stop("a", now=now)
        coordinator.advance(seconds)
        coordinator.exits("n1/1", STOPPED)
        coordinator.exits("n2/1", STOPPED)
        assert phase(coordinator) is JobPhase.STOPPED


# ---------------------------------------------------------------- nodes that leave


def two_train(*, low: int, high: int = 2) -> Coordinator:
    """Job a trains on n1 and n2, in a loop that newcomers can enter."""
    coordinator = Coordinator(replace(AT_ONCE, start_timeout_s=0))
    for name in ("n1", "n2"):
        coordinator.agent(name)
    coordinator.submit("a", low, high, run_path="/runs/a")
    workers = [f"n{number}/1" for number in range(1, high + 1)]
    coordinator.ready(*workers)
    for worker in workers:
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


def test_and_are_cut_off_when_their_nodes_must_leave() -> None:
    coordinator = swapped(seconds=20)
    coordinator.ready("n2/1")
    coordinator.advance(20.1)
    assert coordinator.members("a") == "g2: n3/1"


def test_those_whose_state_storage_has_not_taken_train_on_until_it_has() -> None:
    """Who would replace them has none of it, and their node is there for a while."""
    coordinator = two_train(low=1, high=1)
    coordinator.notice("n1", 120)
    coordinator.ready("n2/1")
    assert [message.saves for message in coordinator.sent(LeaveGroup)] == [True]
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1"
    coordinator.update("n1/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.advance(50)
    assert not coordinator.sent(LeaveGroup)
    saved(coordinator)
    assert [message.saves for message in coordinator.sent(LeaveGroup)] == [True]
    saved(coordinator, 2)
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g3: n2/1"


def test_another_coordinator_does_not_take_an_older_checkpoint_for_the_one_asked_for() -> None:
    coordinator = two_train(low=1, high=1)
    saved(coordinator)
    coordinator.notice("n1", 120)
    coordinator.ready("n2/1")
    assert [message.saves for message in coordinator.sent(LeaveGroup)] == [True]
    coordinator.restart()
    coordinator.agent("n1", draining=True, drain_timeout_ns=ns(119))
    coordinator.agent("n2")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1"

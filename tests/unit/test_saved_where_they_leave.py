"""Members that save their state at the boundary where they leave, because none goes on with it."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.messages import LeaveGroup, SaveState
from elastic.core.world import JobPhase, ReportKind, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running

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


# ---------------------------------------------------------------- nodes that leave


def two_train(*, low: int, high: int = 2) -> Coordinator:
    """Job a trains on n1 and n2, in a loop that newcomers can enter."""
    coordinator = Coordinator(replace(AT_ONCE, start_timeout_s=0))
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


def test_and_are_cut_off_when_their_nodes_must_leave() -> None:
    coordinator = swapped(seconds=20)
    coordinator.ready("n2/1")
    coordinator.advance(20.1)
    assert coordinator.members("a") == "g2: n3/1"

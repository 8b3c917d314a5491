"""A job on its way out for another one, and what may come between: users, losses, restarts."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.facts import JobPhase, ReportKind, WorkerPhase
from elastic.core.messages import LeaveGroup
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running

AT_ONCE = replace(CONFIG, preemption_deadline_s=10)
TO_B = "b (priority 5 over 0)"


def trains(coordinator: Coordinator, *workers: str) -> None:
    """Let workers train in a loop that goes on in place."""
    for worker in workers:
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)


def asked(*, low: int = 3, in_place: bool = True) -> Coordinator:
    """Job a trains on n1, n2 and n3; job b comes, and is more urgent."""
    coordinator = running(nodes=3, low=low, run_path="/runs/a", config=AT_ONCE)
    if in_place:
        trains(coordinator, "n1/1", "n2/1", "n3/1")
    coordinator.submit("b", priority=5)
    return coordinator


def pair() -> Coordinator:
    """Job a trains on n1, and c on n2; both can be saved at any step."""
    coordinator = Coordinator(AT_ONCE)
    for name, worker in (("a", "n1/1"), ("c", "n2/1")):
        coordinator.agent(worker[:2])
        coordinator.submit(name, run_path=f"/runs/{name}")
        coordinator.ready(worker)
        trains(coordinator, worker)
    coordinator.advance(0.1)
    return coordinator


def saved(coordinator: Coordinator, number: int = 1, worker: str = "n1/1") -> None:
    """Let a checkpoint be recorded that was taken after this wish."""
    path, kind = f"/runs/a/auto-{number}", ReportKind.AUTOMATIC
    coordinator.reports(worker, number, checkpoint=path, request=number, kind=kind)


def gone(coordinator: Coordinator, *workers: str) -> None:
    for worker in workers:
        coordinator.exits(worker, STOPPED)


def test_a_first_checkpoint_that_comes_late_lets_it_give_way_at_once() -> None:
    coordinator = asked()
    coordinator.advance(11)
    assert coordinator.job("a").reason == "3 workers"
    saved(coordinator, 1)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    coordinator.advance(10.1)  # The next one does not come; but there is one.
    assert coordinator.job("a").reason == f"gives way to {TO_B} at the next boundary"


def test_a_stop_says_that_storage_refuses_the_checkpoint_it_waits_for() -> None:
    coordinator = pair()
    coordinator.stop("a", "enough")
    waits = "stops (enough) as soon as a checkpoint is written"
    assert coordinator.job("a").reason == waits
    for error in ("disk full", "no such bucket"):
        coordinator.steps("n1/1", 1, unsaved=error)
        assert coordinator.job("a").reason == (
            f"{waits}, and storage refuses it ({error}): make room, or mend the storage; it is "
            f"tried again"
        )
    coordinator.steps("n1/1", 2)
    assert coordinator.job("a").reason == waits


def test_nobody_leaves_before_all_can_that_are_to_make_room() -> None:
    coordinator = pair()
    coordinator.submit("b", 2, priority=5)
    saved(coordinator, 1)
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as c can, too"
    saved(coordinator, 2, worker="n2/1")
    assert {m.worker_id for m in coordinator.sent(LeaveGroup)} == {"n1/1", "n2/1"}


def test_a_node_that_drains_meanwhile_takes_nothing_more() -> None:
    coordinator = asked()
    coordinator.drain("n1", 30)
    saved(coordinator, 2)
    coordinator.ready("n1/1", "n2/1", "n3/1")
    gone(coordinator, "n1/1", "n2/1", "n3/1")
    record = coordinator.job("a").record
    assert (record.phase, record.preempted_by) == (JobPhase.PENDING, TO_B)
    assert [w.node_id for w in coordinator.job("b").workers] in (["n2"], ["n3"])


def test_nobody_leaves_in_vain_beside_one_that_pauses() -> None:
    coordinator = pair()
    coordinator.pause("c")
    coordinator.submit("b", 2, priority=5)
    saved(coordinator, 2)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as c can, too"
    coordinator.advance(10.1)
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.job("a").reason == "1 workers"
    assert "c (priority 0) wrote no checkpoint within 10 s" in coordinator.job("b").reason

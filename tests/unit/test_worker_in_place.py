"""A worker whose loop goes on when the group changes, as its machine sees it."""

from __future__ import annotations

from elastic.core.events.worker import (
    FormGroup,
    LoopStateChanged,
    SendPipe,
    TrainLeft,
    WorkerEffect,
)
from elastic.core.facts import WorkerPhase
from elastic.core.messages import WorkerUpdate
from tests.unit.worker_under_test import announce, assignment, training


def said(effects: list[WorkerEffect]) -> list[bool]:
    """Return what each update says of the loop."""
    updates = [effect.message for effect in effects if isinstance(effect, SendPipe)]
    return [update.report.in_place for update in updates if isinstance(update, WorkerUpdate)]


def test_a_loop_that_goes_on_in_place_is_told_once_and_stays_known() -> None:
    worker = training(1)
    assert said(worker.event(LoopStateChanged(inside=True))) == [True]
    assert worker.event(LoopStateChanged(inside=True)) == []
    assert said(worker.event(LoopStateChanged(inside=False))) == [False]


def test_a_script_begins_once_in_a_process_unless_its_loop_goes_on_there() -> None:
    spent, keeps = training(), training()
    assert spent.report.spent
    keeps.event(LoopStateChanged(inside=True))
    keeps.event(LoopStateChanged(inside=False))
    assert not keeps.report.spent
    for worker in (spent, keeps):
        worker.told(announce(2))
    left = TrainLeft(1, at_boundary=False)
    assert FormGroup(assignment(2)) in keeps.event(left)
    assert not [effect for effect in spent.event(left) if isinstance(effect, FormGroup)]
    assert spent.report.phase is WorkerPhase.READY

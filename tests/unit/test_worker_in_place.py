"""A worker whose loop goes on when the group changes, as its machine sees it."""

from __future__ import annotations

from elastic.core.events.worker import LoopMoved, SendPipe, WorkerEffect
from elastic.core.messages import WorkerUpdate
from tests.unit.worker_under_test import training


def said(effects: list[WorkerEffect]) -> list[bool]:
    """Return what each update says of the loop."""
    updates = [effect.message for effect in effects if isinstance(effect, SendPipe)]
    return [update.report.in_place for update in updates if isinstance(update, WorkerUpdate)]


def test_a_loop_that_goes_on_in_place_is_told_once_and_stays_known() -> None:
    worker = training(1)
    assert said(worker.event(LoopMoved(inside=True))) == [True]
    assert worker.event(LoopMoved(inside=True)) == []
    assert said(worker.event(LoopMoved(inside=False))) == [False]

"""What a worker's loop says of itself: told once, kept over groups."""

from __future__ import annotations

from elastic.core.events.worker import CopiesWanted, LoopMoved, StepsCut
from elastic.core.machine.worker_loop import Loop


def test_the_fewest_micro_batches_of_any_loader_bound_the_group() -> None:
    loop = Loop().told(LoopMoved(True)).told(StepsCut(8)).told(StepsCut(4)).told(StepsCut(8))
    assert loop == Loop(in_place=True, keeps=True, micro_batches=4)


def test_what_one_event_says_changes_nothing_else() -> None:
    few, many = CopiesWanted(5), CopiesWanted(2)
    loop = Loop(in_place=True, copies=few, micro_batches=4)
    assert loop.told(many) == Loop(in_place=True, copies=many, micro_batches=4)
    assert loop.told(LoopMoved(False)) == Loop(keeps=True, copies=few, micro_batches=4)

"""What a worker's loop says of itself: told once, kept over groups."""

from __future__ import annotations

from elastic.core.events.worker import CopiesRequested, LoopStateChanged, MicroBatchesDeclared
from elastic.core.machine.worker_parts import LoopState


def test_the_fewest_micro_batches_of_any_loader_bound_the_group() -> None:
    loop = (
        LoopState()
        .after(LoopStateChanged(True))
        .after(MicroBatchesDeclared(8))
        .after(MicroBatchesDeclared(4))
        .after(MicroBatchesDeclared(8))
    )
    assert loop == LoopState(in_place=True, keeps=True, micro_batches=4)


def test_what_one_event_says_changes_nothing_else() -> None:
    few, many = CopiesRequested(5), CopiesRequested(2)
    loop = LoopState(in_place=True, copies=few, micro_batches=4)
    assert loop.after(many) == LoopState(in_place=True, copies=many, micro_batches=4)
    assert loop.after(LoopStateChanged(False)) == LoopState(keeps=True, copies=few, micro_batches=4)

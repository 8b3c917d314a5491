"""The worker's machine, flow by flow: what the control thread does when something comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.events.shared import Tick
from elastic.core.events.worker import (
    WishBoundary,
)
from elastic.errors import InvariantViolation
from tests.unit.worker_under_test import (
    EVERYWHERE,
    finished,
    leave,
    training,
)

# ---------------------------------------------------------------- leaving a group


def test_a_boundary_at_which_the_job_rests_is_wished_for_again_and_saved_at() -> None:
    worker = training(1)
    rests = replace(leave(1, at_boundary=True), saves=True)
    assert worker.told(leave(1, at_boundary=True)) == [WishBoundary(1, "why")]
    assert worker.told(rests) == [WishBoundary(1, "why", saves=True)]
    assert worker.told(rests) == []
    assert worker.told(leave(1, at_boundary=True)) == [WishBoundary(1, "why")], "called off"
    assert worker.told(leave(1, at_boundary=True)) == []
    worker.told(leave(1, at_boundary=False))
    assert worker.told(rests) == [], "it is over"


# ---------------------------------------------------------------- the end


@EVERYWHERE
def test_time_alone_changes_nothing(make: Any) -> None:
    worker = make()
    assert worker.event(Tick()) == []
    # One that trains is looked at again and again; one that has finished lets go of its group.
    timed = (training, finished)
    assert (worker.machine.next_deadline_ns() is None) == (make not in timed)


# ---------------------------------------------------------------- what is stale or illegal


def test_time_that_falls_is_a_bug_and_tells_the_story() -> None:
    worker = training(1)
    with pytest.raises(InvariantViolation, match="time fell") as caught:
        worker.machine.step(Tick(), 0)
    assert any("GroupFormed(generation=1)" in line for line in caught.value.story)

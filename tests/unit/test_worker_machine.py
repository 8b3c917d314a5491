"""The worker's machine, flow by flow: what the control thread does when something comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.config import NS_PER_S
from elastic.core.events.shared import Tick
from elastic.core.events.worker import (
    AbortGroup,
    ActivitySampled,
    ExitWorker,
    GroupFormed,
    InterruptTrain,
    LoopStateChanged,
    OrderReceived,
    RequestLeave,
    SignalScript,
    TrainLeft,
    TrainRaised,
)
from elastic.core.facts import Failure, LeavingNode, NodeId
from elastic.core.machine.worker import END_NS
from elastic.core.messages import Preemption, Stop
from elastic.errors import InvariantViolation
from tests.unit.worker_under_test import (
    EVERYWHERE,
    ME,
    announce,
    finished,
    leave,
    training,
)

# ---------------------------------------------------------------- leaving a group


def test_a_boundary_at_which_the_job_rests_is_wished_for_again_and_saved_at() -> None:
    worker = training(1)
    rests = replace(leave(1, at_boundary=True), saves=True)
    assert worker.told(leave(1, at_boundary=True)) == [RequestLeave(1, "why")]
    assert worker.told(rests) == [RequestLeave(1, "why", saves=True)]
    assert worker.told(rests) == []
    assert worker.told(leave(1, at_boundary=True)) == [RequestLeave(1, "why")], "called off"
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


def asked(grace_s: int = 30) -> OrderReceived:
    """The order to end, told to a script that has a handler of its own for SIGTERM."""
    return OrderReceived(Stop("job stopped", grace_s * NS_PER_S, asks=True), is_handled=True)


def exits_with(code: int, generation: int = 1) -> TrainRaised:
    failure = Failure("SystemExit", str(code))
    return TrainRaised(generation, failure, group_broken=False, exit_code=code)


def test_a_script_with_a_handler_is_asked_to_end_and_ends_by_itself() -> None:
    worker = training(1)
    assert worker.event(asked()) == [SignalScript("job stopped")]
    assert worker.event(asked()) == []
    assert worker.event(exits_with(143)) == [ExitWorker(0, "job stopped")]
    assert worker.report.failure is None


def test_a_later_order_that_asks_nobody_ends_the_script_at_once() -> None:
    worker = training(1)
    worker.event(asked())
    hurry = OrderReceived(Stop("at once", NS_PER_S), is_handled=True)
    assert worker.event(hurry) == [InterruptTrain(1, "at once", final=True), AbortGroup(1)]


def test_a_script_without_a_handler_leaves_at_once_and_its_process_ends_in_any_case() -> None:
    worker = training(1)
    told = worker.event(replace(asked(), is_handled=False))
    assert told == [InterruptTrain(1, "job stopped", final=True), AbortGroup(1)]
    worker.now_ns += END_NS
    (end,) = worker.event(ActivitySampled(1, 0))
    assert isinstance(end, ExitWorker)


@pytest.mark.parametrize(
    ("rank", "in_place", "code", "is_asked", "is_free"),
    [(0, 0, 1, 1, 1), (0, 1, 1, 0, 0), (1, 0, 143, 0, 1), (1, 0, 1, 0, 0)],
)
def test_a_script_whose_node_leaves_is_asked_once_and_is_no_failure(
    rank: int, in_place: bool, code: int, is_asked: bool, is_free: bool
) -> None:
    worker = training(1)
    if in_place:
        worker.event(LoopStateChanged(inside=True))
    nodes = (LeavingNode(NodeId("n"), (rank,)),)
    told = OrderReceived(Preemption(ME, 1, 30 * NS_PER_S, "spot", nodes), is_handled=True)
    assert (SignalScript("spot") in worker.event(told)) == is_asked
    assert SignalScript("spot") not in worker.event(told)
    worker.event(exits_with(code))
    assert (worker.report.failure is None) == is_free


def test_a_node_that_has_left_excuses_no_exit_in_the_next_group() -> None:
    worker = training(1)
    worker.event(LoopStateChanged(inside=True))
    worker.told(Preemption(ME, 1, 30 * NS_PER_S, "spot", (LeavingNode(NodeId("n"), (1,)),)))
    worker.told(announce(2))
    worker.event(TrainLeft(1, at_boundary=False))
    worker.event(GroupFormed(2))
    worker.event(exits_with(143, generation=2))
    assert worker.report.failure is not None


# ---------------------------------------------------------------- what is stale or illegal


def test_time_that_falls_is_a_bug_and_tells_the_story() -> None:
    worker = training(1)
    with pytest.raises(InvariantViolation, match="time fell") as caught:
        worker.machine.step(Tick(), 0)
    assert any("GroupFormed(generation=1)" in line for line in caught.value.story)

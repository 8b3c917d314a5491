"""What a control thread sees of its main thread, and what the worker's machine says of it."""

from __future__ import annotations

import pytest

from elastic.core.config import ns
from elastic.core.events.worker import GroupFormed, Looked, SendPipe, TrainReturned
from elastic.core.messages import Pulse
from elastic.worker.activity import Activity, Flow
from tests.unit.worker_under_test import ME, Worker, announce, finished, forming, ready, training


def look(worker: Worker, seen: Looked, after_s: float = 0.1) -> list[Pulse]:
    """Look at the main thread after some time; return what is said of it."""
    worker.now_ns += ns(after_s)
    effects = worker.event(seen)
    return [e.message for e in effects if isinstance(e, SendPipe) and isinstance(e.message, Pulse)]


def test_a_wait_is_seen_while_it_lasts_and_its_end_is_a_movement() -> None:
    activity = Activity()
    assert activity.waiting_ns(5) == 0
    with activity.waiting():
        since_ns = activity.waiting_since_ns
        assert activity.waiting_ns(since_ns) == 1
        assert activity.waiting_ns(since_ns + 300) == 300
        before = activity.beats
    assert (activity.waiting_ns(since_ns + 300), activity.beats) == (0, before + 1)


def test_a_wait_that_fails_is_over_too() -> None:
    activity = Activity()
    with pytest.raises(RuntimeError), activity.waiting():
        raise RuntimeError("connection closed by peer")
    assert (activity.waiting_since_ns, activity.beats) == (0, 1)


def test_who_waits_for_what_still_comes_waits_from_the_last_of_it() -> None:
    came = [0]
    flow = Flow(lambda: came[0])
    assert flow.waiting_ns(0, ns(100)) == 0
    assert flow.waiting_ns(ns(4.9), ns(104.9)) == ns(4.9)
    assert flow.waiting_ns(ns(6), ns(106)) == ns(6)
    came[0] = 10
    assert flow.waiting_ns(ns(7), ns(107)) == 1
    assert flow.waiting_ns(ns(9), ns(109)) == ns(2)
    # The next wait is another one.
    assert flow.waiting_ns(0, ns(110)) == 0
    assert flow.waiting_ns(ns(8), ns(120)) == ns(8)


def test_a_step_is_a_movement_and_a_new_call_is_unseen() -> None:
    activity = Activity()
    activity.at(2, 30)
    assert (activity.beats, activity.epoch, activity.step) == (1, 2, 30)
    activity.reset()
    assert (activity.beats, activity.epoch, activity.step) == (0, 0, 0)


def test_a_worker_that_trains_is_looked_at_ten_times_a_second() -> None:
    worker = training()
    due_ns = worker.machine.next_deadline_ns()
    assert due_ns is not None
    assert due_ns - worker.now_ns == ns(0.1)
    assert look(worker, Looked(1)) == []
    due_ns = worker.machine.next_deadline_ns()
    assert due_ns is not None
    assert due_ns - worker.now_ns == ns(0.1)


def test_a_worker_says_that_it_waits_where_it_is() -> None:
    worker = training(3)
    assert look(worker, Looked(7, ns(0.3), epoch=1, step=20)) == [
        Pulse(ME, 3, ns(0.3), 0, epoch=1, step=20)
    ]


def test_what_was_said_in_one_generation_does_not_count_in_the_next() -> None:
    worker = training(1)
    assert len(look(worker, Looked(7, ns(0.3)))) == 1
    worker.event(TrainReturned(1, "0"))
    assert worker.machine.next_deadline_ns() is None
    worker.told(announce(2))
    worker.event(GroupFormed(2))
    assert look(worker, Looked(8)) == []


@pytest.mark.parametrize("make", [ready, forming, finished])
def test_looks_at_a_worker_that_does_not_train_mean_nothing(make: object) -> None:
    worker = make()  # type: ignore[operator]
    assert worker.event(Looked(7, ns(60))) == []

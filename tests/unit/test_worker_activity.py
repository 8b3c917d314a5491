"""What a control thread sees of its main thread, and what the worker's machine says of it."""

from __future__ import annotations

from elastic.core.config import ns
from elastic.worker.base.activity import Activity, PeerTraffic


def test_a_wait_is_seen_while_it_lasts_and_its_end_is_a_movement() -> None:
    activity = Activity()
    assert activity.waiting_ns(5) == 0
    with activity.waiting():
        since_ns = activity.waiting_since_ns
        assert activity.waiting_ns(since_ns) == 1
        assert activity.waiting_ns(since_ns + 300) == 300
        before = activity.beats
    assert (activity.waiting_ns(since_ns + 300), activity.beats) == (0, before + 1)


def test_who_waits_for_what_still_comes_waits_from_the_last_of_it() -> None:
    came = [0]
    flow = PeerTraffic(lambda: came[0])
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

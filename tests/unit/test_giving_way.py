"""A job on its way out for another one, and what may come between: users, losses, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.machine.announcing import SAVES_SINCE_MINOR
from elastic.core.messages import LeaveGroup, SaveState, StartWorker, StopWorker
from elastic.core.world import FIRST_AUTOMATIC, JobId, JobPhase, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running

AT_ONCE = replace(CONFIG, preemption_min_run_s=0, preemption_deadline_s=10)
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
    index = FIRST_AUTOMATIC + number
    coordinator.reports(worker, index, checkpoint=f"/runs/a/auto-{number}", request=number)


def gone(coordinator: Coordinator, *workers: str) -> None:
    for worker in workers:
        coordinator.exits(worker, STOPPED)


@pytest.mark.parametrize("old", ["n1", "n3"])
def test_where_one_member_cannot_save_where_it_leaves_nobody_does(old: str) -> None:
    """Those who did would wait for a part that it never writes."""
    coordinator = asked()
    coordinator.disconnect(old)
    coordinator.agent(old, protocol_minor=SAVES_SINCE_MINOR - 1)
    saved(coordinator)
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False] * 3
    coordinator.disconnect("n2")
    coordinator.agent("n2")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [False], "said again"


def test_it_is_saved_then_asked_then_ended_and_nothing_is_charged() -> None:
    coordinator = asked()
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    saved(coordinator)
    assert {m.worker_id for m in coordinator.sent(LeaveGroup)} == {"n1/1", "n2/1", "n3/1"}
    assert all(m.at_boundary and m.saves for m in coordinator.sent(LeaveGroup))
    coordinator.disconnect("n1")
    coordinator.agent("n1")
    assert [m.saves for m in coordinator.sent(LeaveGroup)] == [True], "said again"
    coordinator.ready("n1/1", "n2/1", "n3/1")
    record = coordinator.job("a").record
    assert (record.phase, record.preempted_by) == (JobPhase.PENDING, TO_B)
    assert coordinator.store[record.spec.job_id].preempted_by == TO_B
    gone(coordinator, "n1/1", "n2/1", "n3/1")
    assert [m.spec.job_id for m in coordinator.sent(StartWorker)] == []
    record = coordinator.job("a").record
    assert (record.failures, record.losses, record.preemptions) == (0, 0, 0)
    assert coordinator.job("b").workers


def test_a_user_who_pauses_it_meanwhile_has_it_paused_and_it_waits_when_it_is_resumed() -> None:
    for is_asked in (False, True):
        coordinator = asked()
        if is_asked:
            saved(coordinator)
        coordinator.pause("a")
        assert coordinator.job("a").reason == "pauses as soon as a checkpoint is written"
        coordinator.ready("n1/1", "n2/1", "n3/1")  # They were asked, or come for another reason.
        trains(coordinator, "n1/1", "n2/1", "n3/1")
        saved(coordinator, 2)
        coordinator.ready("n1/1", "n2/1", "n3/1")
        assert coordinator.job("a").record.phase is JobPhase.PAUSED
        gone(coordinator, "n1/1", "n2/1", "n3/1")
        coordinator.resume("a")
        record = coordinator.job("a").record
        assert (record.phase, record.preempted_by) == (JobPhase.PENDING, "")
        assert "b (priority 5) keeps 1" in coordinator.job("a").reason


def test_a_member_that_is_lost_before_the_checkpoint_is_replaced_if_the_others_are_enough() -> None:
    coordinator = running(nodes=3, low=2, run_path="/runs/a", config=AT_ONCE)
    trains(coordinator, "n1/1", "n2/1", "n3/1")
    coordinator.submit("b", 2, priority=5)
    assert coordinator.job("a").reason.startswith("gives way")
    coordinator.exits("n3/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    trains(coordinator, "n1/1", "n2/1")
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    saved(coordinator)
    coordinator.ready("n1/1", "n2/1")
    assert coordinator.job("a").record.preempted_by == TO_B


def test_each_life_of_the_coordinator_comes_to_the_same_end() -> None:
    for lives in ("wished", "saved", "left", "ended"):
        coordinator = asked()
        number = 1
        for stage in ("wished", "saved", "left", "ended"):
            if stage == "saved":
                saved(coordinator, number)
            elif stage == "left":
                coordinator.ready("n1/1", "n2/1", "n3/1")
            elif stage == "ended":
                gone(coordinator, "n1/1", "n2/1", "n3/1")
            if stage == lives:
                coordinator.restart()
                for name in ("n1", "n2", "n3"):
                    coordinator.agent(name)
                coordinator.advance(5)
                if stage == "saved":
                    assert "at the next boundary" in coordinator.job("a").reason
                number = 1_000_001
        coordinator.advance(10)
        assert coordinator.job("a").record.phase is JobPhase.PENDING, lives
        assert coordinator.job("b").workers, lives
        assert not coordinator.job("a").workers, lives


def test_it_is_cut_off_in_the_end_but_never_without_anything_to_go_on_from() -> None:
    coordinator = asked()
    saved(coordinator)
    coordinator.advance(9.9)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    coordinator.advance(0.2)
    record = coordinator.job("a").record
    assert (record.phase, record.preempted_by) == (JobPhase.PENDING, TO_B)
    assert {m.worker_id for m in coordinator.sent(StopWorker)} == {"n1/1", "n2/1", "n3/1"}


def test_one_that_cannot_be_saved_trains_on_and_is_asked_again_later() -> None:
    coordinator = asked()
    coordinator.advance(9.9)
    assert "as soon as a checkpoint is written" in coordinator.job("a").reason
    coordinator.advance(0.2)
    assert coordinator.noted("gives_way_in_vain") == [{"to": TO_B}]
    assert coordinator.job("a").reason == "3 workers"
    assert coordinator.job("b").reason.endswith(
        "; a (priority 0) wrote no checkpoint within 10 s and has none to go on from: it is asked "
        "again after 900 s, or once it has one"
    )
    assert not coordinator.sent(LeaveGroup)
    coordinator.advance(899)
    assert not coordinator.sent(SaveState)
    coordinator.advance(1.2)
    assert [m.request for m in coordinator.sent(SaveState)] == [2, 2, 2], "a new wish"
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    coordinator.advance(10)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING


def test_a_first_checkpoint_that_comes_late_lets_it_give_way_at_once() -> None:
    coordinator = asked()
    coordinator.advance(11)
    assert coordinator.job("a").reason == "3 workers"
    saved(coordinator, 1)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    coordinator.advance(10.1)  # The next one does not come; but there is one.
    assert coordinator.job("a").reason == f"gives way to {TO_B} at the next boundary"


def test_another_one_gives_way_instead_of_one_that_cannot_be_saved() -> None:
    coordinator = pair()
    coordinator.submit("b", priority=5)
    assert coordinator.job("c").reason.startswith(f"gives way to {TO_B}"), "the youngest"
    assert coordinator.job("a").reason == "1 workers"
    coordinator.advance(10.1)
    assert coordinator.job("c").reason == "1 workers"
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    saved(coordinator, 2)
    coordinator.ready("n1/1")
    assert coordinator.job("a").record.preempted_by == TO_B
    assert coordinator.job("c").record.phase is JobPhase.RUNNING


def test_nobody_leaves_before_all_can_that_are_to_make_room() -> None:
    coordinator = pair()
    coordinator.submit("b", 2, priority=5)
    saved(coordinator, 1)
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as c can, too"
    saved(coordinator, 2, worker="n2/1")
    assert {m.worker_id for m in coordinator.sent(LeaveGroup)} == {"n1/1", "n2/1"}


def test_nobody_leaves_if_the_other_one_cannot_be_saved() -> None:
    coordinator = pair()
    coordinator.submit("b", 2, priority=5)
    saved(coordinator, 1)
    coordinator.advance(10.1)
    assert not coordinator.sent(LeaveGroup)
    assert coordinator.job("a").reason == coordinator.job("c").reason == "1 workers"
    assert "c (priority 0) wrote no checkpoint within 10 s" in coordinator.job("b").reason


def test_storage_that_is_away_is_waited_for_once_if_there_is_an_older_checkpoint() -> None:
    coordinator = running(nodes=3, low=3, run_path="/runs/a", config=AT_ONCE)
    trains(coordinator, "n1/1", "n2/1", "n3/1")
    saved(coordinator, 0)
    coordinator.submit("b", priority=5)
    assert coordinator.sent(SaveState)
    coordinator.advance(9.9)
    assert not coordinator.sent(LeaveGroup)
    coordinator.advance(0.2)
    assert coordinator.job("a").reason == f"gives way to {TO_B} at the next boundary"
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert coordinator.job("a").record.preempted_by == TO_B


def test_code_without_a_loop_stays_until_it_has_reported_a_checkpoint() -> None:
    coordinator = asked(in_place=False)
    assert "has no checkpoint to go on from yet" in coordinator.job("b").reason
    coordinator.reports("n1/1", 0, checkpoint="/runs/a/checkpoint_0")
    assert coordinator.job("a").reason == f"gives way to {TO_B} at the next boundary"
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert coordinator.job("a").record.preempted_by == TO_B


def test_a_lower_min_lets_it_stay() -> None:
    coordinator = asked()
    saved(coordinator)
    coordinator.scale("a", 2)
    assert coordinator.noted("gives_way_no_more") == [{"to": TO_B}]
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    gone(coordinator, "n3/1")
    assert coordinator.job("b").workers


def test_a_node_that_drains_meanwhile_takes_nothing_more() -> None:
    coordinator = asked()
    coordinator.drain("n1", 30)
    saved(coordinator, 2)
    coordinator.ready("n1/1", "n2/1", "n3/1")
    gone(coordinator, "n1/1", "n2/1", "n3/1")
    record = coordinator.job("a").record
    assert (record.phase, record.preempted_by) == (JobPhase.PENDING, TO_B)
    assert [w.node_id for w in coordinator.job("b").workers] in (["n2"], ["n3"])


def test_a_job_that_is_about_to_finish_is_let_finish() -> None:
    coordinator = asked()
    coordinator.finished("n1/1")
    assert coordinator.noted("gives_way_no_more") == [{"to": TO_B}]
    coordinator.finished("n2/1")
    coordinator.finished("n3/1")
    assert coordinator.store[JobId("a")].phase is JobPhase.SUCCEEDED


def test_a_pause_that_storage_holds_up_keeps_nobody_waiting_who_can_have_other_slots() -> None:
    coordinator = pair()
    coordinator.pause("c")
    coordinator.submit("b", priority=5)
    assert "as workers that are told to end do so" in coordinator.job("b").reason
    assert not coordinator.noted("gives_way"), "its slot comes free by itself"
    coordinator.advance(10.1)
    assert coordinator.job("c").reason == "pauses as soon as a checkpoint is written"
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    saved(coordinator, 3)  # The second one was wished for the pause, again.
    coordinator.ready("n1/1")
    assert coordinator.job("a").record.preempted_by == TO_B
    saved(coordinator, 1, worker="n2/1")
    assert coordinator.job("c").reason == "pauses at the next boundary"
    coordinator.ready("n2/1")
    assert coordinator.job("c").record.phase is JobPhase.PAUSED


def test_a_pause_wishes_again_for_what_storage_did_not_take() -> None:
    coordinator = pair()
    coordinator.pause("c")
    assert [m.request for m in coordinator.sent(SaveState)] == [1]
    coordinator.advance(10.1)
    assert [m.request for m in coordinator.sent(SaveState)] == [2]
    coordinator.advance(1801)
    assert [m.request for m in coordinator.sent(SaveState)] == [3, 4]
    saved(coordinator, 1, worker="n2/1")  # The first one, late: it is of a state after the wish.
    assert coordinator.job("c").reason == "pauses at the next boundary"


def test_a_pause_that_takes_long_ends_with_an_older_checkpoint_for_an_urgent_job() -> None:
    coordinator = pair()
    saved(coordinator, 0, worker="n2/1")
    coordinator.pause("c")
    coordinator.advance(100)
    assert coordinator.job("c").reason == "pauses as soon as a checkpoint is written"
    coordinator.submit("b", priority=5)
    assert coordinator.job("c").reason == "pauses at the next boundary"
    assert coordinator.job("a").reason == "1 workers"
    coordinator.ready("n2/1")
    assert coordinator.job("c").record.phase is JobPhase.PAUSED


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


def test_who_waits_for_a_pause_leaves_without_it_once_that_is_late() -> None:
    here = {"label_selector": (("zone", "x"),)}
    coordinator = Coordinator(AT_ONCE)
    coordinator.agent("n1", labels=(("zone", "x"),))
    coordinator.submit("a", run_path="/runs/a", **here)
    coordinator.ready("n1/1")
    trains(coordinator, "n1/1")
    coordinator.agent("n2")
    coordinator.submit("p", run_path="/runs/p")
    coordinator.ready("n2/1")
    trains(coordinator, "n2/1")
    coordinator.advance(0.1)
    coordinator.pause("p")
    coordinator.submit("b", priority=5, **here)
    saved(coordinator, 2, worker="n1/1")
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as p can, too"
    coordinator.advance(10.2)
    assert coordinator.job("a").reason == f"gives way to {TO_B} at the next boundary"


def test_a_worker_that_replaces_one_given_back_is_not_one_too_many() -> None:
    coordinator = Coordinator(AT_ONCE)
    coordinator.agent("n1", labels=(("zone", "x"),))
    coordinator.submit("a", run_path="/runs/a")
    coordinator.ready("n1/1")
    trains(coordinator, "n1/1")
    coordinator.advance(0.1)
    saved(coordinator, 0)
    coordinator.agent("n2")
    coordinator.submit("b", priority=5, label_selector=(("zone", "x"),))
    assert "n2/1" in {str(worker_id) for worker_id in coordinator.agents["n2"].workers}
    assert not coordinator.sent(StopWorker)
    coordinator.ready("n2/1")
    assert not coordinator.sent(StopWorker)


def test_a_pause_that_cannot_even_begin_keeps_nobody_waiting_who_can_have_other_slots() -> None:
    """One member has returned, and the leader evaluates for hours."""
    coordinator = Coordinator(AT_ONCE)
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name)
    coordinator.submit("c", 2, run_path="/runs/c")
    coordinator.ready("n1/1", "n2/1")
    trains(coordinator, "n1/1", "n2/1")
    coordinator.submit("a", run_path="/runs/a")
    coordinator.ready("n3/1")
    trains(coordinator, "n3/1")
    coordinator.advance(0.1)
    coordinator.finished("n2/1")
    coordinator.pause("c")
    coordinator.submit("b", priority=5)
    assert not coordinator.noted("gives_way"), "the slots of a pause come free by themselves"
    coordinator.advance(10.2)
    assert coordinator.job("a").reason == f"gives way to {TO_B} as soon as a checkpoint is written"
    coordinator.finished("n1/1")
    assert coordinator.store[JobId("c")].phase is JobPhase.SUCCEEDED


def test_a_pause_that_can_begin_late_has_its_time_for_a_checkpoint() -> None:
    coordinator = Coordinator(AT_ONCE)
    coordinator.agent("n1")
    coordinator.submit("c", run_path="/runs/c")
    coordinator.ready("n1/1")
    coordinator.pause("c")
    coordinator.submit("b", priority=5)
    coordinator.advance(15)  # It comes to train late, and another job waits for its slot.
    trains(coordinator, "n1/1")
    coordinator.advance(0.1)
    assert coordinator.sent(SaveState) or coordinator.noted("checkpoint_wished")
    assert coordinator.job("c").reason == "pauses as soon as a checkpoint is written"
    assert not coordinator.noted("gives_way_in_vain")


def test_how_often_a_pause_was_tried_does_not_spare_the_job_once_it_goes_on() -> None:
    coordinator = pair()
    coordinator.pause("c")
    coordinator.advance(10.1)  # It was wished for again.
    coordinator.resume("c")
    coordinator.submit("b", priority=5)
    assert coordinator.job("c").reason.startswith(f"gives way to {TO_B}"), "the youngest"
    assert coordinator.job("a").reason == "1 workers"


def test_a_pause_is_tried_again_also_of_a_job_that_was_passed_over_before() -> None:
    coordinator = pair()
    coordinator.submit("b", 2, priority=5)
    coordinator.advance(10.1)
    assert len(coordinator.noted("gives_way_in_vain")) == 2
    coordinator.pause("c")
    assert [m.request for m in coordinator.sent(SaveState)] == [3]
    coordinator.advance(10.1)
    assert [m.request for m in coordinator.sent(SaveState)] == [4]

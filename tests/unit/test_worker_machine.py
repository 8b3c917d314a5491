"""The worker's machine, flow by flow: what the control thread does when something comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.events.shared import Tick
from elastic.core.events.worker import (
    AbortGroup,
    AgentTold,
    EnterTrain,
    ExitWorker,
    FormGroup,
    GroupFailed,
    GroupFormed,
    InterruptTrain,
    PipeClosed,
    ResolveReport,
    SendPipe,
    Setup,
    SetupFailed,
    Started,
    StoreOpened,
    TrainLeft,
    TrainRaised,
    TrainReturned,
    UserReported,
    WishBoundary,
    WorkerEvent,
)
from elastic.core.messages import (
    Announce,
    Assign,
    Ping,
    Pong,
    ReportAck,
    Reported,
    Stop,
    Warm,
    WorkerUpdate,
)
from elastic.core.world import (
    Failure,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.errors import InvariantViolation
from tests.unit.worker_under_test import (
    ASSIGN,
    BOOM,
    EVERYWHERE,
    JOB,
    ME,
    PEER_GONE,
    SPEC,
    Worker,
    announce,
    assignment,
    broken,
    finished,
    forming,
    kinds,
    leave,
    ready,
    setting_up,
    spare,
    training,
)

# ---------------------------------------------------------------- from spare to training


def test_a_started_process_says_that_it_is_warm() -> None:
    assert Worker().event(Started(77)) == [SendPipe(Warm(77))]


def test_an_assigned_spare_sets_up_and_is_starting() -> None:
    worker = spare()
    effects = worker.told(ASSIGN)
    assert kinds(effects) == [WorkerUpdate, Setup]
    assert worker.report == WorkerReport(ME, JOB, WorkerPhase.STARTING, pid=77)


def test_an_open_store_makes_it_ready_and_announces_the_address() -> None:
    worker = setting_up()
    assert kinds(worker.event(StoreOpened("10.0.0.1:5000"))) == [WorkerUpdate]
    assert worker.stands() == (WorkerPhase.READY, 0)
    assert worker.report.store_address == "10.0.0.1:5000"


def test_an_announced_group_is_formed_and_then_trained_in() -> None:
    worker = ready()
    effects = worker.told(announce(1))
    assert kinds(effects) == [WorkerUpdate, FormGroup]
    assert worker.stands() == (WorkerPhase.FORMING, 1)
    effects = worker.event(GroupFormed(1))
    assert kinds(effects) == [WorkerUpdate, EnterTrain]
    assert effects[-1] == EnterTrain(assignment(1))
    assert worker.stands() == (WorkerPhase.TRAINING, 1)


def test_a_returned_train_function_is_finished_with_its_result() -> None:
    worker = training()
    assert kinds(worker.event(TrainReturned(1, "[1]"))) == [WorkerUpdate]
    assert (worker.report.phase, worker.report.result) == (WorkerPhase.FINISHED, "[1]")


def test_a_failed_setup_is_reported_and_ends_the_process() -> None:
    worker = setting_up()
    effects = worker.event(SetupFailed(BOOM))
    assert kinds(effects) == [WorkerUpdate, ExitWorker]
    assert worker.report.failure == BOOM
    assert effects[-1] == ExitWorker(1, "ValueError: boom")


# ---------------------------------------------------------------- announcements


def test_an_announcement_during_setup_is_joined_when_the_store_is_open() -> None:
    worker = setting_up()
    assert worker.told(announce(1)) == []
    assert worker.told(announce(2)) == []
    effects = worker.event(StoreOpened("h:1"))
    assert kinds(effects) == [WorkerUpdate, WorkerUpdate, FormGroup]
    assert [report.phase for report in worker.reports[-2:]] == [
        WorkerPhase.READY,
        WorkerPhase.FORMING,
    ]
    assert effects[-1] == FormGroup(assignment(2))


@pytest.mark.parametrize("generation", [1, 2, 3])
@pytest.mark.parametrize("make", [forming, training, broken, finished], ids=lambda m: m.__name__)
def test_an_announcement_that_is_not_newer_is_ignored(make: Any, generation: int) -> None:
    assert make(3).told(announce(generation)) == []


def test_an_announcement_for_another_worker_is_ignored() -> None:
    assert ready().told(Announce(assignment(1, WorkerId("a/2")))) == []


@pytest.mark.parametrize("answer", ["failed", "formed"])
def test_a_newer_announcement_while_forming_aborts_and_forms_the_newest(answer: str) -> None:
    worker = forming(1)
    assert worker.told(announce(2)) == [AbortGroup(1)]
    assert worker.told(announce(3)) == [], "it is aborted already"
    event = GroupFailed(1, "aborted") if answer == "failed" else GroupFormed(1)
    effects = worker.event(event)
    dropped = [AbortGroup(1)] if answer == "formed" else []
    assert effects[: len(dropped)] == dropped
    assert effects[-1] == FormGroup(assignment(3))
    assert worker.stands() == (WorkerPhase.FORMING, 3)


@pytest.mark.parametrize(
    "answer",
    [
        TrainLeft(1, at_boundary=False),
        TrainLeft(1, at_boundary=True),
        TrainReturned(1, "7"),
        TrainRaised(1, PEER_GONE, group_broken=True),
        TrainRaised(1, BOOM, group_broken=False),
        TrainRaised(1, BOOM, group_broken=False, exit_code=3),
        TrainRaised(1, BOOM, group_broken=False, exit_code=0),
    ],
    ids=["left", "left at boundary", "returned", "broken", "raised", "exit 3", "exit 0"],
)
def test_a_newer_announcement_while_training_interrupts_and_forms_the_newest(
    answer: WorkerEvent,
) -> None:
    worker = training(1)
    effects = worker.told(announce(2))
    assert kinds(effects) == [InterruptTrain, AbortGroup]
    assert worker.stands() == (WorkerPhase.TRAINING, 1), "the main thread has not left yet"
    assert worker.told(announce(3)) == []
    effects = worker.event(answer)
    assert kinds(effects) == [WorkerUpdate, FormGroup]
    assert effects[-1] == FormGroup(assignment(3))
    assert worker.report.failure is None


def test_an_error_that_the_abort_may_have_caused_is_no_failure_but_its_text_is_kept() -> None:
    worker = training(1)
    worker.told(announce(2))
    worker.event(TrainRaised(1, BOOM, group_broken=False))
    fields = dict(worker.notes[-1].fields)
    assert worker.notes[-1].name == "train_error_ignored"
    assert (fields["error"], fields["message"]) == ("ValueError", "boom")
    assert fields["traceback"] == BOOM.traceback


@pytest.mark.parametrize("make", [broken, finished], ids=lambda make: make.__name__)
def test_a_worker_that_waits_joins_the_next_group_at_once(make: Any) -> None:
    worker = make(1)
    effects = worker.told(announce(2))
    assert kinds(effects) == [WorkerUpdate, FormGroup]
    assert worker.report.result == "", "what it returned belongs to the group before"


def test_a_group_that_fails_to_form_leaves_it_broken() -> None:
    worker = forming(1)
    assert kinds(worker.event(GroupFailed(1, "timeout"))) == [WorkerUpdate]
    assert worker.stands() == (WorkerPhase.BROKEN, 1)
    assert dict(worker.notes[-1].fields)["detail"] == "timeout"


def test_a_group_that_breaks_while_training_leaves_it_broken_without_a_failure() -> None:
    worker = training(1)
    assert kinds(worker.event(TrainRaised(1, PEER_GONE, group_broken=True))) == [WorkerUpdate]
    assert worker.stands() == (WorkerPhase.BROKEN, 1)
    assert worker.report.failure is None


def test_a_script_that_exits_because_the_group_broke_is_broken_not_failed() -> None:
    worker = training(1)
    worker.event(TrainRaised(1, PEER_GONE, group_broken=True, exit_code=1))
    assert worker.stands() == (WorkerPhase.BROKEN, 1)


# ---------------------------------------------------------------- user code


@pytest.mark.parametrize(("exit_code", "code"), [(None, 1), (3, 3), (1, 1)])
def test_a_user_error_is_reported_and_ends_the_process(exit_code: int | None, code: int) -> None:
    worker = training(1)
    effects = worker.event(TrainRaised(1, BOOM, group_broken=False, exit_code=exit_code))
    assert kinds(effects) == [WorkerUpdate, ExitWorker]
    assert effects[-1] == ExitWorker(code, "ValueError: boom")
    assert (worker.report.phase, worker.report.failure) == (WorkerPhase.TRAINING, BOOM)


def test_a_script_that_exits_with_zero_has_finished() -> None:
    worker = training(1)
    worker.event(TrainRaised(1, Failure("SystemExit", "0"), group_broken=False, exit_code=0))
    assert (worker.report.phase, worker.report.result) == (WorkerPhase.FINISHED, "null")
    assert worker.report.failure is None


def test_reports_are_numbered_from_zero_in_every_generation() -> None:
    worker = training(1)
    sent = []
    for _ in range(2):
        sent += worker.event(UserReported(1, 4, "{}", "/ckpt"))
    worker.told(announce(2))
    worker.event(TrainLeft(1, at_boundary=False))
    worker.event(GroupFormed(2))
    sent += worker.event(UserReported(2, 0, "{}", ""))
    reports = [effect.message.report for effect in sent]
    assert [(r.generation, r.index, r.rank) for r in reports] == [(1, 0, 4), (1, 1, 4), (2, 0, 0)]
    assert all(r.worker_id == ME and r.job_id == JOB for r in reports)


def test_a_report_is_resolved_once_and_only_in_its_generation() -> None:
    worker = training(2)
    worker.event(UserReported(2, 0, "{}", "/ckpt"))
    assert worker.told(ReportAck(ME, 1, 0, True)) == []
    assert worker.told(ReportAck(ME, 2, 1, True)) == [], "there is no such report"
    assert worker.told(ReportAck(WorkerId("a/2"), 2, 0, True)) == []
    resolved = worker.told(ReportAck(ME, 2, 0, False, "stale"))
    assert resolved == [ResolveReport(2, 0, False, "stale")]
    assert worker.told(ReportAck(ME, 2, 0, True)) == []


def test_a_report_made_while_a_newer_group_waits_is_still_sent() -> None:
    worker = training(1)
    worker.told(announce(2))
    assert kinds(worker.event(UserReported(1, 0, "{}", "/ckpt"))) == [Reported]


# ---------------------------------------------------------------- leaving a group


def test_a_planned_change_wishes_for_a_boundary_once() -> None:
    worker = training(1)
    assert worker.told(leave(1, at_boundary=True)) == [WishBoundary(1, "why")]
    assert worker.told(leave(1, at_boundary=True)) == []
    worker.event(TrainLeft(1, at_boundary=True))
    assert worker.stands() == (WorkerPhase.READY, 1)


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


def test_a_boundary_agreed_on_by_the_others_makes_it_ready_too() -> None:
    worker = training(1)
    worker.event(TrainLeft(1, at_boundary=True))
    assert worker.stands() == (WorkerPhase.READY, 1)


def test_a_wish_that_comes_while_forming_is_made_when_training_begins() -> None:
    worker = forming(1)
    assert worker.told(leave(1, at_boundary=True)) == []
    effects = worker.event(GroupFormed(1))
    assert kinds(effects) == [WorkerUpdate, EnterTrain, WishBoundary]


def test_a_train_function_that_returns_before_the_boundary_has_finished() -> None:
    worker = training(1)
    worker.told(leave(1, at_boundary=True))
    worker.event(TrainReturned(1, "7"))
    assert worker.stands() == (WorkerPhase.FINISHED, 1)


def test_an_order_to_leave_now_cuts_training_and_makes_it_ready() -> None:
    worker = training(1)
    effects = worker.told(leave(1, at_boundary=False))
    assert effects == [InterruptTrain(1, "why"), AbortGroup(1)]
    assert worker.told(leave(1, at_boundary=False)) == []
    worker.event(TrainRaised(1, BOOM, group_broken=False))
    assert worker.stands() == (WorkerPhase.READY, 1)
    assert worker.report.failure is None


def test_an_order_to_leave_now_overtakes_a_wish_for_a_boundary() -> None:
    worker = training(1)
    worker.told(leave(1, at_boundary=True))
    assert kinds(worker.told(leave(1, at_boundary=False))) == [InterruptTrain, AbortGroup]
    assert worker.told(leave(1, at_boundary=True)) == []


@pytest.mark.parametrize("answer", [GroupFormed(1), GroupFailed(1, "aborted")])
def test_an_order_to_leave_now_while_forming_makes_it_ready(answer: WorkerEvent) -> None:
    worker = forming(1)
    assert worker.told(leave(1, at_boundary=False)) == [AbortGroup(1)]
    worker.event(answer)
    assert worker.stands() == (WorkerPhase.READY, 1)


def test_a_group_left_before_it_was_begun_is_not_formed() -> None:
    worker = training(1)
    worker.told(announce(2))
    assert worker.told(leave(2, at_boundary=False)) == []
    effects = worker.event(TrainLeft(1, at_boundary=False))
    assert FormGroup not in kinds(effects)
    assert worker.stands() == (WorkerPhase.READY, 2)


def test_an_order_to_leave_a_group_not_heard_of_ends_the_one_before_it() -> None:
    worker = training(1)
    assert worker.told(leave(2, at_boundary=True)) == []
    assert kinds(worker.told(leave(2, at_boundary=False))) == [InterruptTrain, AbortGroup]
    worker.event(TrainLeft(1, at_boundary=False))
    assert worker.stands() == (WorkerPhase.READY, 1)
    assert worker.told(announce(2)) == [], "it was told to leave that one"
    assert kinds(worker.told(announce(3))) == [WorkerUpdate, FormGroup]


@pytest.mark.parametrize("at_boundary", [True, False])
def test_an_order_to_leave_an_older_group_is_ignored(at_boundary: bool) -> None:
    assert training(2).told(leave(1, at_boundary=at_boundary)) == []


@pytest.mark.parametrize("at_boundary", [True, False])
@pytest.mark.parametrize("make", [ready, broken, finished], ids=lambda make: make.__name__)
def test_an_order_to_leave_changes_nothing_for_who_is_in_no_group(
    make: Any, at_boundary: bool
) -> None:
    assert make().told(leave(1, at_boundary=at_boundary)) == []


def test_an_order_to_leave_does_not_outlive_its_group() -> None:
    worker = training(1)
    worker.told(leave(1, at_boundary=False))
    worker.event(TrainLeft(1, at_boundary=False))
    worker.told(announce(2))
    assert kinds(worker.event(GroupFormed(2))) == [WorkerUpdate, EnterTrain]


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    "make", [spare, setting_up, ready, broken, finished], ids=lambda make: make.__name__
)
def test_a_stop_ends_a_process_that_is_in_no_group_at_once(make: Any) -> None:
    assert make().told(Stop("job stopped", 5)) == [ExitWorker(0, "job stopped")]


@pytest.mark.parametrize(
    "answer",
    [TrainLeft(1, at_boundary=False), TrainRaised(1, BOOM, group_broken=False, exit_code=3)],
    ids=["left", "raised"],
)
def test_a_stop_while_training_lets_the_main_thread_leave_first(answer: WorkerEvent) -> None:
    worker = training(1)
    assert kinds(worker.told(Stop("job stopped", 5))) == [InterruptTrain, AbortGroup]
    assert worker.told(Stop("again", 5)) == []
    assert worker.event(answer) == [ExitWorker(0, "job stopped")]


@pytest.mark.parametrize("answer", [GroupFormed(1), GroupFailed(1, "aborted")])
def test_a_stop_while_forming_lets_the_main_thread_leave_first(answer: WorkerEvent) -> None:
    worker = forming(1)
    assert worker.told(Stop("job stopped", 5)) == [AbortGroup(1)]
    assert worker.event(answer)[-1] == ExitWorker(0, "job stopped")


def test_a_train_function_that_returns_during_a_stop_is_reported_first() -> None:
    worker = training(1)
    worker.told(Stop("job stopped", 5))
    assert kinds(worker.event(TrainReturned(1, "7"))) == [WorkerUpdate, ExitWorker]
    assert (worker.report.phase, worker.report.result) == (WorkerPhase.FINISHED, "7")


def test_a_stop_is_stronger_than_a_newer_group() -> None:
    worker = training(1)
    worker.told(announce(2))
    worker.told(Stop("job stopped", 5))
    effects = worker.event(TrainLeft(1, at_boundary=False))
    assert effects == [ExitWorker(0, "job stopped")]


@EVERYWHERE
def test_a_ping_is_answered_everywhere(make: Any) -> None:
    assert make().told(Ping(9)) == [SendPipe(Pong(9))]


@EVERYWHERE
def test_a_lost_agent_ends_the_process_everywhere(make: Any) -> None:
    worker = make()
    assert worker.event(PipeClosed()) == [ExitWorker(70, "the agent is gone")]
    for event in (Started(77), AgentTold(Ping(1)), AgentTold(announce(9)), TrainReturned(1, "7")):
        assert worker.event(event) == []


@EVERYWHERE
def test_time_alone_changes_nothing(make: Any) -> None:
    worker = make()
    assert worker.event(Tick()) == []
    # One that trains is looked at again and again.
    assert (worker.machine.next_deadline_ns() is None) == (make is not training)


# ---------------------------------------------------------------- what is stale or illegal


STALE: list[WorkerEvent] = [
    Started(78),
    AgentTold(ASSIGN),
    AgentTold(Assign(WorkerId("a/9"), SPEC, "h")),
    GroupFormed(1),
    GroupFormed(9),
    GroupFailed(1, "late"),
    TrainReturned(1, "late"),
    TrainRaised(1, BOOM, group_broken=False, exit_code=4),
    TrainLeft(1, at_boundary=False),
    UserReported(1, 0, "{}", "/late"),
    AgentTold(ReportAck(ME, 1, 0, True)),
    AgentTold(Announce(assignment(1))),
    AgentTold(leave(1, at_boundary=False)),
]


@pytest.mark.parametrize("event", STALE, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("make", [forming, training, broken, finished], ids=lambda m: m.__name__)
def test_what_belongs_to_an_older_generation_changes_nothing(make: Any, event: WorkerEvent) -> None:
    worker = make(2)
    stood = worker.report
    assert worker.event(event) == []
    assert worker.report == stood


@pytest.mark.parametrize(
    "event",
    [AgentTold(announce(1)), AgentTold(leave(1, at_boundary=False)), StoreOpened("h:1"),
     SetupFailed(BOOM), UserReported(0, 0, "{}", "")],
    ids=["announce", "leave", "store", "setup", "report"],
)  # fmt: skip
def test_a_spare_ignores_what_only_a_worker_can_mean(event: WorkerEvent) -> None:
    assert spare().event(event) == []


def test_time_that_falls_is_a_bug_and_tells_the_story() -> None:
    worker = training(1)
    with pytest.raises(InvariantViolation, match="time fell") as caught:
        worker.machine.step(Tick(), 0)
    assert any("GroupFormed(generation=1)" in line for line in caught.value.story)

"""What user code and workers do to a job: failures, losses in a row, reports and checkpoints."""

from __future__ import annotations

import pytest

from elastic.core.config import NS_PER_S, ns
from elastic.core.events.coordinator import Persist, SendAgent
from elastic.core.machine.waves import LOOK_NS
from elastic.core.messages import Progress, ReportAck, StartWorker, StopWorker
from elastic.core.policy.failure import OUT_OF_MEMORY
from elastic.core.world import ExitCause, ExitKind, Failure, JobPhase, WorkerId, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, KILLED, RAISED, Coordinator, running

CODE_3 = ExitCause(ExitKind.CODE, 3)


# ---------------------------------------------------------------- user code raises


def test_a_failure_beyond_the_budget_ends_the_job_with_its_traceback() -> None:
    coordinator = running()
    coordinator.raises("n2/1", "boom")
    record = coordinator.store[coordinator.job("a").record.spec.job_id]
    assert record.phase is JobPhase.FAILED
    assert record.reason == "ValueError: boom (failure 1, max_failures=0)"
    assert record.failure is not None
    assert record.failure.traceback == "Traceback: boom in n2/1"
    assert record.failed_worker == "n2/1 (rank 1)"
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n1/1", "n3/1"]


def test_a_failure_within_the_budget_is_durable_and_the_survivors_go_on() -> None:
    coordinator = running(max_failures=1)
    coordinator.raises("n2/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    record = coordinator.store[coordinator.job("a").record.spec.job_id]
    assert (record.phase, record.failures, record.losses) == (JobPhase.RUNNING, 1, 0)
    assert record.failed_worker == "n2/1 (rank 1)"
    assert [m.worker_id for m in coordinator.sent(StartWorker)] == ["n2/2"]


def test_an_exit_code_without_an_exception_is_told_as_a_failure() -> None:
    coordinator = running()
    coordinator.exits("n2/1", CODE_3)
    failure = coordinator.job("a").record.failure
    assert failure == Failure("WorkerExited", "worker n2/1 exited with code 3")


def test_an_exception_told_before_the_exit_is_kept_for_it() -> None:
    """The worker says what it raised; then its process ends, and the agent knows only how."""
    coordinator = running(max_failures=1)
    coordinator.update("n2/1", WorkerPhase.TRAINING, failure=Failure("KeyError", "k", "Trace"))
    coordinator.exits("n2/1", RAISED, failure=None)
    assert coordinator.job("a").record.failure == Failure("KeyError", "k", "Trace")


@pytest.mark.parametrize("second", ["boom", "another"])
def test_of_one_generation_the_first_failure_is_kept_and_only_it_is_charged(second: str) -> None:
    """A wrong batch raises in every rank at once: that is one failed attempt, not three."""
    coordinator = running(max_failures=1)
    coordinator.raises("n2/1", "boom")
    coordinator.raises("n3/1", second)
    record = coordinator.job("a").record
    assert (record.phase, record.failures) == (JobPhase.RUNNING, 1)
    assert record.failure is not None
    assert record.failure.traceback == "Traceback: boom in n2/1"
    assert coordinator.members("a") == "g3: n1/1"
    coordinator.raises("n1/1", second)
    assert coordinator.job("a").record.failures == 1
    assert coordinator.job("a").record.phase is JobPhase.PENDING


def test_the_failure_of_a_later_generation_takes_the_place_of_the_one_before() -> None:
    coordinator = running(max_failures=2)
    coordinator.raises("n2/1", "boom")
    coordinator.training("n1/1", "n3/1")
    coordinator.raises("n3/1", "another")
    record = coordinator.job("a").record
    assert record.failures == 2
    assert record.failure is not None
    assert record.failure.message == "another"
    assert record.failed_worker == "n3/1 (rank 1)"


def test_the_same_error_twice_in_a_row_ends_the_job_whatever_its_budget() -> None:
    coordinator = running(max_failures=-1)
    coordinator.raises("n2/1", "boom", position="report 3")
    coordinator.training("n1/1", "n3/1")
    coordinator.raises("n3/1", "boom", position="report 3")
    assert coordinator.job("a").record.phase is JobPhase.STOPPING
    assert "the same error twice in a row at report 3" in coordinator.job("a").reason


def test_the_same_error_at_another_place_is_tried_again() -> None:
    coordinator = running(max_failures=-1)
    coordinator.raises("n2/1", "boom", position="report 3")
    coordinator.training("n1/1", "n3/1")
    coordinator.raises("n3/1", "boom", position="report 4")
    assert coordinator.job("a").record.phase is JobPhase.RUNNING


def test_an_entry_point_that_cannot_be_loaded_is_charged_each_time() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a", max_failures=2)
    for serial, message in ((1, "one"), (2, "two"), (3, "three")):
        assert coordinator.job("a").record.phase is JobPhase.PENDING
        coordinator.raises(f"n1/{serial}", message)
    record = coordinator.job("a").record
    assert (record.phase, record.failures) == (JobPhase.FAILED, 3)
    assert record.failure is not None
    assert record.failure.message == "three"


def test_a_success_shows_no_failure_of_an_attempt_before() -> None:
    coordinator = running(nodes=2, max_failures=1)
    coordinator.raises("n2/1")
    coordinator.training("n1/1")
    coordinator.finished("n1/1")
    record = coordinator.job("a").record
    assert (record.failure, record.failed_worker, record.failures) == (None, "", 1)


def test_a_worker_that_we_stopped_may_raise_on_its_way_out() -> None:
    coordinator = running(low=2)
    coordinator.notice("n2", 0)
    coordinator.advance(0)
    coordinator.raises("n2/1")
    record = coordinator.job("a").record
    assert (record.failures, record.losses, record.failure) == (0, 0, None)


# ---------------------------------------------------------------- losses in a row

STARVED = ExitCause(ExitKind.SIGNAL, 9, f"SIGKILL, {OUT_OF_MEMORY}")


def lose(coordinator: Coordinator, serial: int) -> None:
    """Let the only worker become ready, train, and die."""
    worker = f"n1/{serial}"
    coordinator.ready(worker)
    coordinator.training(worker)
    coordinator.exits(worker, STARVED)


def test_replacements_come_ever_later_and_a_crash_loop_ends_the_job() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    for serial, delay_s in ((1, 0), (2, 0), (3, 0.5), (4, 1)):
        lose(coordinator, serial)
        if delay_s:
            assert coordinator.sent(StartWorker) == []
            assert coordinator.machine.next_deadline_ns() == coordinator.now_ns + ns(delay_s)
            coordinator.advance(delay_s)
        assert [m.worker_id for m in coordinator.sent(StartWorker)] == [f"n1/{serial + 1}"]
    lose(coordinator, 5)
    record = coordinator.job("a").record
    assert record.phase is JobPhase.FAILED
    assert record.reason.startswith("5 workers lost in a row without progress")
    assert record.failure is None


def test_a_report_ends_a_row_of_losses() -> None:
    coordinator = running()
    coordinator.exits("n3/1", STARVED)
    assert coordinator.job("a").record.losses == 1
    coordinator.training("n1/1", "n2/1")
    coordinator.reports("n1/1", 0)
    assert coordinator.job("a").record.losses == 0


def test_training_for_a_while_ends_a_row_of_losses() -> None:
    coordinator = running()
    coordinator.exits("n3/1", STARVED)
    coordinator.training("n1/1", "n2/1")
    coordinator.advance(CONFIG.healthy_after_s - 0.1)
    assert coordinator.job("a").record.losses == 1
    coordinator.advance(0.1)
    assert coordinator.job("a").record.losses == 0


def test_a_committed_step_ends_a_row_of_losses() -> None:
    coordinator = running()
    coordinator.exits("n3/1", STARVED)
    coordinator.training("n1/1", "n2/1")
    assert coordinator.job("a").record.losses == 1
    coordinator.says("n2", Progress(WorkerId("n2/1"), 2, 1, 1))
    assert coordinator.job("a").record.losses == 0


def test_kills_and_lost_nodes_are_no_losses_however_many() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", slots=4)
    coordinator.agent("n2", slots=4)
    coordinator.submit("a", 1, 8)
    for serial in range(1, 3 * CONFIG.crash_loop_limit):
        coordinator.exits(f"n1/{serial}", KILLED)
        # In its place at once: nobody waits.
        assert f"n1/{serial + 4}" in [m.worker_id for m in coordinator.sent(StartWorker)]
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s)
    assert len(coordinator.noted("worker_gone")) == 3 * CONFIG.crash_loop_limit - 1 + 4
    record = coordinator.job("a").record
    assert (record.phase, record.losses) == (JobPhase.PENDING, 0)


def test_losses_before_the_first_group_are_charged_each_time() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    for serial in range(1, CONFIG.crash_loop_limit + 2):
        coordinator.advance(CONFIG.restart_delay_s_max)
        coordinator.exits(f"n1/{serial}", STARVED)
    assert coordinator.job("a").record.phase is JobPhase.FAILED


# ---------------------------------------------------------------- reports and checkpoints


def ack(coordinator: Coordinator) -> ReportAck:
    (answer,) = coordinator.sent(ReportAck)
    return answer


def test_a_checkpoint_is_durable_before_its_worker_hears_that_it_counts() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n1/1", 0, checkpoint="/c/0", metrics='{"loss": 1}')
    kinds = [type(e) for e in coordinator.effects]
    assert kinds.index(Persist) < kinds.index(SendAgent)
    assert ack(coordinator) == ReportAck("n1/1", 1, 0, True)  # type: ignore[arg-type]
    (kept,) = coordinator.store[coordinator.job("a").record.spec.job_id].checkpoints
    assert (kept.path, kept.generation, kept.index, kept.metrics) == ("/c/0", 1, 0, '{"loss": 1}')


def test_a_report_without_a_checkpoint_is_answered_and_nothing_is_written() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n1/1", 0, metrics='{"loss": 1}')
    assert ack(coordinator).accepted
    assert coordinator.of(Persist) == []
    assert coordinator.job("a").record.metrics == '{"loss": 1}'
    assert coordinator.noted("report")[-1]["index"] == "0"


def test_metrics_that_are_told_again_are_no_new_report_and_older_ones_do_not_replace_them() -> None:
    coordinator = running(nodes=2)
    for index in (0, 2, 2, 1):
        coordinator.reports("n1/1", index, metrics=f'{{"loss": {index}}}')
        assert ack(coordinator).accepted
    assert coordinator.job("a").record.metrics == '{"loss": 2}'
    assert [one["index"] for one in coordinator.noted("report")] == ["0", "2", "1"]


def test_only_rank_0_speaks_for_the_metrics_of_the_job() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n1/1", 0, metrics='{"rank": 0}')
    coordinator.reports("n2/1", 0, metrics='{"rank": 1}')
    assert ack(coordinator).accepted
    assert coordinator.job("a").record.metrics == '{"rank": 0}'
    assert len(coordinator.noted("report")) == 1


def test_the_same_report_again_is_answered_again_and_recorded_once() -> None:
    coordinator = running(nodes=2)
    for _ in range(2):
        coordinator.reports("n1/1", 0, checkpoint="/c/0")
        assert ack(coordinator).accepted
    assert len(coordinator.job("a").record.checkpoints) == 1
    assert coordinator.of(Persist) == []


def test_the_parts_of_one_checkpoint_that_other_ranks_report_are_one_record() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n2/1", 0, checkpoint="/c/0")
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    assert ack(coordinator).accepted
    assert len(coordinator.job("a").record.checkpoints) == 1


def test_the_newest_group_is_told_the_newest_checkpoint() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    coordinator.reports("n1/1", 1, checkpoint="/c/1")
    coordinator.exits("n2/1")
    told = coordinator.announced[coordinator.report_of("n1/1").worker_id]
    assert told.assignment.checkpoint == "/c/1"


def test_checkpoints_beyond_those_to_keep_are_dropped_from_the_record() -> None:
    coordinator = running(nodes=1, num_to_keep=2)
    for index in range(4):
        coordinator.reports("n1/1", index, checkpoint=f"/c/{index}")
    assert [c.path for c in coordinator.job("a").record.checkpoints] == ["/c/2", "/c/3"]


def test_a_report_of_an_old_generation_is_refused_by_both_numbers() -> None:
    coordinator = running()
    late = coordinator.reported("n1/1", 0, checkpoint="/c/0")
    coordinator.exits("n3/1")
    coordinator.says("n1", late)
    answer = ack(coordinator)
    assert (answer.accepted, answer.generation, answer.index) == (False, 1, 0)
    assert answer.reason == "generation 1 is over, the job is at 2"
    assert coordinator.job("a").record.checkpoints == ()
    assert coordinator.noted("checkpoint_refused") == [{"path": "/c/0", "reason": answer.reason}]


def test_a_report_of_a_suspended_group_is_refused() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.exits("n2/1")
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    assert ack(coordinator).reason == "generation 1 is suspended, the job is at 1"


def test_a_report_of_one_who_is_no_member_is_refused() -> None:
    coordinator = running(nodes=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.reports("n3/1", 0, generation=1)
    assert ack(coordinator).reason == "worker n3/1 is not a member of generation 1"


def test_a_report_to_an_ended_or_unknown_job_is_refused() -> None:
    coordinator = running(nodes=1)
    coordinator.reports("n1/1", 0, job_id="b", checkpoint="/c/0")
    assert ack(coordinator).reason == "job b is not known here"
    coordinator.stop("a")
    coordinator.reports("n1/1", 0)
    assert ack(coordinator).reason == "job a has ended: stopped"


# ---------------------------------------------------------------- telemetry


def test_the_first_step_of_a_group_is_noted_once_with_the_moment_of_its_last_member() -> None:
    coordinator = running(nodes=2)
    coordinator.steps("n1/1", 1, first_ns=70)
    assert coordinator.noted("first_step") == []
    coordinator.steps("n2/1", 1, first_ns=90)
    coordinator.steps("n1/1", 2, first_ns=70)
    assert coordinator.noted("first_step") == [
        {"generation": "1", "unix_ns": "90", "world_size": "2"}
    ]
    assert [w.steps for w in coordinator.job("a").workers] == [2, 1]


def test_telemetry_of_an_old_generation_or_an_unknown_worker_is_ignored() -> None:
    coordinator = running(nodes=2)
    coordinator.exits("n2/1")
    coordinator.steps("n1/1", 5)
    assert coordinator.effects == ()
    assert coordinator.job("a").workers[0].steps == 0


def test_a_group_is_said_to_train_once_all_members_do_with_the_time_it_took() -> None:
    coordinator = running(nodes=2)
    coordinator.exits("n2/1")
    coordinator.now_ns += ns(0.25)
    coordinator.training("n1/1")
    assert coordinator.noted("group_training")[-1] == {"generation": "2", "took_ms": "250"}


def test_who_has_its_min_and_waits_for_an_agent_is_not_said_to_lack_slots() -> None:
    coordinator = running(nodes=3, low=3, high=4)
    coordinator.disconnect("n3")
    coordinator.advance(CONFIG.node_grace_s)
    coordinator.ready("n1/1")
    coordinator.ready("n2/1")
    coordinator.disconnect("n2")
    coordinator.agent("n4")
    coordinator.ready("n4/1")
    assert coordinator.job("a").reason == (
        "waiting: 2 of 3 workers ready, 0 starting, 1 on nodes that do not answer"
    )


def test_a_group_that_comes_together_is_not_shown_as_one_that_trains() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name)
    coordinator.submit("a", 2)
    coordinator.ready("n1/1", "n2/1")
    assert coordinator.job("a").reason == "forming: 0 of 2 members are there"
    coordinator.update("n1/1", WorkerPhase.FORMING)
    coordinator.advance(LOOK_NS / NS_PER_S)
    assert coordinator.job("a").reason == "forming: 1 of 2 members are there"
    coordinator.update("n2/1", WorkerPhase.FORMING)
    coordinator.training("n1/1")
    coordinator.advance(LOOK_NS / NS_PER_S)
    assert coordinator.job("a").reason == "forming: 2 of 2 members are there"
    coordinator.training("n2/1")
    assert coordinator.job("a").reason == "2 workers"


def test_a_group_that_forms_while_another_one_wants_to_join_says_both() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name)
    coordinator.submit("a", 2, 3)
    coordinator.ready("n1/1", "n2/1")
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.update("n1/1", WorkerPhase.FORMING)
    coordinator.advance(LOOK_NS / NS_PER_S)
    assert coordinator.job("a").reason == (
        "forming: 1 of 2 members are there; 1 to join and 0 to leave at the next boundary"
    )

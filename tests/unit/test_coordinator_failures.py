"""What user code and workers do to a job: failures, losses in a row, reports and checkpoints."""

from __future__ import annotations

import signal

import pytest

from elastic.core.facts import ExitCause, ExitKind, JobPhase
from elastic.core.messages import ReportAck
from elastic.core.policy.failure import OUT_OF_MEMORY
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running

# ---------------------------------------------------------------- losses in a row


def test_many_nodes_lost_at_once_are_no_crash_loop() -> None:
    """A rack without power is one event, however many nodes it takes with it."""
    coordinator = running(nodes=CONFIG.crash_loop_limit + 3, low=2)
    for number in range(3, CONFIG.crash_loop_limit + 4):
        coordinator.disconnect(f"n{number}")
        coordinator.advance(0.01)
    coordinator.advance(CONFIG.node_grace_s)
    assert coordinator.members("a").endswith(": n1/1 n2/1")
    assert coordinator.job("a").record.losses == 0


def test_a_job_that_ends_for_want_of_memory_at_the_same_step_is_given_up() -> None:
    coordinator = running(nodes=1)
    killed = ExitCause(ExitKind.SIGNAL, int(signal.SIGKILL), OUT_OF_MEMORY)
    for number in range(1, CONFIG.crash_loop_limit + 2):
        assert coordinator.job("a").record.phase is not JobPhase.FAILED
        worker = f"n1/{number}"
        if number > 1:
            coordinator.advance(CONFIG.restart_delay_s_max)
            coordinator.ready(worker)
            coordinator.training(worker)
        for step in (1, 2, 3):
            coordinator.steps(worker, step, place=(0, step))
        coordinator.exits(worker, killed)
    record = coordinator.job("a").record
    assert (record.phase, record.losses) == (JobPhase.FAILED, CONFIG.crash_loop_limit + 1)


# ---------------------------------------------------------------- who else has failed


def test_what_other_ranks_raise_in_the_moment_of_the_first_is_kept_with_it() -> None:
    coordinator = running(nodes=3, low=3)
    coordinator.raises("n2/1", "first")
    coordinator.raises("n1/1", "second")
    coordinator.exits("n3/1")
    coordinator.restart()
    record = coordinator.job("a").record
    assert record.phase is JobPhase.FAILED
    assert [(one.rank, one.failure.message) for one in record.rank_failures] == [
        (1, "first"),
        (0, "second"),
    ]
    assert record.failure == record.rank_failures[0].failure


# ---------------------------------------------------------------- reports and checkpoints


def ack(coordinator: Coordinator) -> ReportAck:
    (answer,) = coordinator.sent(ReportAck)
    return answer


def test_metrics_that_are_told_again_are_no_new_report_and_older_ones_do_not_replace_them() -> None:
    coordinator = running(nodes=2)
    for index in (0, 2, 2, 1):
        coordinator.reports("n1/1", index, metrics=f'{{"loss": {index}}}')
        assert ack(coordinator).accepted
    assert coordinator.job("a").record.metrics == '{"loss": 2}'
    assert [one["index"] for one in coordinator.noted("report")] == ["0", "2", "1"]


def test_the_parts_of_one_checkpoint_that_other_ranks_report_are_one_record() -> None:
    coordinator = running(nodes=2)
    coordinator.reports("n2/1", 0, checkpoint="/c/0")
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    assert ack(coordinator).accepted
    assert len(coordinator.job("a").record.checkpoints) == 1


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


def test_a_damaged_checkpoint_is_dropped_and_is_no_failure_of_user_code() -> None:
    coordinator = running(nodes=2, low=2, max_failures=0)
    for index in range(3):
        coordinator.reports("n1/1", index, checkpoint=f"/c/{index}")
    coordinator.exits("n2/1")
    coordinator.ready("n1/1", "n2/2")
    coordinator.training("n1/1", "n2/2")
    coordinator.raises("n2/2", damaged="/c/2")
    coordinator.raises("n1/1", damaged="/c/2")  # Both have read it.
    coordinator.restart()
    record = coordinator.job("a").record
    assert [one.path for one in record.checkpoints] == ["/c/0", "/c/1"]
    assert (record.phase, record.failures, record.losses) == (JobPhase.PENDING, 0, 1)
    assert [one["path"] for one in coordinator.noted("checkpoint_dropped")] == ["/c/2"]


def test_a_damaged_checkpoint_that_every_group_would_begin_with_is_a_failure() -> None:
    coordinator = running(nodes=1, max_failures=0, resume_from="/c/0")
    coordinator.raises("n1/1", damaged="/c/0")
    assert coordinator.job("a").record.phase is JobPhase.FAILED


def test_a_damaged_checkpoint_of_the_same_group_is_a_failure_of_user_code() -> None:
    """Groups that each report one, and then find it damaged, make progress for ever."""
    coordinator = running(nodes=1, max_failures=0)
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    coordinator.raises("n1/1", damaged="/c/0")
    record = coordinator.job("a").record
    assert (record.phase, record.checkpoints) == (JobPhase.FAILED, ())


def test_members_that_have_returned_do_not_complete_a_job_whose_checkpoint_is_damaged() -> None:
    coordinator = running(nodes=2, low=2, max_failures=0)
    coordinator.reports("n1/1", 0, checkpoint="/c/0")
    coordinator.exits("n2/1")
    coordinator.ready("n1/1", "n2/2")
    coordinator.training("n1/1", "n2/2")
    coordinator.finished("n1/1")
    coordinator.raises("n2/2", damaged="/c/0")
    coordinator.advance(0.1)
    coordinator.exits("n1/1")
    assert coordinator.job("a").record.phase is not JobPhase.SUCCEEDED


# ---------------------------------------------------------------- telemetry


def test_the_first_step_of_a_group_is_noted_once_with_the_moment_of_its_last_member() -> None:
    coordinator = running(nodes=2)
    coordinator.steps("n1/1", 1, first_ns=70)
    assert coordinator.noted("first_step") == []
    coordinator.steps("n2/1", 1, first_ns=90)
    coordinator.steps("n1/1", 2, first_ns=70)
    assert coordinator.noted("first_step") == [
        {"generation": "1", "unix_ns": "90", "world_size": "2", "cause": "start"}
    ]
    assert [w.steps for w in coordinator.job("a").workers] == [2, 1]


@pytest.mark.parametrize(
    ("place", "expected"),
    [((2, 5), ()), ((2, 4), ()), ((0, 1), ("epoch 0, step 1", "epoch 2, step 4"))],
)
def test_the_first_step_says_when_steps_are_done_again(
    place: tuple[int, int], expected: tuple[str, ...]
) -> None:
    coordinator = running(nodes=2)
    for worker in ("n1/1", "n2/1"):
        coordinator.steps(worker, 9, first_ns=70, place=(2, 4))
    coordinator.exits("n1/1")
    coordinator.training("n2/1")
    coordinator.steps("n2/1", 1, first_ns=90, place=place)
    noted = coordinator.noted("first_step")[-1]
    assert tuple(noted[key] for key in ("at", "was_at") if key in noted) == expected


def test_a_first_step_after_another_member_is_gone_is_taken() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.steps("n1/1", 1, first_ns=70, place=(0, 1))
    coordinator.exits("n1/1")
    coordinator.steps("n2/1", 1, first_ns=71, place=(0, 1))
    assert "at" not in coordinator.noted("first_step")[-1]


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

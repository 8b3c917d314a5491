"""News that comes late, twice, out of order or from half of the agents leads nowhere wrong."""

from __future__ import annotations

from elastic.core.messages import ReportAck
from elastic.core.world import FIRST_AUTOMATIC, JobPhase, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running


def paths(coordinator: Coordinator) -> list[str]:
    """The checkpoints on record, oldest first."""
    return [record.path for record in coordinator.job("a").record.checkpoints]


def ending(coordinator: Coordinator) -> list[str]:
    """How the job ended, if it did."""
    return [note["phase"] for note in coordinator.noted("job_ended")]


# ---------------------------------------------------------------- reports


def test_an_old_checkpoint_that_is_told_again_does_not_become_the_newest() -> None:
    coordinator = running(nodes=2, num_to_keep=1)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    coordinator.reports("n1/1", 5, checkpoint="/c/5")
    coordinator.restart()
    coordinator.agent("n2")
    coordinator.agent("n1", reports_due=2)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    assert [ack.accepted for ack in coordinator.sent(ReportAck)] == [True]
    assert paths(coordinator) == ["/c/5"]


def test_checkpoints_of_different_leads_are_in_the_order_of_reports_not_of_arrival() -> None:
    coordinator = running(nodes=2)
    for worker, index in (("n1/1", 4), ("n2/1", 6), ("n1/1", 5)):
        coordinator.reports(worker, index, checkpoint=f"/c/{index}")
    assert paths(coordinator) == ["/c/4", "/c/5", "/c/6"]


def test_a_group_is_not_replaced_before_reports_that_were_kept_meanwhile_are_taken() -> None:
    coordinator = running()
    coordinator.restart()
    coordinator.exits("n3/1")
    coordinator.agent("n3")
    coordinator.agent("n2")
    coordinator.agent("n1", reports_due=2)
    assert coordinator.job("a").reason == "lost n3/1; waiting for word of n1/1"
    coordinator.reports("n1/1", 3)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    assert paths(coordinator) == ["/c/4"]
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    assert coordinator.announced["n1/1"].assignment.checkpoint == "/c/4"


def test_reports_that_never_come_are_not_awaited_once_the_stream_broke() -> None:
    coordinator = running()
    coordinator.exits("n3/1")
    coordinator.training("n1/1", "n2/1")
    coordinator.disconnect("n1")
    coordinator.agent("n1", reports_due=1)
    coordinator.broken("n2/1")
    coordinator.advance(5)
    assert coordinator.members("a").startswith("g2")
    coordinator.disconnect("n1")
    coordinator.advance(CONFIG.node_grace_s)
    assert coordinator.members("a") == "g3: n2/1"


# ---------------------------------------------------------------- a restart in the middle of a loss


def test_after_a_restart_a_lost_member_does_not_cost_those_who_are_about_to_come_back() -> None:
    coordinator = running()
    coordinator.restart()
    coordinator.exits("n3/1")
    coordinator.agent("n3")
    assert coordinator.job("a").reason == "lost n3/1; waiting for word of n1/1, n2/1"
    coordinator.agent("n1")
    coordinator.agent("n2")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    assert coordinator.noted("group_suspended") == []


def test_a_lost_member_shortens_the_wait_for_the_others() -> None:
    coordinator = running()
    coordinator.restart()
    coordinator.exits("n3/1")
    coordinator.agent("n3")
    coordinator.agent("n1")
    coordinator.advance(2)
    assert coordinator.members("a") == "g2: n1/1"


def test_one_attempt_is_charged_once_also_over_a_restart() -> None:
    """A wrong batch raises in every rank; the coordinator dies between the two."""
    coordinator = running(nodes=2, max_failures=1)
    coordinator.raises("n1/1")
    coordinator.restart()
    coordinator.raises("n2/1")
    coordinator.agent("n1")
    coordinator.agent("n2")
    assert ending(coordinator) == []
    assert coordinator.job("a").record.failures == 1


# ---------------------------------------------------------------- the end of a run


def test_a_leader_that_dies_before_it_returned_is_replaced_although_the_others_have() -> None:
    coordinator = running(nodes=2)
    coordinator.finished("n2/1")
    coordinator.exits("n1/1")
    assert coordinator.members("a") == "g2: n2/1"
    coordinator.training("n2/1")
    coordinator.finished("n2/1", result="7")
    assert ending(coordinator) == ["succeeded"]
    assert coordinator.job("a").record.result == "7"


def test_what_a_leader_returned_counts_although_it_died_afterwards() -> None:
    coordinator = running(nodes=2)
    coordinator.finished("n1/1", result="7")
    coordinator.exits("n1/1")
    assert coordinator.members("a") == "g2: n2/1"
    coordinator = running(nodes=3)
    coordinator.finished("n1/1", result="7")
    coordinator.finished("n2/1", result="8")
    coordinator.exits("n3/1")
    assert ending(coordinator) == ["succeeded"]
    assert coordinator.job("a").record.result == "7"


def test_user_code_that_raises_when_others_have_returned_is_tried_again() -> None:
    coordinator = running(nodes=2, max_failures=1)
    coordinator.finished("n1/1")
    coordinator.raises("n2/1")
    assert ending(coordinator) == []
    assert coordinator.members("a") == "g2: n1/1"


# ---------------------------------------------------------------- groups that break


def test_groups_that_break_for_ever_end_the_job() -> None:
    coordinator = running(nodes=2)
    for _ in range(CONFIG.crash_loop_limit + 1):
        assert ending(coordinator) == []
        coordinator.training("n1/1", "n2/1")
        coordinator.broken("n1/1")
        coordinator.advance(CONFIG.broken_grace_s)
    assert ending(coordinator) == ["failed"]
    assert "look for the first error" in coordinator.job("a").reason


def test_a_report_forgives_groups_that_broke() -> None:
    coordinator = running(nodes=2)
    for index in range(3 * CONFIG.crash_loop_limit):
        coordinator.training("n1/1", "n2/1")
        coordinator.reports("n1/1", index)
        coordinator.broken("n1/1")
        coordinator.advance(CONFIG.broken_grace_s)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    assert coordinator.report_of("n1/1").phase is WorkerPhase.BROKEN


def test_a_job_begins_with_the_checkpoint_that_it_resumes_from_until_it_has_its_own() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a", resume_from="/earlier/c")
    coordinator.ready("n1/1")
    assert coordinator.announced["n1/1"].assignment.checkpoint == "/earlier/c"
    coordinator.training("n1/1")
    begun = {"/c/auto": (FIRST_AUTOMATIC, "/earlier/c"), "/c/1": (1, "/c/1")}
    for serial, (path, (index, begins)) in enumerate(begun.items(), start=1):
        coordinator.reports(f"n1/{serial}", index, checkpoint=path)
        coordinator.exits(f"n1/{serial}")
        coordinator.advance(CONFIG.restart_delay_s_max)
        coordinator.ready(f"n1/{serial + 1}")
        coordinator.training(f"n1/{serial + 1}")
        assert coordinator.announced[f"n1/{serial + 1}"].assignment.checkpoint == begins

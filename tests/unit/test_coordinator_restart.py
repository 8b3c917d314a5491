"""Another life of the coordinator: it adopts what runs, and gives up what does not come back."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.machine.coordinator import HOLD_AFTER_RESTART_S
from elastic.core.messages import StopWorker
from elastic.core.projects import ProjectShare
from elastic.core.world import (
    JobPhase,
)
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running


def restarted(coordinator: Coordinator, *back: str) -> Coordinator:
    """Begin another life, to which these agents come back."""
    coordinator.restart()
    for name in back:
        coordinator.agent(name)
    return coordinator


def test_an_ended_job_stays_ended_and_its_workers_are_told_to_end() -> None:
    coordinator = running(nodes=1)
    coordinator.stop("a")
    coordinator.exits("n1/1", STOPPED)
    coordinator.submit("b")
    coordinator.stop("b")
    restarted(coordinator, "n1")
    stops = [f"{m.worker_id}: {m.reason}" for m in coordinator.sent(StopWorker)]
    assert stops == ["n1/2: job stopped"]
    assert coordinator.job("a").record.phase is JobPhase.STOPPED
    assert coordinator.stop("a").error == "failed_precondition"


def test_workers_that_were_replaced_and_come_back_do_not_break_their_projects_limit() -> None:
    shares = (ProjectShare(project="vision", max_workers=1),)
    coordinator = Coordinator(replace(CONFIG, projects=shares))
    coordinator.agent("a")
    coordinator.agent("b")
    coordinator.submit("j", 1, 2, project="vision")
    coordinator.disconnect("a")
    coordinator.advance(1)
    assert list(coordinator.agents["b"].workers) == ["b/1"]
    coordinator.restart()
    coordinator.agent("a")
    coordinator.agent("b")
    coordinator.ready("a/1", "b/1")
    coordinator.advance(0.5)
    assert [told.assignment.world_size for told in coordinator.announced.values()] == [1]
    coordinator.advance(10)
    assert [told.assignment.world_size for told in coordinator.announced.values()] == [1]


def stopped(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StopWorker)]


def test_before_there_is_a_plan_no_group_forms_that_its_project_has_no_room_for() -> None:
    shares = (ProjectShare(project="vision", max_workers=1),)
    coordinator = Coordinator(replace(CONFIG, projects=shares))
    coordinator.agent("a")
    coordinator.submit("j", 1, 1, project="vision")
    coordinator.ready("a/1")
    coordinator.training("a/1")
    coordinator.submit("k", 1, 1, project="vision", priority=1)
    coordinator.disconnect("a")
    coordinator.advance(1)
    coordinator.agent("b")
    coordinator.ready("b/1")
    coordinator.training("b/1")
    assert coordinator.members("k") == "g1: b/1"
    coordinator.restart()
    coordinator.agent("b")
    coordinator.agent("a")
    coordinator.ready("a/1")
    coordinator.advance(HOLD_AFTER_RESTART_S / 2)
    assert "may be at its limit" in coordinator.job("j").reason
    assert not coordinator.members("j").startswith("g2")
    coordinator.advance(10)
    assert not coordinator.members("j").startswith("g2")

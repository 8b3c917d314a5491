"""Another life of the coordinator: it adopts what runs, and gives up what does not come back."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.facts import JobPhase, WorkerId, WorkerPhase
from elastic.core.messages import StopWorker
from tests.unit.coordinator_under_test import STOPPED, Coordinator, running


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


def test_a_stop_before_the_agents_are_back_does_not_throw_away_what_may_be_saved() -> None:
    """Whether the job trains in a loop that can be saved, its workers have yet to report."""
    coordinator = running(nodes=2, run_path="/runs/a")
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.restart()
    assert not coordinator.stop("a").error
    for name in ("n1", "n2"):
        coordinator.agent(name)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    assert not coordinator.sent(StopWorker)


def test_no_worker_id_is_used_again_after_a_term_with_thousands_of_starts() -> None:
    coordinator = running(nodes=1)
    old = coordinator.report_of("n1/1")
    newest = replace(old, worker_id=WorkerId("n1/1500"))
    coordinator.agents["n1"].workers[newest.worker_id] = newest
    coordinator.agent("n1")
    coordinator.restart()
    coordinator.agent("n1", incarnation=2)
    coordinator.advance(5)
    assert [*coordinator.agents["n1"].workers] == ["n1/1000001"]


def suspended_and_restarted() -> Coordinator:
    """A job whose only survivor has the state, and whose coordinator is started anew.

    Two other nodes are back first.
    """
    coordinator = running(nodes=2, low=2)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.disconnect("n2")
    coordinator.advance(1)
    coordinator.ready("n1/1")
    restarted(coordinator, "n3", "n4")
    coordinator.advance(5)
    for name in ("n3", "n4"):
        coordinator.ready(*coordinator.agents[name].workers)
    coordinator.advance(0.1)
    return coordinator


def test_a_suspended_job_forms_with_its_survivors_after_a_long_outage() -> None:
    coordinator = suspended_and_restarted()
    coordinator.agent("n1")
    coordinator.advance(0.1)
    assert coordinator.members("a").startswith("g2: n1/1 n")


def test_a_suspended_job_forms_without_survivors_that_do_not_come_back() -> None:
    coordinator = suspended_and_restarted()
    assert coordinator.members("a").startswith("g1")
    coordinator.advance(10)
    for name in ("n3", "n4"):
        coordinator.ready(*coordinator.agents[name].workers)
    coordinator.advance(0.1)
    assert coordinator.members("a") == "g2: n3/1000001 n4/1000001"

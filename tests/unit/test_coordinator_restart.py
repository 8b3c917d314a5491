"""Another life of the coordinator: it adopts what runs, and gives up what does not come back."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.messages import StopWorker
from elastic.core.world import JobPhase, WorkerId, WorkerPhase
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

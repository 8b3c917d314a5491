"""The job of a run's feeders: it ends with that, grows while it waits for data, and gives way."""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.messages import LeaveGroup, Progress, StartWorker
from elastic.core.telemetry import Telemetry
from elastic.core.world import JobId, JobPhase, WorkerId, WorkerPhase
from tests.unit.coordinator_under_test import STOPPED, Coordinator

FED, FEEDERS = "fed", "feeders"


def fed_by_one(nodes: int = 4) -> Coordinator:
    """A job that trains on n1, with one feeder of up to three on n2."""
    coordinator = Coordinator()
    for number in range(1, nodes + 1):
        coordinator.agent(f"n{number}")
    coordinator.submit(FED, run_path="/runs/fed")
    coordinator.submit(FEEDERS, 1, 3, feeds=JobId(FED), priority=-1)
    coordinator.ready("n1/1", "n2/1")
    coordinator.training("n1/1", "n2/1")
    assert coordinator.members(FEEDERS) == "g1: n2/1"
    return coordinator


def waits(coordinator: Coordinator, share: float) -> None:
    """Let the trainer say how much of its steps it waits for data."""
    telemetry = Telemetry(steps=10, wall_ns=ns(1), data_wait_ns=ns(share))
    coordinator.says("n1", Progress(WorkerId("n1/1"), 1, 10, 1, telemetry=telemetry))


def test_one_more_feeder_runs_while_training_waits_for_data() -> None:
    coordinator = fed_by_one()
    waits(coordinator, 0.04)
    coordinator.advance(20)
    assert coordinator.job(FEEDERS).record.bounds == (1, 1)
    waits(coordinator, 0.5)
    coordinator.advance(6)
    assert coordinator.job(FEEDERS).record.bounds == (1, 2)
    assert coordinator.noted("job_scaled")[-1]["reason"] == (
        "50% of the steps is spent waiting for data"
    )
    coordinator.advance(60)  # There are no more before that one runs.
    assert coordinator.job(FEEDERS).record.bounds == (1, 2)


def test_feeders_end_with_the_job_that_they_feed_in_the_next_term_too() -> None:
    coordinator = fed_by_one()
    coordinator.restart()
    for name in ("n1", "n2"):
        coordinator.agent(name)
    assert coordinator.job(FEEDERS).record.phase is JobPhase.RUNNING
    coordinator.finished("n1/1")
    assert coordinator.store[JobId(FED)].phase is JobPhase.SUCCEEDED
    record = coordinator.store[JobId(FEEDERS)]
    assert (record.phase, record.reason) == (
        JobPhase.STOPPED, "the job that it fed, fed, is over",
    )  # fmt: skip
    coordinator.submit("late", feeds=JobId(FED))
    assert coordinator.job("late").record.phase is JobPhase.STOPPED


def test_feeders_give_way_though_they_have_nothing_to_continue_from() -> None:
    coordinator = fed_by_one(nodes=2)
    coordinator.submit("other")
    assert [m.worker_id for m in coordinator.sent(LeaveGroup)] == ["n2/1"]
    coordinator.update("n2/1", WorkerPhase.READY)
    coordinator.exits("n2/1", STOPPED)
    assert [(m.worker_id, m.spec.name) for m in coordinator.sent(StartWorker)] == [
        ("n2/2", "other")
    ]
    assert coordinator.job(FEEDERS).record.preempted_by.startswith("other")

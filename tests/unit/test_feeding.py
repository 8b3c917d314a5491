"""The job of a run's feeders: it ends with that, grows while it waits for data, and gives way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.config import ns
from elastic.core.facts import JobId, JobPhase, WorkerId, WorkerPhase
from elastic.core.messages import LeaveGroup, Progress, StartWorker, StopWorker
from elastic.core.telemetry import Telemetry
from elastic.errors import StorageError
from elastic.worker.base.activity import Activity
from elastic.worker.engine import bystander
from tests.unit.coordinator_under_test import STOPPED, Coordinator

FED, FEEDERS = "fed", "feeders"


def fed_by_one(nodes: int = 4) -> Coordinator:
    """A job that trains on n1, with one feeder of one to three on n2."""
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


def most(coordinator: Coordinator) -> int:
    """Return how many feeders may run now, as far as that was said."""
    return int(coordinator.noted("job_scaled")[-1]["max_workers"])


def next_feeder(coordinator: Coordinator, generation: int) -> None:
    """Let a second one begin on n3."""
    coordinator.ready("n3/1")
    coordinator.advance(6)
    coordinator.update("n2/1", WorkerPhase.READY)
    coordinator.training("n2/1", "n3/1")
    assert coordinator.members(FEEDERS) == f"g{generation}: n2/1 n3/1"


def test_one_more_feeder_runs_while_training_waits_for_data() -> None:
    coordinator = fed_by_one()
    waits(coordinator, 0.04)
    coordinator.advance(20)
    assert not coordinator.noted("job_scaled")
    waits(coordinator, 0.5)
    coordinator.advance(6)
    assert most(coordinator) == 2
    assert coordinator.noted("job_scaled")[-1]["reason"] == (
        "50% of the steps is spent waiting for data"
    )
    coordinator.advance(60)  # There are no more before that one runs.
    assert most(coordinator) == 2


def test_feeders_grow_only_by_what_was_measured_with_the_newest_and_if_that_was_of_use() -> None:
    coordinator = fed_by_one()
    waits(coordinator, 0.5)  # Just as the first one has begun.
    coordinator.advance(60)
    assert not coordinator.noted("job_scaled")
    waits(coordinator, 0.5)
    coordinator.advance(6)
    next_feeder(coordinator, 2)
    coordinator.advance(6)
    waits(coordinator, 0.5)  # As much as without it.
    coordinator.advance(60)
    assert most(coordinator) == 2
    coordinator.broken("n1/1")
    waits(coordinator, 0.4)  # It trains no more.
    coordinator.advance(6)
    assert most(coordinator) == 2


def test_feeders_grow_within_what_the_user_has_set_in_the_next_term_too() -> None:
    coordinator = fed_by_one()
    coordinator.advance(6)
    waits(coordinator, 0.5)
    coordinator.advance(6)
    next_feeder(coordinator, 2)
    coordinator.scale(FEEDERS, high=2)
    coordinator.restart()
    for name in ("n1", "n2", "n3", "n4"):
        coordinator.agent(name)
    coordinator.advance(6)
    waits(coordinator, 0.3)
    coordinator.advance(60)
    assert coordinator.members(FEEDERS) == "g2: n2/1 n3/1"
    assert coordinator.job(FEEDERS).record.bounds == (1, 2)
    coordinator.scale(FEEDERS, high=3)
    coordinator.advance(6)
    assert most(coordinator) == 3
    assert coordinator.job(FEEDERS).record.bounds == (1, 3)


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


def test_feeders_that_do_not_give_way_are_cut_off() -> None:
    coordinator = fed_by_one(nodes=2)
    coordinator.submit("other")
    coordinator.advance(coordinator.config.preemption_deadline_s + 1)
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]


def test_a_feeder_goes_on_while_storage_does_not_take_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Written(Exception):
        pass

    tries: list[tuple[bytes, ...]] = []

    def write(members: tuple[bytes, ...]) -> None:
        tries.append(members)
        raise StorageError("full") if len(tries) == 1 else Written

    for name in ("connect", "default_group", "default_store"):
        monkeypatch.setattr(bystander, name, lambda *_: None)
    monkeypatch.setattr(bystander, "share_bytes", lambda _, mine: (mine,))
    monkeypatch.setattr(bystander, "AGAIN_S", 0.0)
    link = SimpleNamespace(leave_request=lambda _: None)
    engine: Any = SimpleNamespace(
        groups=SimpleNamespace(declare=lambda in_place: None, defer=lambda _: None),
        context=SimpleNamespace(
            join=None, generation=1, reach=None, world_rank=0, link=link, activity=Activity()
        ),
        must_leave=lambda: False,
    )
    with pytest.raises(Written):
        bystander.stay(engine, b"here", write)
    assert tries == 2 * [(b"here",)]

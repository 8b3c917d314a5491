"""Agents of two versions whose workers do not understand each other: no group has both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.messages import PROTOCOL_MINOR, StartWorker, StopWorker
from elastic.core.policy.dialects import SINCE_MINORS, dialect_of
from elastic.core.world import FIRST_AUTOMATIC, JobPhase, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator

OLD = SINCE_MINORS[-1] - 1
HINT = (
    "on n3 there is another version of elastic-torch, whose workers do not train together with "
    "this job's: upgrade the other nodes, too"
)


def test_each_version_of_the_protocol_has_one_dialect() -> None:
    assert list(SINCE_MINORS) == sorted({0, *SINCE_MINORS})
    assert SINCE_MINORS[-1] <= PROTOCOL_MINOR
    assert [dialect_of(minor) for minor in SINCE_MINORS] == list(range(len(SINCE_MINORS)))
    assert dialect_of(-1) == 0, "an agent may say anything"
    assert dialect_of(OLD) + 1 == dialect_of(PROTOCOL_MINOR) == dialect_of(PROTOCOL_MINOR + 9)


def started(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StartWorker)]


@pytest.fixture
def mixed() -> Coordinator:
    """Job a trains on n1 and n2, and would like a third worker; n3 comes back upgraded."""
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name, protocol_minor=OLD)
    coordinator.submit("a", 2, 3, run_path="/runs/a")
    coordinator.ready("n1/1", "n2/1")
    coordinator.advance(3)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.agent("n3")
    return coordinator


def test_a_node_that_was_upgraded_first_takes_no_worker_of_a_job_that_trains(
    mixed: Coordinator,
) -> None:
    assert not started(mixed)
    mixed.advance(60)
    assert mixed.members("a") == "g1: n1/1 n2/1"
    # One that is as old as they are does.
    mixed.agent("n4", protocol_minor=OLD)
    assert started(mixed) == ["n4/1"]


def test_a_job_that_has_too_few_of_its_own_says_what_would_let_it_run(mixed: Coordinator) -> None:
    mixed.disconnect("n2")
    mixed.advance(20)
    mixed.ready("n1/1")
    assert not started(mixed)
    assert mixed.job("a").record.phase is JobPhase.PENDING
    advice = ", or let the job go over by elastic pause and elastic resume"
    assert mixed.job("a").reason.endswith(f"; {HINT}{advice}")


def test_a_job_goes_over_when_its_last_old_worker_is_gone(mixed: Coordinator) -> None:
    for name in ("n1", "n2"):
        mixed.drain(name)
    mixed.agent("n5")
    mixed.advance(31)
    for worker in ("n1/1", "n2/1"):
        mixed.exits(worker, STOPPED)
    mixed.advance(5)
    mixed.ready("n3/1", "n5/1")
    mixed.advance(3)
    assert mixed.members("a") == "g2: n3/1 n5/1"


def test_pausing_moves_a_job_to_the_version_that_most_of_the_cluster_has(
    mixed: Coordinator,
) -> None:
    mixed.agent("n5")
    mixed.pause("a")
    checkpoint = {"checkpoint": "/runs/a/auto-1", "request": 1}
    mixed.reports("n1/1", FIRST_AUTOMATIC + 1, **checkpoint)
    mixed.ready("n1/1", "n2/1")
    for worker in ("n1/1", "n2/1"):
        mixed.exits(worker, STOPPED)
    assert mixed.job("a").record.phase is JobPhase.PAUSED
    mixed.resume("a")
    assert started(mixed) == ["n3/1", "n5/1"]


def test_a_plan_for_several_jobs_keeps_nothing_for_one_that_needs_other_nodes(
    mixed: Coordinator,
) -> None:
    mixed.disconnect("n2")
    mixed.advance(20)
    mixed.ready("n1/1")
    mixed.submit("b")
    assert started(mixed) == ["n3/1"]
    assert mixed.job("b").workers


def test_a_worker_that_was_given_up_and_is_back_after_that_is_stopped(mixed: Coordinator) -> None:
    mixed.agent("n5")
    for name in ("n1", "n2"):
        mixed.disconnect(name)
    mixed.advance(20)
    mixed.ready("n3/1", "n5/1")
    mixed.advance(3)
    mixed.training("n3/1", "n5/1")
    mixed.agent("n1", protocol_minor=OLD)
    assert [m.worker_id for m in mixed.sent(StopWorker)] == ["n1/1"]
    mixed.ready("n1/1")
    mixed.advance(60)
    assert mixed.members("a") == "g2: n3/1 n5/1"


@pytest.mark.parametrize("order", ["12", "21"])
def test_nothing_is_started_while_it_is_not_known_what_a_job_speaks(
    mixed: Coordinator, order: str
) -> None:
    mixed.agent("n9", slots=0, protocol_minor=OLD)
    mixed.restart()
    mixed.agent("n3")
    mixed.agent("n9", slots=0, protocol_minor=OLD)
    mixed.advance(5)
    assert not started(mixed)
    for name in order:
        mixed.agent(f"n{name}", protocol_minor=OLD)
        mixed.advance(1)
    mixed.advance(20)
    assert mixed.members("a") == "g1: n1/1 n2/1"


def test_what_is_started_too_soon_after_a_restart_is_stopped(mixed: Coordinator) -> None:
    """Of the nodes that are back all are new: so the others were, as far as anybody knows."""
    mixed.restart()
    mixed.agent("n3")
    mixed.advance(5)
    for name in ("n2", "n1"):
        mixed.agent(name, protocol_minor=OLD)
    mixed.advance(20)
    assert mixed.members("a") == "g1: n1/1 n2/1"


@pytest.mark.parametrize("why", ["label", "accelerator", "cordoned", "full"])
def test_a_fresh_job_goes_where_it_can_run(why: str) -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name, slots=4, protocol_minor=OLD)
    if why == "full":
        coordinator.submit("full", 8)
    coordinator.agent("n3", labels=(("a", "b"),), accelerator_type="H100")
    if why == "cordoned":
        for name in ("n1", "n2"):
            coordinator.cordon(name)
    wants = {
        "label": {"label_selector": (("a", "b"),)},
        "accelerator": {"accelerator_type": "H100"},
    }
    coordinator.submit("b", **wants.get(why, {}))
    coordinator.advance(5)
    assert [str(w.report.worker_id) for w in coordinator.job("b").workers] == ["n3/1"]


def test_a_job_that_has_not_begun_does_not_hold_on_to_what_it_has() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name, protocol_minor=OLD)
    coordinator.submit("b", 2)
    coordinator.ready("n1/1")
    coordinator.disconnect("n2")
    coordinator.advance(20)
    coordinator.agent("n3")
    assert not coordinator.sent(StopWorker), "there is no room for it either"
    coordinator.agent("n4")
    assert [str(m.worker_id) for m in coordinator.sent(StopWorker)] == ["n1/1"]
    coordinator.exits("n1/1", STOPPED)
    coordinator.advance(5)
    coordinator.ready("n3/1", "n4/1")
    coordinator.advance(5)
    assert coordinator.members("b") == "g1: n3/1 n4/1"


def test_an_urgent_job_takes_the_place_of_a_lesser_one_whatever_its_version() -> None:
    coordinator = Coordinator(replace(CONFIG, preemption_min_run_s=0))
    for name in ("n1", "n2"):
        coordinator.agent(name, protocol_minor=OLD)
    coordinator.submit("low", 2, run_path="/runs/low")
    coordinator.ready("n1/1", "n2/1")
    coordinator.advance(3)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.agent("n3")
    coordinator.submit("top", priority=10)
    coordinator.submit("mid", priority=5)
    assert coordinator.job("low").reason.startswith("gives way to mid")


def test_a_job_that_fits_on_old_nodes_alone_starts_there() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name, protocol_minor=OLD)
    coordinator.agent("n3")
    coordinator.submit("b", 2)
    assert started(coordinator) == ["n1/1", "n2/1"]


def test_no_slots_are_kept_for_a_job_whose_last_node_of_its_version_drains() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", protocol_minor=OLD)
    coordinator.submit("a", 1, 4)
    coordinator.ready("n1/1")
    coordinator.advance(3)
    coordinator.training("n1/1")
    coordinator.drain("n1", seconds=7200)
    coordinator.agent("n3")
    coordinator.agent("n4")
    coordinator.submit("b", 2)
    coordinator.advance(5)
    assert len(coordinator.job("b").workers) == 2


def test_a_coordinator_that_has_begun_anew_goes_by_what_agents_say(mixed: Coordinator) -> None:
    mixed.restart()
    mixed.agent("n3")
    for name in ("n1", "n2"):
        mixed.agent(name, protocol_minor=OLD)
    mixed.advance(60)
    assert mixed.members("a") == "g1: n1/1 n2/1"
    assert len(mixed.job("a").workers) == 2

"""Who is refused and why, jobs beside each other, what is stopped and forgotten, and the view."""

from __future__ import annotations

import pytest

from elastic.core.events.coordinator import AgentMessageReceived, Forget
from elastic.core.facts import (
    JobId,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine import coordinator as coordinator_module
from elastic.core.messages import (
    StartWorker,
    StopWorker,
    WorkerUpdate,
)
from tests.unit.coordinator_under_test import STOPPED, Coordinator, running


def started(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StartWorker)]


def stopped(coordinator: Coordinator) -> list[str]:
    return [f"{m.worker_id}: {m.reason}" for m in coordinator.sent(StopWorker)]


# ---------------------------------------------------------------- who may register


def test_what_comes_over_an_unknown_session_is_ignored() -> None:
    coordinator = running(nodes=1)
    report = WorkerReport(WorkerId("n1/1"), JobId("a"), WorkerPhase.BROKEN, 1)
    coordinator.step(AgentMessageReceived(SessionId("s99"), WorkerUpdate(report)))
    assert coordinator.effects == ()


# ---------------------------------------------------------------- what was missed is said again


def test_a_worker_that_was_never_heard_of_by_its_agent_is_started_again() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    coordinator.disconnect("n1")
    coordinator.agents["n1"].workers.clear()
    coordinator.agent("n1")
    assert started(coordinator) == ["n1/1"]
    assert coordinator.noted("worker_gone") == []


def test_a_worker_that_its_agent_has_forgotten_is_lost() -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    coordinator.agents["n2"].workers.clear()
    coordinator.agent("n2")
    assert coordinator.members("a") == "g2: n1/1"
    assert "its agent does not know it any more" in coordinator.noted("worker_gone")[-1]["cause"]


# ---------------------------------------------------------------- submitting and stopping


def test_a_job_id_is_given_once() -> None:
    coordinator = Coordinator()
    coordinator.submit("a")
    coordinator.stop("a")
    reply = coordinator.submit("a")
    assert (reply.error, reply.text) == ("already_exists", "job id a exists already")


def test_an_unknown_accelerator_is_refused_with_what_there_is() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", accelerator_type="T4")
    reply = coordinator.submit("a", accelerator_type="X9000")
    assert reply.error == "invalid"
    assert reply.text.startswith(
        "accelerator_type='X9000' is unknown; nodes of this cluster have: T4; known types: A10,"
    )
    assert coordinator.machine.view(0).jobs == ()


def test_jobs_beyond_the_limit_are_refused_by_both_numbers() -> None:
    coordinator = Coordinator()
    for name in "abcd":
        coordinator.submit(name)
    reply = coordinator.submit("e")
    assert (reply.error, reply.text) == (
        "exhausted",
        "4 jobs have not ended, at most 4 are taken (elastic-coord serve --max-jobs): wait for one "
        "to end, or stop one",
    )
    coordinator.stop("a")
    assert coordinator.submit("e").error == ""


@pytest.mark.parametrize(
    ("job", "error", "says"),
    [
        ("b", "not_found", "no job b is known here"),
        ("a", "failed_precondition", "job a has ended already: stopped"),
    ],
)
def test_a_job_that_cannot_be_stopped_is_refused_with_the_reason(
    job: str, error: str, says: str
) -> None:
    coordinator = running(nodes=1)
    coordinator.stop("a")
    reply = coordinator.stop(job)
    assert (reply.error, reply.text) == (error, says)


# ---------------------------------------------------------------- jobs beside each other


def test_ended_jobs_are_forgotten_oldest_first_and_never_before_their_workers_are_gone() -> None:
    coordinator = running(nodes=1)
    coordinator.stop("a")
    for name in "bcd":
        coordinator.submit(name)
        coordinator.stop(name)
    assert coordinator.of(Forget) == [Forget((JobId("b"),))]
    assert sorted(coordinator.store) == ["a", "c", "d"]
    coordinator.exits("n1/1", STOPPED)
    assert coordinator.of(Forget) == [Forget((JobId("a"),))]
    assert sorted(coordinator.store) == ["c", "d"]


def test_nodes_that_are_longest_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "GONE_NODES_MAX", 2)
    coordinator = Coordinator()
    for name in ("n3", "n1", "n2"):
        coordinator.agent(name)
        coordinator.disconnect(name)
        coordinator.advance(1)
    assert [view.node.node_id for view in coordinator.machine.view(0).nodes] == ["n1", "n2"]

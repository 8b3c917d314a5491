"""Nodes that were told to leave: what is saved before, what it costs, and who is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.core.config import JobSpec, ns
from elastic.core.events.worker import GroupFormed, NotifyPreemption
from elastic.core.facts import JobId, JobPhase, LeavingNode, NodeId
from elastic.core.messages import Preemption
from elastic.core.policy.preemption import save_before
from elastic.core.records import JobRecord
from elastic.errors import ConfigError, ControllerError, PreemptionError
from elastic.train.failures import failed_on_cluster
from tests.strategies import SCRIPT
from tests.unit.coordinator_under_test import Coordinator, running
from tests.unit.worker_under_test import ME, announce, forming, training


def spec(limit: int = -1) -> JobSpec:
    return JobSpec(
        job_id=JobId("j"), name="j", entry=SCRIPT, min_workers=1, max_workers=2,
        max_preemptions=limit,
    )  # fmt: skip


# ---------------------------------------------------------------- the policies


@pytest.mark.parametrize(("preemptions", "kind"), [(1, ControllerError), (2, PreemptionError)])
def test_a_run_whose_nodes_were_taken_too_often_fails_by_name(
    preemptions: int, kind: type[Exception]
) -> None:
    record = JobRecord(spec(1), JobPhase.FAILED, preemptions=preemptions)
    assert type(failed_on_cluster(record)) is kind


def test_nothing_is_saved_while_others_keep_the_state() -> None:
    decision = save_before(ns(60), last_ns=None, now_ns=0, can_go_on=True)
    assert (decision.value, decision.wake_ns) == (False, None)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_preemptions=-2"):
        spec(-2)


# ---------------------------------------------------------------- the coordinator


def told(coordinator: Coordinator) -> list[tuple[str, int, float, list[str]]]:
    return [
        (m.worker_id, m.generation, m.timeout_ns / 1e9, [n.node_id for n in m.nodes])
        for m in coordinator.sent(Preemption)
    ]


def leave_in_order(coordinator: Coordinator) -> None:
    coordinator.notice("n2", 20)
    coordinator.ready("n1/1", "n2/1")


def die_before_the_deadline(coordinator: Coordinator) -> None:
    coordinator.notice("n2", 20)
    coordinator.disconnect("n2")
    coordinator.advance(1)


def lose_its_worker_first(coordinator: Coordinator) -> None:
    coordinator.notice("n2", 20)
    coordinator.exits("n2/1")
    coordinator.disconnect("n2")
    coordinator.advance(1)


ENDS = [leave_in_order, die_before_the_deadline, lose_its_worker_first]


@pytest.mark.parametrize("end", ENDS)
def test_the_job_fails_when_its_budget_of_preempted_nodes_is_used_up(end: Any) -> None:
    coordinator = running(nodes=2, low=1, max_preemptions=0)
    end(coordinator)
    record = coordinator.store[JobId("a")]
    assert record.phase is JobPhase.FAILED
    assert "max_preemptions=0" in record.reason


# ---------------------------------------------------------------- the worker

NEWS = Preemption(ME, 1, ns(20), "spot", (LeavingNode(NodeId("n2"), (1,)),))


def test_a_worker_passes_the_news_on_with_the_deadline_on_its_own_clock() -> None:
    (effect,) = training(1).told(NEWS)
    assert isinstance(effect, NotifyPreemption)
    assert (effect.generation, effect.reason, effect.nodes) == (1, "spot", NEWS.nodes)
    assert effect.deadline_ns >= ns(20)


def test_news_of_an_older_group_or_for_another_worker_are_none() -> None:
    worker = forming(1)
    worker.told(announce(2))
    assert worker.told(NEWS) == []
    worker.event(GroupFormed(1))
    assert worker.told(dataclasses.replace(NEWS, worker_id="n9/9", generation=2)) == []

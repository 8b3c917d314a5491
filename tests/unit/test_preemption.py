"""Nodes that were told to leave: what is saved before, what it costs, and who is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.core.config import JobSpec, ns
from elastic.core.events.coordinator import AgentSaid, Several
from elastic.core.events.worker import GroupFormed, TellPreemption
from elastic.core.messages import DrainNotice, Preemption, SaveState
from elastic.core.policy.failure import History, judge_exit
from elastic.core.policy.preemption import judge_budget, save_before
from elastic.core.world import ExitCause, ExitKind, Failure, JobId, JobPhase, LeavingNode, NodeId
from elastic.errors import ConfigError
from tests.strategies import SCRIPT
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running
from tests.unit.worker_under_test import ME, announce, forming, training


def spec(limit: int = 0) -> JobSpec:
    return JobSpec(
        job_id=JobId("j"), name="j", entry=SCRIPT, min_workers=1, max_workers=2,
        preemption_limit=limit,
    )  # fmt: skip


# ---------------------------------------------------------------- the policies


def test_nothing_is_saved_while_others_keep_the_state() -> None:
    decision = save_before(ns(60), last_ns=None, now_ns=0, can_go_on=True)
    assert (decision.value, decision.wake_ns) == (False, None)


def test_it_is_saved_at_once_and_whenever_half_of_the_rest_is_over_until_no_time_is_left() -> None:
    saves: list[float] = []
    now_ns, last_ns = 0, None
    while True:
        decision = save_before(ns(60), last_ns=last_ns, now_ns=now_ns, can_go_on=False)
        if decision.value:
            last_ns = now_ns
            saves.append(now_ns / 1e9)
        elif decision.wake_ns is None:
            break
        else:
            assert decision.wake_ns > now_ns, "time would not change the answer"
            now_ns = decision.wake_ns
    assert saves == [0, 30, 45, 52.5, 56.25]


def test_a_deadline_that_is_over_still_gets_its_one_checkpoint() -> None:
    assert save_before(0, last_ns=None, now_ns=ns(5), can_go_on=False).value
    assert not save_before(0, last_ns=ns(5), now_ns=ns(6), can_go_on=False).value


@pytest.mark.parametrize(
    ("limit", "taken", "fails"), [(0, 1000, False), (1, 1, True), (3, 2, False), (3, 3, True)]
)
def test_the_budget_of_preempted_nodes_is_its_own(limit: int, taken: int, fails: bool) -> None:
    assert judge_budget(spec(limit), taken).value is fails


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="preemption_limit=-1"):
        spec(-1)


@pytest.mark.parametrize(
    "cause",
    [
        ExitCause(ExitKind.SIGNAL, 9),
        ExitCause(ExitKind.SIGNAL, 11),
        ExitCause(ExitKind.CODE, 143),
        ExitCause(ExitKind.LOST),
        ExitCause(ExitKind.HUNG),
    ],
)
def test_an_exit_on_a_node_that_was_to_leave_costs_nothing(cause: ExitCause) -> None:
    before = History(0, 10)
    judged = judge_exit(spec(), before, cause, None, CONFIG, announced="spot").value
    assert (judged.job_fails, judged.history, judged.delay_ns) == (False, before, 0)


def test_an_exception_of_user_code_is_charged_also_on_a_node_that_was_to_leave() -> None:
    boom = Failure("ValueError", "boom")
    cause = ExitCause(ExitKind.CODE, 1)
    judged = judge_exit(spec(), History(), cause, boom, CONFIG, announced="spot").value
    assert judged.job_fails


# ---------------------------------------------------------------- the coordinator


def told(coordinator: Coordinator) -> list[tuple[str, int, float, list[str]]]:
    return [
        (m.worker_id, m.generation, m.timeout_ns / 1e9, [n.node_id for n in m.nodes])
        for m in coordinator.sent(Preemption)
    ]


def test_every_member_learns_of_a_notice_and_of_an_earlier_deadline() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.notice("n2", 20)
    assert told(coordinator) == [("n1/1", 1, 20, ["n2"]), ("n2/1", 1, 20, ["n2"])]
    coordinator.notice("n2", 60)
    assert told(coordinator) == [], "a later deadline is no news"
    coordinator.notice("n2", 5)
    assert [seconds for _, _, seconds, _ in told(coordinator)] == [5, 5]


def test_an_agent_that_comes_back_hears_again_what_its_worker_may_have_missed() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.disconnect("n1")
    coordinator.notice("n2", 20)
    coordinator.agent("n1")
    assert told(coordinator) == [("n1/1", 1, 20, ["n2"])]


def test_a_group_that_cannot_do_without_a_node_takes_a_checkpoint_before_it_goes() -> None:
    coordinator = running(nodes=2, low=2, run_path="/run")
    coordinator.notice("n2", 20)
    assert {m.request for m in coordinator.sent(SaveState)} == {1}
    coordinator.advance(10)
    assert {m.request for m in coordinator.sent(SaveState)} == {2}


@pytest.mark.parametrize("run_path", ["", "/run"])
def test_a_group_that_can_do_without_a_node_takes_none(run_path: str) -> None:
    coordinator = running(nodes=2, low=1, run_path=run_path)
    coordinator.notice("n2", 20)
    assert coordinator.sent(SaveState) == []


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
def test_a_preempted_node_counts_once_and_is_no_failure_and_no_loss(end: Any) -> None:
    coordinator = running(nodes=2, low=1)
    end(coordinator)
    record = coordinator.job("a").record
    assert coordinator.members("a") == "g2: n1/1"
    assert (record.preemptions, record.failures, record.losses) == (1, 0, 0)
    assert coordinator.store[JobId("a")].preemptions == 1, "it is durable with the next group"


@pytest.mark.parametrize("end", ENDS)
def test_the_job_fails_when_its_budget_of_preempted_nodes_is_used_up(end: Any) -> None:
    coordinator = running(nodes=2, low=1, preemption_limit=1)
    end(coordinator)
    record = coordinator.store[JobId("a")]
    assert record.phase is JobPhase.FAILED
    assert "max_preemptions=0" in record.reason


def test_a_node_that_comes_back_is_an_ordinary_one_again() -> None:
    coordinator = running(nodes=2, low=1)
    die_before_the_deadline(coordinator)
    coordinator.agent("n2", incarnation=2)
    coordinator.ready("n2/2")
    coordinator.ready("n1/1")
    coordinator.training("n1/1", "n2/2")
    coordinator.disconnect("n2")
    coordinator.advance(1)
    record = coordinator.job("a").record
    assert record.preemptions == 1


def test_the_count_survives_the_coordinator() -> None:
    coordinator = running(nodes=2, low=1)
    die_before_the_deadline(coordinator)
    coordinator.restart()
    assert coordinator.job("a").record.preemptions == 1


# ---------------------------------------------------------------- the worker

NEWS = Preemption(ME, 1, ns(20), "spot", (LeavingNode(NodeId("n2"), (1,)),))


def test_a_worker_passes_the_news_on_with_the_deadline_on_its_own_clock() -> None:
    (effect,) = training(1).told(NEWS)
    assert isinstance(effect, TellPreemption)
    assert (effect.generation, effect.reason, effect.nodes) == (1, "spot", NEWS.nodes)
    assert effect.deadline_ns >= ns(20)


def test_news_of_an_older_group_or_for_another_worker_are_none() -> None:
    worker = forming(1)
    worker.told(announce(2))
    assert worker.told(NEWS) == []
    worker.event(GroupFormed(1))
    assert worker.told(dataclasses.replace(NEWS, worker_id="n9/9", generation=2)) == []


def test_many_notices_at_one_moment_are_told_once() -> None:
    coordinator = running(nodes=3, low=3)
    sessions = {name: coordinator.agents[name].session for name in ("n1", "n2", "n3")}
    notices = [AgentSaid(session, DrainNotice("spot", ns(20))) for session in sessions.values()]
    coordinator.step(Several(tuple(notices)))
    assert told(coordinator) == [
        (f"{name}/1", 1, 20, ["n1", "n2", "n3"]) for name in ("n1", "n2", "n3")
    ]

"""The coordinator's machine: jobs, groups, losses, drains, and what users and agents are told."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from elastic.core.config import JobSpec, ns
from elastic.core.events.coordinator import (
    Persist,
    Recovered,
    Reply,
    SendAgent,
    StopRequested,
    SubmitRequested,
)
from elastic.core.events.shared import Tick
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.core.messages import (
    Announce,
    ForgetWorker,
    LeaveGroup,
    Release,
    StartWorker,
    StopWorker,
)
from elastic.core.world import (
    Entry,
    EntryKind,
    JobId,
    JobPhase,
    NodePhase,
)
from elastic.errors import InvariantViolation
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running, spec


def started(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StartWorker)]


def announced(coordinator: Coordinator) -> list[str]:
    """Return the last announcements as "n1/1 g2 0/3"."""
    told = [message.assignment for message in coordinator.sent(Announce)]
    return [f"{a.worker_id} g{a.generation} {a.rank}/{a.world_size}" for a in told]


def left(coordinator: Coordinator, *, at_boundary: bool) -> list[str]:
    found = [m for m in coordinator.sent(LeaveGroup) if m.at_boundary is at_boundary]
    return [f"{message.worker_id} g{message.generation}" for message in found]


# ---------------------------------------------------------------- the door


def test_the_first_event_must_be_the_recovery_and_there_is_only_one() -> None:
    with pytest.raises(InvariantViolation, match=r"first event must be Recovered, got Tick"):
        CoordinatorMachine(CONFIG).step(Tick(), 0)
    with pytest.raises(InvariantViolation, match="Recovered came twice"):
        Coordinator().step(Recovered(()))


def test_time_that_falls_is_refused_with_both_moments() -> None:
    coordinator = Coordinator()
    coordinator.advance(5)
    coordinator.step(Tick())
    with pytest.raises(InvariantViolation, match="time fell from 5000000000 to 1"):
        coordinator.machine.step(Tick(), 1)


def test_a_violation_carries_the_story_that_led_to_it() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    with pytest.raises(InvariantViolation) as bug:
        coordinator.step(Recovered(()))
    assert len(bug.value.story) == 3
    assert "AgentConnected" in bug.value.story[1]


def test_the_story_does_not_keep_the_function_of_a_job_that_was_refused() -> None:
    coordinator = Coordinator()
    payload = bytes(1_000_000)
    entry = Entry(EntryKind.FUNCTION, "train", payload=payload)
    spec = JobSpec(job_id=JobId("j-1"), name="a", entry=entry, min_workers=1, max_workers=1)
    module = replace(spec, entry=Entry(EntryKind.MODULE, "m"))
    coordinator.step(SubmitRequested("r1", module))
    before = sys.getrefcount(payload)
    coordinator.step(SubmitRequested("r2", replace(spec, job_id=JobId("j-2"))))
    assert "already_exists" in str(coordinator.effects)
    assert sys.getrefcount(payload) == before


def test_who_only_asks_is_answered_and_nothing_is_submitted() -> None:
    coordinator = Coordinator()
    asked = SubmitRequested("r1", spec("a"), only_asks=True)
    coordinator.step(asked)
    assert coordinator.effects == (Reply("r1", "", JobId("a")),)
    assert not coordinator.machine.view(coordinator.now_ns).jobs
    coordinator.submit("a")
    coordinator.step(asked)
    assert "already_exists" in str(coordinator.effects)


def test_a_job_that_has_ended_is_remembered_without_its_function() -> None:
    coordinator = Coordinator()
    entry = Entry(EntryKind.FUNCTION, "train", payload=bytes(1000))
    spec = JobSpec(job_id=JobId("j-1"), name="a", entry=entry, min_workers=1, max_workers=1)
    coordinator.step(SubmitRequested("r1", spec))
    (job,) = coordinator.machine.view(coordinator.now_ns).jobs
    assert job.record.spec == spec
    coordinator.step(StopRequested("r2", JobId("j-1"), "enough"))
    (job,) = coordinator.machine.view(coordinator.now_ns).jobs
    assert job.record.spec == replace(spec, entry=replace(entry, payload=b""))


def test_a_tick_that_comes_too_early_or_too_late_does_no_harm() -> None:
    coordinator = running()
    coordinator.step(Tick())
    assert coordinator.effects == ()
    assert coordinator.machine.next_deadline_ns() is None
    coordinator.disconnect("n1")
    coordinator.now_ns += ns(3600)
    coordinator.step(Tick())
    assert coordinator.members("a") == "g2: n2/1 n3/1"


# ---------------------------------------------------------------- from submission to a group


def test_a_submitted_job_is_durable_before_its_user_hears_of_it() -> None:
    coordinator = Coordinator()
    reply = coordinator.submit("a", 2)
    assert (reply.error, reply.text) == ("", "a")
    persisted, replied, *_ = coordinator.effects
    assert isinstance(persisted, Persist)
    assert replied is reply
    assert coordinator.store[coordinator.job("a").record.spec.job_id].phase is JobPhase.PENDING


def test_a_job_without_nodes_says_what_it_waits_for_and_logs_it_once() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    text = "needs 2 more workers, no node is connected: start an elastic-agent"
    assert coordinator.job("a").reason == f"waiting: {text}"
    coordinator.step(Tick())
    assert coordinator.noted("waiting") == [{"reason": text}]


def test_nothing_starts_before_min_fits_and_then_all_that_fit_start() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2, 3)
    coordinator.agent("n1")
    assert started(coordinator) == []
    coordinator.agent("n2")
    assert started(coordinator) == ["n1/1", "n2/1"]
    coordinator.agent("n3")
    assert started(coordinator) == ["n3/1"]
    coordinator.agent("n4")
    assert started(coordinator) == []


def test_a_group_is_durable_before_anyone_hears_of_it() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", slots=2)
    coordinator.submit("a", 2)
    coordinator.ready("n1/1", "n1/2")
    persisted, *rest = coordinator.effects
    assert isinstance(persisted, Persist)
    assert persisted.records[0].phase is JobPhase.RUNNING
    assert persisted.records[0].generation == 1
    assert [type(e).__name__ for e in rest] == ["SendAgent", "SendAgent", "Note"]
    assert announced(coordinator) == ["n1/1 g1 0/2", "n1/2 g1 1/2"]


def test_an_assignment_says_all_that_a_member_needs() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", slots=2)
    coordinator.agent("n2")
    coordinator.submit("a", 3)
    coordinator.ready("n2/1", "n1/2", "n1/1")
    by_rank = [message.assignment for message in coordinator.sent(Announce)]
    assert [a.worker_id for a in by_rank] == ["n1/1", "n1/2", "n2/1"]
    assert {a.leader_address for a in by_rank} == {"host-n1:5001"}
    assert [(a.local_rank, a.local_world_size) for a in by_rank] == [(0, 2), (1, 2), (0, 1)]
    assert [(a.node_rank, a.num_nodes) for a in by_rank] == [(0, 2), (0, 2), (1, 2)]
    assert {(a.cause, a.checkpoint) for a in by_rank} == {("start", "")}


def test_a_first_group_waits_for_those_that_start_but_not_for_ever() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name)
    coordinator.submit("a", 1, 3)
    coordinator.ready("n1/1", "n2/1")
    coordinator.advance(0.1)
    assert coordinator.members("a") == ""
    assert coordinator.job("a").reason == "waiting: 2 of 3 workers ready, 1 starting"
    coordinator.advance(CONFIG.start_patience_s)
    assert coordinator.members("a") == "g1: n1/1 n2/1"


def test_a_job_ends_with_its_leaders_result_when_all_members_have_finished() -> None:
    coordinator = running(nodes=2)
    coordinator.finished("n2/1", result="2")
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    coordinator.finished("n1/1", result="1")
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n1/1", "n2/1"]
    shown = coordinator.job("a")
    assert shown.record.phase is JobPhase.STOPPING
    assert shown.reason == "all workers finished (succeeded, 2 workers are ending)"
    coordinator.exits("n1/1", STOPPED)
    coordinator.exits("n2/1", STOPPED)
    record = coordinator.job("a").record
    assert (record.phase, record.result) == (JobPhase.SUCCEEDED, "1")
    assert coordinator.store[record.spec.job_id] == record


def test_nothing_starts_and_nobody_joins_once_a_member_has_finished() -> None:
    coordinator = running(nodes=2, high=3)
    coordinator.finished("n1/1")
    coordinator.agent("n3")
    assert started(coordinator) == []
    coordinator.finished("n2/1")
    assert coordinator.noted("job_ended")[0]["phase"] == "succeeded"


def test_a_member_that_dies_when_all_others_have_finished_does_not_undo_the_run() -> None:
    coordinator = running(nodes=2)
    coordinator.finished("n1/1", result="7")
    coordinator.exits("n2/1")
    assert coordinator.noted("job_ended")[0]["phase"] == "succeeded"
    assert coordinator.job("a").record.result == "7"


# ---------------------------------------------------------------- losses


def test_survivors_of_a_killed_worker_are_announced_at_once_and_a_replacement_starts() -> None:
    coordinator = running(low=2)
    coordinator.exits("n2/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert announced(coordinator) == ["n1/1 g2 0/2", "n3/1 g2 1/2"]
    assert started(coordinator) == ["n2/2"]
    assert [m.worker_id for m in coordinator.sent(ForgetWorker)] == ["n2/1"]
    assert coordinator.noted("worker_gone")[-1] == {
        "worker": "n2/1", "rank": "1", "cause": "killed by SIGKILL",
    }  # fmt: skip
    kinds = [type(e) for e in coordinator.effects if isinstance(e, (Persist, SendAgent))]
    announces = next(
        i for i, e in enumerate(coordinator.effects)
        if isinstance(e, SendAgent) and isinstance(e.message, Announce)
    )  # fmt: skip
    assert Persist in kinds
    assert any(isinstance(e, Persist) for e in coordinator.effects[:announces])


def test_a_replacement_joins_at_a_boundary_and_takes_the_last_rank() -> None:
    coordinator = running(low=2)
    coordinator.exits("n2/1")
    coordinator.training("n1/1", "n3/1")
    coordinator.ready("n2/2")
    assert left(coordinator, at_boundary=True) == ["n1/1 g2", "n3/1 g2"]
    assert left(coordinator, at_boundary=False) == []
    coordinator.ready("n1/1")
    assert announced(coordinator) == []
    coordinator.ready("n3/1")
    assert coordinator.members("a") == "g3: n1/1 n3/1 n2/2"
    assert coordinator.sent(Announce)[0].assignment.cause == "join"


def test_members_that_linger_at_a_boundary_are_cut_off() -> None:
    coordinator = running(nodes=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.ready("n1/1")
    coordinator.advance(CONFIG.boundary_timeout_s)
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def test_a_node_whose_stream_breaks_has_a_moment_to_come_back() -> None:
    coordinator = running()
    coordinator.disconnect("n2")
    assert coordinator.node("n2").phase is NodePhase.DISCONNECTED
    assert coordinator.job("a").reason == "the node of n2/1 does not answer"
    coordinator.advance(0.4)
    assert coordinator.members("a").startswith("g1")
    coordinator.agent("n2")
    coordinator.advance(10)
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1"
    assert coordinator.node("n2").phase is NodePhase.READY


def test_a_node_that_stays_away_is_lost_with_its_workers() -> None:
    coordinator = running()
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s)
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert coordinator.node("n2").phase is NodePhase.LOST
    assert coordinator.noted("node_lost") == [{"node": "n2", "reason": "stream broke"}]
    assert [w.report.worker_id for w in coordinator.job("a").workers] == ["n1/1", "n3/1"]


def test_a_silent_node_is_lost_at_once_when_a_member_says_that_the_group_broke() -> None:
    coordinator = running()
    coordinator.disconnect("n2")
    coordinator.broken("n1/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_a_node_that_goes_silent_after_a_member_said_that_the_group_broke_is_lost_at_once() -> None:
    coordinator = running()
    coordinator.broken("n1/1")
    assert coordinator.members("a").startswith("g1")
    coordinator.disconnect("n2")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_a_silent_node_without_a_member_of_the_broken_group_keeps_its_moment() -> None:
    coordinator = running()
    coordinator.agent("n4")
    coordinator.broken("n1/1")
    coordinator.disconnect("n4")
    assert coordinator.node("n4").phase is NodePhase.DISCONNECTED


def test_a_group_that_broke_without_a_loss_is_formed_anew_from_the_same_members() -> None:
    coordinator = running()
    coordinator.broken("n3/1")
    coordinator.advance(CONFIG.broken_grace_s)
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"
    assert coordinator.noted("group_formed")[-1]["cause"] == "broken"


def test_below_min_members_keep_their_state_and_resume_with_a_replacement() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s)
    assert left(coordinator, at_boundary=False) == ["n1/1 g1"]
    record = coordinator.job("a").record
    assert (record.phase, record.generation) == (JobPhase.PENDING, 1)
    coordinator.ready("n1/1")
    assert coordinator.job("a").reason == (
        "waiting: needs 2 workers by PACK, but the 1 node that it may use holds only 1 even when "
        "it is empty; what lacks: slots (enough for 1); add nodes for 1 more, or elastic scale a "
        "--min 1"
    )
    coordinator.agent("n3")
    assert started(coordinator) == ["n3/1"]
    assert coordinator.job("a").reason == "waiting: 1 of 2 workers ready, 1 starting"
    coordinator.ready("n3/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert coordinator.sent(Announce)[0].assignment.cause == "resume"


def test_half_a_replica_is_left_out_of_the_next_group_and_told_to_leave_the_old_one() -> None:
    coordinator = running(nodes=4, low=2, workers_per_replica=2)
    coordinator.exits("n1/1")
    assert coordinator.members("a") == "g2: n2/1 n3/1"
    assert left(coordinator, at_boundary=False) == ["n4/1 g1"]


# ---------------------------------------------------------------- drains


@pytest.mark.parametrize("asks", ["operator", "agent"])
def test_a_drained_node_leaves_at_a_boundary_and_its_agent_is_released(asks: str) -> None:
    coordinator = running(low=2)
    if asks == "operator":
        assert coordinator.drain("n2").error == ""
    else:
        coordinator.notice("n2", 30)
    assert coordinator.node("n2").phase is NodePhase.DRAINING
    assert left(coordinator, at_boundary=True) == ["n1/1 g1", "n2/1 g1", "n3/1 g1"]
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert coordinator.noted("group_formed")[-1]["cause"] == "drain"
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]
    coordinator.exits("n2/1", STOPPED)
    assert len(coordinator.sent(Release)) == 1
    coordinator.disconnect("n2")
    assert coordinator.node("n2").phase is NodePhase.LEFT
    assert coordinator.job("a").record.losses == 0


def test_a_node_that_must_leave_now_is_cut_off_at_its_deadline() -> None:
    coordinator = running(low=2)
    coordinator.notice("n2", 2)
    coordinator.advance(1.9)
    assert coordinator.members("a").startswith("g1")
    coordinator.advance(0.1)
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert coordinator.noted("group_formed")[-1]["reason"] == "n2/1 must leave now"
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]


def test_of_two_deadlines_for_one_drain_the_earlier_counts() -> None:
    for first, second in ((30, 1), (1, 30)):
        coordinator = running(low=2)
        coordinator.drain("n2", first)
        coordinator.notice("n2", second)
        coordinator.advance(1)
        assert coordinator.members("a") == "g2: n1/1 n3/1"
        assert len(coordinator.noted("drain_started")) == 1


def test_a_drain_that_leaves_fewer_than_min_suspends_the_job_at_the_deadline() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.drain("n2", 5)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    coordinator.advance(5)
    assert coordinator.job("a").record.phase is JobPhase.PENDING
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]


def test_a_replacement_is_started_elsewhere_while_a_node_drains_and_both_change_at_once() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.agent("n3")
    coordinator.drain("n2", 30)
    assert started(coordinator) == ["n3/1"]
    assert left(coordinator, at_boundary=True) == []
    coordinator.ready("n3/1")
    assert left(coordinator, at_boundary=True) == ["n1/1 g1", "n2/1 g1"]
    coordinator.ready("n1/1", "n2/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_an_empty_node_is_released_at_once_and_takes_no_worker() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.drain("n1")
    assert coordinator.sent(Release) == [Release("upgrade")]
    coordinator.submit("a")
    assert started(coordinator) == []


def test_an_agent_that_comes_back_still_draining_says_so_in_its_hello() -> None:
    coordinator = running(low=2)
    coordinator.disconnect("n2")
    coordinator.agent("n2", draining=True, drain_reason="spot notice", drain_timeout_ns=ns(9))
    assert coordinator.node("n2").phase is NodePhase.DRAINING
    assert coordinator.node("n2").reason == "spot notice"
    assert left(coordinator, at_boundary=True) == ["n1/1 g1", "n2/1 g1", "n3/1 g1"]
    coordinator.disconnect("n2")
    coordinator.agent("n2")
    assert coordinator.node("n2").phase is NodePhase.DRAINING


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("n9", "not_found", "no node n9 is known here; known: n1, n2"),
        ("n2", "failed_precondition", "node n2 is disconnected, only a connected one can drain"),
    ],
)
def test_a_node_that_cannot_drain_is_refused_with_the_reason(
    name: str, error: str, says: str
) -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    reply = coordinator.drain(name)
    assert (reply.error, reply.text) == (error, says)

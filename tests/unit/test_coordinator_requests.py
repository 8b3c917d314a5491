"""Who is refused and why, jobs beside each other, what is stopped and forgotten, and the view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.events.coordinator import AgentSaid, CloseSession, Forget, Persist, SendAgent
from elastic.core.machine import coordinator as coordinator_module
from elastic.core.messages import (
    PROTOCOL_MINOR,
    Announce,
    ForgetWorker,
    LeaveGroup,
    Refusal,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerUpdate,
)
from elastic.core.world import (
    JobId,
    JobPhase,
    NodePhase,
    Resources,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running


def started(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StartWorker)]


def stopped(coordinator: Coordinator) -> list[str]:
    return [f"{m.worker_id}: {m.reason}" for m in coordinator.sent(StopWorker)]


# ---------------------------------------------------------------- who may register


def refusal(coordinator: Coordinator) -> Refusal:
    """Return why the last agent was refused; the stream is closed behind the answer."""
    sent, closed, noted = coordinator.effects
    assert isinstance(sent, SendAgent)
    assert isinstance(sent.message, Refusal)
    assert isinstance(closed, CloseSession)
    assert closed == CloseSession(sent.session, sent.message.reason)
    assert coordinator.noted("agent_refused")[-1]["reason"] == sent.message.reason
    assert noted in coordinator.notes
    return sent.message


def test_an_agent_that_may_register_is_welcomed_by_the_coordinators_name() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", slots=2)
    assert coordinator.sent(Welcome) == [Welcome("coordinator", term=1)]
    assert coordinator.noted("node_registered") == [
        {"node": "n1", "slots": "2", "workers": "0", "host": "host-n1"}
    ]


def test_an_agent_of_another_protocol_is_refused_for_good_with_both_versions() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", protocol_major=2, protocol_minor=7)
    said = refusal(coordinator)
    assert said.final
    assert said.reason == (
        f"agent n1 speaks protocol 2.7, the coordinator 1.{PROTOCOL_MINOR}: install the same "
        f"major version of elastic-torch"
    )
    assert coordinator.machine.view(0).nodes == ()


def test_an_agent_of_another_minor_version_is_welcome() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", protocol_minor=9)
    assert coordinator.sent(Welcome)


def test_a_second_live_agent_of_one_name_is_refused_until_the_first_is_gone() -> None:
    coordinator = running(nodes=1)
    first = coordinator.agents["n1"]
    coordinator.agent("n1", incarnation=2)
    said = refusal(coordinator)
    assert not said.final
    assert said.reason == (
        "node n1 is in use by another live agent on host-n1: give this one another --node-id"
    )
    second, coordinator.agents["n1"] = coordinator.agents["n1"], first
    coordinator.training("n1/1")
    assert coordinator.members("a") == "g1: n1/1"
    coordinator.disconnect("n1")
    coordinator.agents["n1"] = second
    coordinator.agent("n1")
    assert coordinator.sent(Welcome)


@pytest.mark.parametrize("first_is", ["ready", "disconnected", "lost"])
def test_an_agent_that_began_before_the_known_one_is_stale_for_good(first_is: str) -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", incarnation=5)
    if first_is != "ready":
        coordinator.disconnect("n1")
    if first_is == "lost":
        coordinator.advance(CONFIG.node_grace_s)
    coordinator.agent("n1", incarnation=4)
    said = refusal(coordinator)
    assert said.final
    assert said.reason == (
        "node n1 belongs to an agent that started later (incarnation 5, yours is 4): this agent "
        "is stale, end it or give it another --node-id"
    )


def test_a_new_life_of_an_agent_has_lost_the_workers_of_the_one_before() -> None:
    coordinator = running(low=2)
    coordinator.disconnect("n2")
    coordinator.agent("n2", incarnation=2)
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert started(coordinator) == ["n2/2"]
    cause = coordinator.noted("worker_gone")[-1]["cause"]
    assert cause == "lost with its node (node n2: its agent was started anew)"


def test_a_newer_connection_of_the_same_agent_takes_the_place_of_the_older() -> None:
    coordinator = running(nodes=1)
    old = coordinator.agents["n1"].session
    assert old is not None
    coordinator.agent("n1")
    assert coordinator.of(CloseSession) == [CloseSession(old, "replaced by a newer connection")]
    gone = replace(coordinator.report_of("n1/1"), phase=WorkerPhase.EXITED)
    coordinator.step(AgentSaid(old, WorkerUpdate(gone)))
    assert coordinator.effects == ()
    assert coordinator.members("a") == "g1: n1/1"


def test_what_comes_over_an_unknown_session_is_ignored() -> None:
    coordinator = running(nodes=1)
    report = WorkerReport(WorkerId("n1/1"), JobId("a"), WorkerPhase.BROKEN, 1)
    coordinator.step(AgentSaid(SessionId("s99"), WorkerUpdate(report)))
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


def test_an_announcement_that_was_missed_is_said_again() -> None:
    coordinator = running(nodes=3)
    coordinator.disconnect("n2")
    coordinator.exits("n3/1")
    assert coordinator.members("a") == "g2: n1/1"
    coordinator.agent("n2")
    assert coordinator.sent(LeaveGroup) == [
        LeaveGroup(WorkerId("n2/1"), 1, False, "the group is over")
    ]
    coordinator.training("n1/1")
    coordinator.ready("n2/1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g3: n1/1 n2/1"
    coordinator.disconnect("n1")
    coordinator.agents["n1"].workers[WorkerId("n1/1")] = replace(
        coordinator.report_of("n1/1"), generation=2
    )
    coordinator.agent("n1")
    assert [m.assignment.generation for m in coordinator.sent(Announce)] == [3]


def test_a_wish_to_leave_at_a_boundary_that_was_missed_is_said_again() -> None:
    coordinator = running(nodes=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.disconnect("n2")
    coordinator.agent("n2")
    assert [m.worker_id for m in coordinator.sent(LeaveGroup) if m.at_boundary] == ["n2/1"]


def test_an_order_to_stop_that_was_missed_is_said_again() -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    coordinator.stop("a")
    assert stopped(coordinator) == ["n1/1: job stopped"]
    coordinator.agent("n2")
    assert stopped(coordinator) == ["n2/1: job stopped"]


def test_an_exit_that_was_missed_is_told_in_the_hello() -> None:
    coordinator = running(nodes=2)
    coordinator.disconnect("n2")
    coordinator.exits("n2/1")
    coordinator.agent("n2")
    assert coordinator.members("a") == "g2: n1/1"
    assert [m.worker_id for m in coordinator.sent(ForgetWorker)] == ["n2/1"]


@pytest.mark.parametrize(
    ("job", "generation", "why"),
    [("ghost", 0, "its job is not known here"), ("a", 7, "it is from another history")],
)
def test_a_worker_of_another_world_is_stopped(job: str, generation: int, why: str) -> None:
    coordinator = running(nodes=1)
    coordinator.agent("n2")
    report = WorkerReport(WorkerId("n2/9"), JobId(job), WorkerPhase.TRAINING, generation)
    coordinator.says("n2", WorkerUpdate(report))
    assert stopped(coordinator) == [f"n2/9: {why}"]


# ---------------------------------------------------------------- submitting and stopping


def test_a_name_that_is_in_use_is_refused_and_free_again_when_its_job_has_ended() -> None:
    coordinator = Coordinator()
    coordinator.submit("a")
    reply = coordinator.submit("b", name="a")
    assert (reply.error, reply.text) == (
        "already_exists",
        "a job named 'a' is pending already (a): choose another name, or stop it first",
    )
    coordinator.stop("a")
    assert coordinator.submit("b", name="a").error == ""


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


def test_an_accelerator_that_is_known_may_come_later_and_one_that_is_here_is_known() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", accelerator_type="X9000")
    assert coordinator.submit("a", accelerator_type="H100").error == ""
    assert "no connected node has accelerator H100" in coordinator.job("a").reason
    assert coordinator.submit("b", accelerator_type="X9000").error == ""


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


def test_one_submitter_cannot_fill_the_queue_for_others_nor_after_a_restart() -> None:
    coordinator = Coordinator(replace(CONFIG, jobs_max=10, jobs_per_submitter_max=2))
    for name in "ab":
        assert coordinator.submit(name, by="bob").error == ""
    coordinator.restart()
    reply = coordinator.submit("c", by="bob")
    assert (reply.error, reply.text) == (
        "exhausted",
        "bob has 2 jobs that have not ended, at most 2 of one submitter are taken (elastic-coord "
        "serve --max-jobs-per-submitter): wait for one to end, or stop one",
    )
    assert coordinator.submit("c", by="eve").error == ""
    for name in "def":
        assert coordinator.submit(name).error == "", "who has no name has no limit of its own"
    coordinator.stop("a")
    assert coordinator.submit("g", by="bob").error == ""
    assert coordinator.job("g").record.submitter == "bob"


def test_a_stopped_job_is_durable_before_its_workers_are_told_and_stays_stopped() -> None:
    coordinator = running(nodes=2)
    reply = coordinator.stop("a", "enough")
    assert (reply.error, reply.text) == ("", "a")
    assert isinstance(coordinator.effects[0], Persist)
    assert stopped(coordinator) == ["n1/1: job stopped", "n2/1: job stopped"]
    shown = coordinator.job("a")
    assert shown.record.phase is JobPhase.STOPPING
    assert shown.reason == "enough (stopped, 2 workers are ending)"
    coordinator.exits("n1/1", STOPPED)
    coordinator.exits("n2/1", STOPPED)
    assert coordinator.job("a").record.phase is JobPhase.STOPPED
    assert coordinator.job("a").reason == "enough"
    assert started(coordinator) == []


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


def test_a_worker_that_starts_while_its_job_is_stopped_is_told_to_end_only_once() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    coordinator.stop("a")
    assert stopped(coordinator) == ["n1/1: job stopped"]
    coordinator.ready("n1/1")
    assert coordinator.effects == ()


# ---------------------------------------------------------------- jobs beside each other


def test_of_two_jobs_the_older_takes_the_slots_and_the_other_waits_for_them() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    coordinator.submit("b", 2)
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name)
    owners = [w.report.job_id for job in "ab" for w in coordinator.job(job).workers]
    assert owners == ["a", "a"]
    assert coordinator.job("b").reason == (
        "waiting: needs 2 workers by PACK, 1 can be had: a (priority 0) keeps 2, which is its min; "
        "waits for an end, or for more slots (1)"
    )
    coordinator.stop("a")
    coordinator.exits("n1/1", STOPPED)
    assert started(coordinator) == ["n1/2", "n3/1"]


def test_resources_that_a_worker_holds_are_free_again_when_it_is_gone() -> None:
    coordinator = Coordinator()
    gpu = Resources.of({"GPU": 1})
    coordinator.agent("n1", slots=4, resources=gpu)
    coordinator.submit("a", resources_per_worker=gpu)
    coordinator.submit("b", resources_per_worker=gpu)
    assert coordinator.job("b").workers == ()
    coordinator.stop("a")
    assert started(coordinator) == []
    coordinator.exits("n1/1", STOPPED)
    assert started(coordinator) == ["n1/2"]


def test_a_strictly_packed_job_does_not_begin_another_node_while_its_own_is_away() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1", slots=2)
    coordinator.submit("a", 1, 4, strategy="STRICT_PACK")
    coordinator.ready("n1/1", "n1/2")
    coordinator.training("n1/1", "n1/2")
    coordinator.disconnect("n1")
    coordinator.agent("n2", slots=4)
    assert started(coordinator) == []
    coordinator.advance(CONFIG.node_grace_s)
    assert started(coordinator) == ["n2/1", "n2/2", "n2/3", "n2/4"]


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


# ---------------------------------------------------------------- the view


def test_the_view_shows_nodes_by_id_and_jobs_in_order_of_submission() -> None:
    coordinator = running("b", nodes=2)
    coordinator.agent("n0", slots=3)
    coordinator.submit("a", 5)
    view = coordinator.machine.view(coordinator.now_ns)
    assert view.now_ns == coordinator.now_ns
    assert [(n.node.node_id, n.free_slots) for n in view.nodes] == [
        ("n0", 3), ("n1", 0), ("n2", 0),
    ]  # fmt: skip
    assert [job.record.spec.name for job in view.jobs] == ["b", "a"]
    assert [(w.report.worker_id, w.rank, w.node_id) for w in view.jobs[0].workers] == [
        ("n1/1", 0, "n1"), ("n2/1", 1, "n2"),
    ]  # fmt: skip
    assert view.jobs[0].reason == "2 workers"
    assert view.jobs[1].workers == ()


def test_the_view_shows_since_when_a_node_and_a_worker_are_as_they_are() -> None:
    coordinator = running(nodes=2)
    coordinator.advance(5)
    coordinator.training("n1/1")
    assert coordinator.job("a").workers[0].since_ns == 0
    coordinator.disconnect("n2")
    node = coordinator.node("n2")
    assert (node.phase, node.reason) == (NodePhase.DISCONNECTED, "stream broke")
    assert node.since_ns == coordinator.now_ns


def test_a_worker_outside_the_group_has_no_rank() -> None:
    coordinator = running(nodes=1, high=2)
    coordinator.agent("n2")
    assert [(w.report.worker_id, w.rank) for w in coordinator.job("a").workers] == [
        ("n1/1", 0), ("n2/1", -1),
    ]  # fmt: skip

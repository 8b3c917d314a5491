"""The agent's machine: its connection, what it starts, and what it tells of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.config import AgentConfig, ns
from elastic.core.events.agent import (
    AgentEvent,
    Connect,
    Connected,
    ConnectionLost,
    CoordinatorSaid,
    Disconnect,
    ExitAgent,
    Kill,
    OpenLog,
    ProcessExited,
    ProcessSaid,
    ProcessStarted,
    ProcessStopped,
    SendProcess,
    Spawn,
    SpawnFailed,
)
from elastic.core.events.shared import Tick
from elastic.core.messages import (
    Assign,
    CoordinatorMessage,
    ForgetWorker,
    Hello,
    LeaveGroup,
    Pong,
    Progress,
    Refusal,
    Release,
    ReportAck,
    SaveState,
    StartWorker,
    Stop,
    StopWorker,
    Warm,
    Welcome,
    WorkerUpdate,
)
from elastic.core.world import (
    ExitCause,
    ExitKind,
    Failure,
    Node,
    NodeId,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.errors import InvariantViolation
from tests.unit.agent_under_test import (
    CONFIG,
    CRASHED,
    JOB,
    KILLED,
    W1,
    W2,
    W3,
    Agent,
    S,
    announce,
    connecting,
    of,
    reconnect,
    registered,
    reported,
    said_by,
    spec,
    with_spare,
    with_worker,
)

# ---------------------------------------------------------------- connection


def test_the_first_tick_connects_and_spawns_the_spares() -> None:
    agent = Agent(AgentConfig(num_spares=2))
    assert agent.machine.next_deadline_ns() == 0
    assert agent.do(Tick()) == [Connect(SessionId("n/7/1")), Spawn(1), Spawn(2)]


def test_a_connection_begins_with_hello() -> None:
    agent = connecting()
    agent.do(Connected(agent.session))
    (hello,) = agent.sent()
    assert hello == Hello(node=Node(NodeId("n"), 7, "10.0.0.1", 4))


def test_pauses_grow_and_stay_within_their_bounds() -> None:
    agent = connecting(config=AgentConfig(reconnect_delay_s_min=0.1, reconnect_delay_s_max=1.0))
    pauses = []
    for jitter in (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0):
        began_ns = agent.now_ns
        agent.do(ConnectionLost(agent.session, "refused", jitter))
        agent.at_deadline()
        pauses.append((agent.now_ns - began_ns) / S)
    assert pauses == [0.1, 0.4, 0.8, 1.0, 1.0, 1.0, 0.55, 0.1]


def test_a_welcome_makes_the_next_pause_short_again() -> None:
    agent = connecting()
    for _ in range(5):
        agent.do(ConnectionLost(agent.session, "refused", 1.0))
        agent.at_deadline()
    agent.do(Connected(agent.session))
    agent.hear(Welcome("c"))
    began_ns = agent.now_ns
    agent.do(ConnectionLost(agent.session, "reset", 1.0))
    agent.at_deadline()
    assert agent.now_ns - began_ns == ns(2 * CONFIG.reconnect_delay_s_min)


def test_every_attempt_is_a_new_session() -> None:
    agent = connecting()
    seen = [agent.session]
    for _ in range(3):
        agent.do(ConnectionLost(agent.session, "refused", 0.0))
        agent.at_deadline()
        seen.append(agent.session)
    assert seen == ["n/7/1", "n/7/2", "n/7/3", "n/7/4"]


@pytest.mark.parametrize(
    "event",
    [
        Connected(SessionId("n/7/1")),
        ConnectionLost(SessionId("n/7/1"), "late", 0.0),
        CoordinatorSaid(SessionId("n/7/1"), Welcome("c")),
        CoordinatorSaid(SessionId("n/7/1"), StartWorker(W1, spec())),
        CoordinatorSaid(SessionId("n/7/1"), Refusal("late", final=True)),
        CoordinatorSaid(SessionId("n/7/1"), Release("late")),
    ],
    ids=["connected", "lost", "welcome", "start", "refusal", "release"],
)
def test_what_comes_over_an_old_session_is_ignored(event: AgentEvent) -> None:
    agent = with_spare()
    reconnect(agent)
    assert agent.session == "n/7/2"
    assert agent.do(event) == []


@pytest.mark.parametrize(
    "message",
    [StartWorker(W1, spec()), StopWorker(W1, 0, "x"), Release("x")],
    ids=["start", "stop", "release"],
)
def test_before_the_welcome_no_order_counts(message: CoordinatorMessage) -> None:
    agent = connecting()
    agent.do(Connected(agent.session))
    assert agent.hear(message) == []


def test_a_passing_refusal_is_tried_again_after_a_pause() -> None:
    agent = connecting()
    agent.do(Connected(agent.session))
    old = agent.session
    assert agent.hear(Refusal("not the leader", final=False)) == [Disconnect(old)]
    assert of(agent.at_deadline(), Connect) == [Connect(SessionId("n/7/2"))]


def test_a_final_refusal_ends_the_agent_and_what_it_started() -> None:
    agent = connecting()
    agent.do(ProcessStarted(1, 1001))
    agent.do(Connected(agent.session))
    effects = agent.hear(Refusal("other major version", final=True))
    assert effects[0] == Disconnect(SessionId("n/7/1"))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(69, "other major version")


def test_a_final_refusal_gives_workers_their_grace_period() -> None:
    agent = with_worker()
    reconnect(agent)
    effects = agent.hear(Refusal("stale", final=True))
    assert agent.told(1) == [Stop("stale", ns(CONFIG.stop_grace_s))]
    assert not of(effects, ExitAgent)
    agent.do(ProcessStarted(2, 1002))
    effects = agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
    assert effects[-1] == ExitAgent(69, "stale")


def test_training_goes_on_without_a_connection() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    began_ns = agent.now_ns
    while agent.now_ns - began_ns < 3600 * S:
        effects = agent.at_deadline()
        assert {type(effect) for effect in effects} <= {Connect, SendProcess}
        for ping in agent.told(1):
            agent.process(1, Pong(ping.number))
        if of(effects, Connect):
            agent.do(ConnectionLost(agent.session, "refused", 0.5))


# ---------------------------------------------------------------- starting workers


def test_a_worker_takes_the_warm_spare_and_the_spare_is_replaced() -> None:
    agent = with_spare()
    effects = agent.hear(StartWorker(W1, spec()))
    assign = Assign(W1, spec(), "10.0.0.1")
    assert effects[:2] == [OpenLog(1, assign), SendProcess(1, assign)]
    assert of(effects, Spawn) == [Spawn(2)]
    (update,) = agent.sent(WorkerUpdate)
    assert update.report == WorkerReport(W1, JOB, WorkerPhase.STARTING, pid=1001)


def test_a_worker_takes_the_spare_that_warms_up_and_it_is_replaced_at_once() -> None:
    agent = registered()
    assert of(agent.hear(StartWorker(W1, spec())), Spawn) == [Spawn(2)]
    agent.warm(2)
    assert [type(message) for message in agent.told(2)] == [Assign], "the first that is warm"


def test_without_spares_a_worker_gets_a_process_of_its_own() -> None:
    agent = registered(config=AgentConfig(num_spares=0))
    assert of(agent.hear(StartWorker(W1, spec())), Spawn) == [Spawn(1)]
    agent.warm(1)
    assert [type(message) for message in agent.told(1)] == [Assign]
    assert not of(agent.last, Spawn)


def test_workers_get_processes_in_the_order_in_which_they_came() -> None:
    agent = registered()
    for worker_id in (W2, W1):
        agent.hear(StartWorker(worker_id, spec()))
    agent.warm(1)
    assert agent.told(1)[0].worker_id == W2
    agent.warm(2)
    assert agent.told(2)[0].worker_id == W1


def test_a_second_start_of_the_same_worker_only_tells_of_it_again() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.READY, store_address="h:1"))
    agent.hear(StartWorker(W1, spec()))
    assert len(agent.last) == 1
    (update,) = agent.sent(WorkerUpdate)
    assert (update.report.phase, update.report.pid) == (WorkerPhase.READY, 1001)


def test_an_announcement_before_the_process_is_warm_is_passed_on_after_the_assignment() -> None:
    agent = registered()
    agent.hear(StartWorker(W1, spec()))
    for generation in (1, 3, 2):
        agent.hear(announce(W1, generation))
    leave = LeaveGroup(W1, 3, False, "over")
    agent.hear(leave)
    agent.warm(1)
    assert agent.told(1) == [Assign(W1, spec(), "10.0.0.1"), announce(W1, 3), leave]


def test_orders_for_a_worker_go_to_its_process() -> None:
    agent = with_worker()
    for message in (
        announce(W1, 1),
        LeaveGroup(W1, 1, True, "join"),
        ReportAck(W1, 1, 0, True),
        SaveState(W1, 1, 7),
    ):
        agent.hear(message)
        assert agent.told(1) == [message]


@pytest.mark.parametrize(
    "message",
    [announce(W3, 1), LeaveGroup(W3, 1, True, "x"), ReportAck(W3, 1, 0, True), ForgetWorker(W3)],
    ids=lambda message: type(message).__name__,
)
def test_orders_for_a_worker_that_is_not_known_are_ignored(message: CoordinatorMessage) -> None:
    assert with_worker().hear(message) == []


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("wishes", "given"),
    [
        ([1, 1, 1], [("0",), ("1",), ("2",)]),
        ([2, 1], [("0", "1"), ("2",)]),
        ([1.5], [("0", "1")]),
        ([0.5, 0.5, 0.5], [("0",), ("0",), ("1",)]),
        ([0.6, 0.6, 1], [("0",), ("1",), ("2",)]),
        ([0, 3], [(), ("0", "1", "2")]),
    ],
)
def test_devices_are_the_lowest_that_are_free(wishes: list[float], given: list[Any]) -> None:
    agent = registered(config=AgentConfig(num_spares=0), devices=("0", "1", "2"))
    for at, wish in enumerate(wishes, start=1):
        agent.hear(StartWorker(WorkerId(f"n/{at}"), spec(wish)))
        agent.warm(at)
        assert agent.told(at)[0].devices == given[at - 1]


def test_devices_are_free_again_when_the_process_is_gone_not_before() -> None:
    agent = registered(devices=("0", "1"))
    agent.hear(StartWorker(W1, spec(2)))
    agent.warm(1)
    agent.hear(StopWorker(W1, 0, "over"))
    agent.hear(StartWorker(W2, spec(1)))
    cause = agent.exit_of(W2)
    assert cause is not None
    assert cause.kind is ExitKind.SPAWN_FAILED
    assert "wants GPU=1" in cause.detail
    agent.do(ProcessExited(1, KILLED))
    agent.hear(StartWorker(W3, spec(1)))
    assert agent.exit_of(W3) is None


# ---------------------------------------------------------------- reports of workers


def test_what_a_worker_says_is_merged_with_what_the_agent_knows() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.READY, store_address="h:1", pid=5))
    (update,) = agent.sent(WorkerUpdate)
    assert update.report == WorkerReport(W1, JOB, WorkerPhase.READY, 0, "h:1", pid=1001)


@pytest.mark.parametrize(
    "update",
    [
        said_by(W2, WorkerPhase.TRAINING, 3),
        said_by(W1, WorkerPhase.TRAINING, 1),
        said_by(W1, WorkerPhase.STARTING, 2),
        said_by(W1, WorkerPhase.EXITED, 2, exit=CRASHED),
    ],
    ids=["another's", "older generation", "back to the start", "its own exit"],
)
def test_what_a_worker_cannot_know_is_ignored(update: WorkerUpdate) -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 2))
    assert agent.process(1, update) == []
    assert agent.notes[-1].name == "worker_update_ignored"


def test_an_exit_is_reported_with_its_cause_and_the_failure_is_kept() -> None:
    agent = with_worker()
    boom = Failure("ValueError", "boom")
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 2, failure=boom))
    agent.do(ProcessExited(1, CRASHED))
    (update,) = agent.sent(WorkerUpdate)
    report = update.report
    assert (report.phase, report.generation) == (WorkerPhase.EXITED, 2)
    assert (report.exit, report.failure) == (CRASHED, boom)


def test_an_exited_worker_is_mentioned_until_it_may_be_forgotten() -> None:
    agent = with_worker()
    agent.hear(ForgetWorker(W1))
    agent.do(ProcessExited(1, KILLED))
    assert [r.worker_id for r in reconnect(agent).workers] == [W1], "it was forgotten too early"
    agent.hear(Welcome("c"))
    agent.hear(ForgetWorker(W1))
    assert reconnect(agent).workers == ()


def test_changes_while_disconnected_are_told_by_the_next_hello() -> None:
    agent = with_worker()
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    assert agent.process(1, said_by(W1, WorkerPhase.READY)) == []
    agent.at_deadline()
    agent.do(Connected(agent.session))
    (hello,) = agent.sent(Hello)
    assert [report.phase for report in hello.workers] == [WorkerPhase.READY]
    agent.process(1, said_by(W1, WorkerPhase.FORMING, 1))
    assert agent.sent() == [], "nothing is said between hello and welcome"
    agent.hear(Welcome("c"))
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.FORMING]


def test_telemetry_is_passed_on_or_dropped() -> None:
    agent = with_worker()
    agent.process(1, Progress(W1, 1, 5))
    assert agent.sent() == [Progress(W1, 1, 5)]
    agent.process(1, Progress(W2, 1, 5))
    assert agent.sent() == []
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    assert agent.process(1, Progress(W1, 1, 6)) == []


# ---------------------------------------------------------------- what is illegal


@pytest.mark.parametrize(
    "event",
    [
        ProcessStarted(9, 50),
        SpawnFailed(9, "x"),
        SpawnFailed(1, "too late"),
        ProcessSaid(9, Warm(50)),
        ProcessSaid(1, Warm(50)),
        ProcessSaid(1, Pong(5)),
        ProcessSaid(1, said_by(W1, WorkerPhase.READY)),
        ProcessSaid(1, reported(W1, 1, 0)),
        ProcessExited(9, KILLED),
        ProcessStopped(9, True),
    ],
    ids=lambda event: f"{type(event).__name__}-{event.process_id}",
)
def test_what_no_process_can_have_said_is_ignored(event: AgentEvent) -> None:
    assert with_spare().do(event) == []


def test_time_that_falls_is_a_bug_and_tells_the_story() -> None:
    agent = with_worker()
    agent.now_ns = 0
    with pytest.raises(InvariantViolation, match="time fell") as caught:
        agent.do(Tick())
    assert any("StartWorker(worker_id='n/1'" in line for line in caught.value.story)

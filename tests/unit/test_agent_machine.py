"""The agent's machine, flow by flow: connection, processes, workers, and leaving."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.config import AgentConfig, JobSpec, ns
from elastic.core.events.agent import (
    AgentEffect,
    AgentEvent,
    Connect,
    Connected,
    ConnectionLost,
    CoordinatorSaid,
    Disconnect,
    DrainSignalled,
    ExitAgent,
    Kill,
    OpenLog,
    ProcessExited,
    ProcessSaid,
    ProcessStarted,
    ProcessStopped,
    SendCoordinator,
    SendProcess,
    Spawn,
    SpawnFailed,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.machine.agent import AgentMachine
from elastic.core.machine.agent_connection import Unacknowledged
from elastic.core.messages import (
    Announce,
    Assign,
    CoordinatorMessage,
    DrainNotice,
    ForgetWorker,
    Hello,
    LeaveGroup,
    Ping,
    PipeToAgent,
    Pong,
    Progress,
    Refusal,
    Release,
    Report,
    ReportAck,
    Reported,
    StartWorker,
    Stop,
    StopWorker,
    Warm,
    Welcome,
    WorkerUpdate,
)
from elastic.core.world import (
    Assignment,
    Entry,
    EntryKind,
    ExitCause,
    ExitKind,
    Failure,
    JobId,
    Node,
    NodeId,
    Resources,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.errors import InvariantViolation

S = 1_000_000_000
JOB = JobId("j")
W1, W2, W3 = WorkerId("n/1"), WorkerId("n/2"), WorkerId("n/3")
CONFIG = AgentConfig(num_spares=1)
KILLED = ExitCause(ExitKind.SIGNAL, 9)
CRASHED = ExitCause(ExitKind.CODE, 1)


def spec(gpus: float = 0) -> JobSpec:
    return JobSpec(
        job_id=JOB,
        name="job",
        entry=Entry(EntryKind.SCRIPT, "t.py"),
        min_workers=1,
        max_workers=8,
        resources_per_worker=Resources.of({"GPU": gpus}),
    )


def announce(worker_id: WorkerId, generation: int) -> Announce:
    return Announce(Assignment(JOB, worker_id, generation, 0, 1, 0, 1, 0, 1, "h:1"))


def said_by(worker_id: WorkerId, phase: WorkerPhase, generation: int = 0, **more: Any) -> Any:
    return WorkerUpdate(WorkerReport(worker_id, JOB, phase, generation, **more))


def reported(worker_id: WorkerId, generation: int, index: int, checkpoint: str = "") -> Reported:
    return Reported(Report(worker_id, JOB, generation, index, 0, "{}", checkpoint))


class Agent:
    """A machine under test and the effects of the last step, notes kept apart."""

    def __init__(self, config: AgentConfig = CONFIG, devices: tuple[str, ...] = ()) -> None:
        node = Node(NodeId("n"), 7, "10.0.0.1", 4)
        self.machine = AgentMachine(node, config, devices)
        self.now_ns = 100 * S
        self.last: list[AgentEffect] = []
        self.notes: list[Note] = []

    def do(self, event: AgentEvent, after_s: float = 0) -> list[AgentEffect]:
        self.now_ns += ns(after_s)
        effects = self.machine.step(event, self.now_ns)
        self.notes += [effect for effect in effects if isinstance(effect, Note)]
        self.last = [effect for effect in effects if not isinstance(effect, Note)]
        return self.last

    def at_deadline(self) -> list[AgentEffect]:
        """Go to the moment that the machine asked for."""
        due_ns = self.machine.next_deadline_ns()
        assert due_ns is not None, "nothing waits for time"
        self.now_ns = max(self.now_ns, due_ns)
        return self.do(Tick())

    def pass_time(self, seconds: float) -> list[AgentEffect]:
        """Let time pass, stopping at every deadline as a driver does; return all effects."""
        until_ns = self.now_ns + ns(seconds)
        effects: list[AgentEffect] = []
        while True:
            due_ns = self.machine.next_deadline_ns()
            if due_ns is None or due_ns > until_ns:
                break
            effects += self.at_deadline()
        self.now_ns = until_ns
        return effects + self.do(Tick())

    @property
    def session(self) -> SessionId:
        return self.machine._books.connection.session

    def hear(self, message: CoordinatorMessage) -> list[AgentEffect]:
        return self.do(CoordinatorSaid(self.session, message))

    def process(self, process_id: int, message: PipeToAgent) -> list[AgentEffect]:
        return self.do(ProcessSaid(process_id, message))

    def warm(self, process_id: int) -> list[AgentEffect]:
        effects = self.do(ProcessStarted(process_id, 1000 + process_id))
        return effects + self.process(process_id, Warm(1000 + process_id))

    def sent(self, kind: type = object) -> list[Any]:
        """Return messages of the last step to the coordinator."""
        messages = [e.message for e in self.last if isinstance(e, SendCoordinator)]
        return [message for message in messages if isinstance(message, kind)]

    def told(self, process_id: int) -> list[Any]:
        """Return messages of the last step to this process."""
        return [
            effect.message
            for effect in self.last
            if isinstance(effect, SendProcess) and effect.process_id == process_id
        ]

    def exit_of(self, worker_id: WorkerId) -> ExitCause | None:
        """Return how the last step said that the worker ended."""
        for update in self.sent(WorkerUpdate):
            if update.report.worker_id == worker_id:
                return update.report.exit
        return None


def connecting(**more: Any) -> Agent:
    agent = Agent(**more)
    agent.do(Tick())
    return agent


def registered(**more: Any) -> Agent:
    agent = connecting(**more)
    agent.do(Connected(agent.session))
    agent.hear(Welcome("c"))
    return agent


def with_spare(**more: Any) -> Agent:
    agent = registered(**more)
    agent.warm(1)
    return agent


def with_worker(**more: Any) -> Agent:
    """Return an agent whose process 1 is worker n/1, and whose process 2 warms up."""
    agent = with_spare(**more)
    agent.hear(StartWorker(W1, spec()))
    return agent


def reconnect(agent: Agent) -> Hello:
    agent.do(ConnectionLost(agent.session, "reset", 0.5))
    connect = agent.at_deadline()
    assert Connect(agent.session) in connect
    agent.do(Connected(agent.session))
    (hello,) = agent.sent(Hello)
    return hello


def of(effects: list[AgentEffect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


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
    for message in (announce(W1, 1), LeaveGroup(W1, 1, True, "join"), ReportAck(W1, 1, 0, True)):
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


def test_reports_are_sent_again_in_order_after_the_welcome_until_they_are_acknowledged() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
    for index in range(3):
        agent.process(1, reported(W1, 1, index))
        assert agent.sent() == [reported(W1, 1, index)]
    agent.process(1, reported(W1, 1, 2))
    assert agent.sent() == [], "the same report is one report"
    agent.hear(ReportAck(W1, 1, 1, True))
    reconnect(agent)
    assert agent.sent(Reported) == []
    agent.hear(Welcome("c"))
    assert agent.sent(Reported) == [reported(W1, 1, 0), reported(W1, 1, 2)]


@pytest.mark.parametrize("then", ["finished", "broken", "exited"])
def test_a_worker_is_not_said_to_have_left_before_its_reports_are_sent(then: str) -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    agent.process(1, reported(W1, 1, 0, "/ckpt"))
    if then == "exited":
        agent.do(ProcessExited(1, CRASHED))
    else:
        agent.process(1, said_by(W1, WorkerPhase(then), 1))
    agent.at_deadline()
    agent.do(Connected(agent.session))
    (hello,) = agent.sent(Hello)
    assert [(r.phase, r.exit) for r in hello.workers] == [(WorkerPhase.TRAINING, None)]
    agent.hear(Welcome("c"))
    first, second = agent.sent()
    assert first == reported(W1, 1, 0, "/ckpt")
    assert second.report.phase is WorkerPhase(then)


def test_reports_are_bounded_and_those_with_a_checkpoint_are_never_dropped() -> None:
    notes: list[AgentEffect] = []
    kept = Unacknowledged(notes, limit=3)
    for index in range(10):
        kept.add(reported(W1, 1, index, checkpoint="/c" if index in (0, 1) else ""))
    assert [one.report.index for one in kept.all()] == [0, 1, 9]
    assert len(notes) == 7


def test_telemetry_is_passed_on_or_dropped() -> None:
    agent = with_worker()
    agent.process(1, Progress(W1, 1, 5))
    assert agent.sent() == [Progress(W1, 1, 5)]
    agent.process(1, Progress(W2, 1, 5))
    assert agent.sent() == []
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    assert agent.process(1, Progress(W1, 1, 6)) == []


# ---------------------------------------------------------------- stopping workers


def test_a_stopped_worker_is_asked_and_killed_after_its_grace_period() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 2 * S, "job stopped"))
    assert agent.told(1) == [Stop("job stopped", 2 * S)]
    assert agent.hear(StopWorker(W1, 9 * S, "job stopped")) == [], "no second stop, no more time"
    effects = agent.pass_time(1.9)
    assert not of(effects, Kill)
    assert [kill.process_id for kill in of(agent.pass_time(0.2), Kill)] == [1]
    agent.do(ProcessExited(1, KILLED))
    assert agent.exit_of(W1) == ExitCause(
        ExitKind.STOPPED, 0, "job stopped (was ended by signal 9)"
    )


def test_a_worker_that_ends_by_itself_after_a_stop_was_stopped() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 2 * S, "job stopped"))
    agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED


def test_a_stop_without_grace_kills_at_once() -> None:
    agent = with_worker()
    assert of(agent.hear(StopWorker(W1, 0, "hung")), Kill) == [Kill(1, "hung")]
    assert agent.hear(StopWorker(W1, 0, "hung")) == []


def test_nothing_is_said_to_a_process_that_is_killed() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 0, "hung"))
    for message in (announce(W1, 1), LeaveGroup(W1, 1, True, "x"), ReportAck(W1, 1, 0, True)):
        assert agent.hear(message) == []
    assert not agent.pass_time(60)


def test_a_second_stop_may_shorten_the_grace_period() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 20 * S, "slow"))
    agent.hear(StopWorker(W1, 1 * S, "fast"))
    assert of(agent.pass_time(1.0), Kill)


def test_a_worker_stopped_before_it_has_a_process_has_exited() -> None:
    agent = registered()
    agent.hear(StartWorker(W1, spec()))
    agent.hear(StopWorker(W1, 5 * S, "not needed"))
    assert agent.exit_of(W1) == ExitCause(ExitKind.STOPPED, 0, "not needed")
    agent.warm(1)
    assert agent.told(1) == []


def test_a_worker_that_does_not_run_here_is_said_to_have_exited() -> None:
    agent = registered()
    agent.hear(StopWorker(W3, 0, "unknown"))
    cause = agent.exit_of(W3)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED
    assert reconnect(agent).workers == ()


def test_processes_that_turn_out_to_be_too_many_are_ended() -> None:
    agent = registered()
    for worker_id in (W1, W2):
        agent.hear(StartWorker(worker_id, spec()))
    for process_id in (1, 2, 3):
        agent.do(ProcessStarted(process_id, 1000 + process_id))
    agent.hear(StopWorker(W1, 0, "x"))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [3], "the newest goes first"
    agent.hear(StopWorker(W2, 0, "x"))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [2]
    agent.do(ProcessExited(3, KILLED))
    assert "spare_failed" not in [note.name for note in agent.notes], "what we ended is no failure"


# ---------------------------------------------------------------- spares that fail


def test_a_spare_that_ends_is_replaced_after_a_growing_pause() -> None:
    agent = registered()
    pauses = []
    for process_id in (1, 2, 3):
        agent.do(ProcessStarted(process_id, 50))
        assert not of(agent.do(ProcessExited(process_id, CRASHED)), Spawn)
        began_ns = agent.now_ns
        assert of(agent.at_deadline(), Spawn) == [Spawn(process_id + 1)]
        pauses.append((agent.now_ns - began_ns) / S)
    assert pauses == [0.1, 0.2, 0.4]


def test_a_warm_spare_ends_a_row_of_failures() -> None:
    agent = registered()
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.at_deadline()
    agent.warm(2)
    began_ns = agent.now_ns
    agent.do(ProcessExited(2, KILLED))
    agent.at_deadline()
    assert agent.now_ns - began_ns == ns(0.1)


def test_spares_are_given_up_after_too_many_failures_and_tried_again_for_a_worker() -> None:
    agent = registered(config=AgentConfig(spawn_failures_max=2))
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.at_deadline()
    agent.do(SpawnFailed(2, "EAGAIN"))
    assert agent.machine.next_deadline_ns() is None, "no hot loop"
    agent.hear(StartWorker(W1, spec()))
    assert agent.exit_of(W1) is None
    effects = agent.last if of(agent.last, Spawn) else agent.at_deadline()
    assert of(effects, Spawn) == [Spawn(3)]
    agent.warm(3)
    assert [type(message) for message in agent.told(3)] == [Assign]
    assert of(agent.last, Spawn) == [Spawn(4)], "spawning works again, the spare is back"


def test_workers_that_no_process_is_for_are_reported_after_too_many_failures() -> None:
    agent = registered(config=AgentConfig(spawn_failures_max=2))
    agent.hear(StartWorker(W1, spec()))
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.do(SpawnFailed(2, "EAGAIN"))
    assert agent.exit_of(W1) is None, "attempts made together are one failure"
    agent.at_deadline()
    agent.do(SpawnFailed(3, "out of memory"))
    assert agent.exit_of(W1) is None, "process 4 may still get warm"
    agent.do(SpawnFailed(4, "out of memory"))
    agent.at_deadline()
    agent.do(SpawnFailed(5, "out of memory"))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.SPAWN_FAILED
    assert "3 processes in a row did not start: out of memory" in cause.detail


def test_a_spare_that_never_warms_up_is_killed_and_counts_as_failed() -> None:
    agent = registered()
    agent.do(ProcessStarted(1, 50))
    effects = agent.pass_time(301)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert of(effects, Spawn) == [Spawn(2)]
    assert agent.do(ProcessExited(1, KILLED)) == []


# ---------------------------------------------------------------- hangs


def test_a_worker_is_pinged_and_lives_as_long_as_it_answers() -> None:
    agent = with_worker()
    for number in range(1, 50):
        agent.at_deadline()
        assert agent.told(1) == [Ping(number)]
        agent.process(1, Pong(number))
        assert not of(agent.last, Kill)


def test_spares_are_not_pinged() -> None:
    agent = with_spare()
    assert agent.machine.next_deadline_ns() is None


def test_a_worker_that_does_not_answer_is_killed_as_hung() -> None:
    agent = with_worker()
    agent.at_deadline()
    agent.process(1, Pong(1))
    effects = agent.pass_time(CONFIG.hang_timeout_s + CONFIG.ping_interval_s + 0.1)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    agent.do(ProcessExited(1, KILLED))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.HUNG
    assert "did not answer for 30 s" in cause.detail


def test_a_slow_answer_is_a_sign_of_life_and_a_repeated_or_invented_one_is_not() -> None:
    agent = with_worker(config=AgentConfig(hang_timeout_s=2.0))
    agent.at_deadline()
    agent.at_deadline()
    agent.process(1, Pong(1))
    assert not of(agent.pass_time(1.5), Kill), "it was silent for more than 2 s only in parts"
    agent.process(1, Pong(1))
    agent.process(1, Pong(99))
    assert not of(agent.pass_time(0.4), Kill)
    assert of(agent.pass_time(0.2), Kill)


def test_the_agents_own_sleep_is_not_a_workers_silence() -> None:
    agent = with_worker()
    agent.at_deadline()
    agent.do(Tick(), after_s=3600)
    assert not of(agent.last, Kill)
    agent.process(1, Pong(1))
    assert not of(agent.pass_time(1), Kill)


@pytest.mark.parametrize("make", [with_worker, with_spare], ids=lambda make: make.__name__)
def test_a_process_that_stays_stopped_is_killed(make: Any) -> None:
    agent = make()
    agent.do(ProcessStopped(1, True))
    agent.do(ProcessStopped(1, True), after_s=0.3)
    assert not of(agent.last, Kill)
    effects = agent.pass_time(0.2)
    assert of(effects, Kill) == [Kill(1, "stopped (SIGSTOP) for 0.5 s")]
    agent.do(ProcessExited(1, KILLED))
    if make is with_worker:
        cause = agent.exit_of(W1)
        assert cause is not None
        assert cause.kind is ExitKind.HUNG


def test_a_process_that_was_stopped_for_a_moment_lives() -> None:
    agent = with_worker()
    agent.do(ProcessStopped(1, True))
    agent.do(ProcessStopped(1, False), after_s=0.3)
    assert not of(agent.pass_time(0.5), Kill)


def test_a_process_that_ended_by_itself_was_not_hung() -> None:
    agent = with_worker()
    agent.do(ProcessStopped(1, True))
    agent.pass_time(0.5)
    agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 3)))
    assert agent.exit_of(W1) == ExitCause(ExitKind.CODE, 3)


# ---------------------------------------------------------------- drain


def test_a_drain_is_told_at_once_and_in_every_hello() -> None:
    agent = with_worker()
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert agent.sent(DrainNotice) == [DrainNotice("SIGTERM", 30 * S)]
    agent.pass_time(10)
    hello = reconnect(agent)
    assert (hello.draining, hello.drain_reason) == (True, "SIGTERM")
    assert 19 * S < hello.drain_timeout_ns < 20 * S
    agent.hear(Welcome("c"))
    assert agent.sent(DrainNotice) == [], "hello has said it"


def test_a_drain_signalled_between_hello_and_welcome_is_told_after_it() -> None:
    agent = with_worker()
    reconnect(agent)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert agent.sent() == []
    agent.hear(Welcome("c"))
    assert len(agent.sent(DrainNotice)) == 1


def test_a_draining_node_takes_no_worker_and_keeps_no_spare() -> None:
    agent = with_worker()
    agent.warm(2)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [2]
    agent.hear(StartWorker(W2, spec()))
    assert not of(agent.last, Spawn)
    cause = agent.exit_of(W2)
    assert cause is not None
    assert "about to leave: SIGTERM" in cause.detail


def test_a_released_agent_ends_when_its_workers_have() -> None:
    agent = with_worker()
    agent.warm(2)
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    agent.hear(Release("drained"))
    assert agent.told(1) == [Stop("drained", 5 * S)]
    effects = agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
    assert agent.exit_of(W1) is not None, "the last word comes before the end"
    assert effects[-1] == ExitAgent(75, "drained")
    assert agent.do(Tick()) == []
    assert agent.machine.next_deadline_ns() is None


def test_a_released_agent_without_workers_ends_at_once() -> None:
    agent = with_spare()
    effects = agent.hear(Release("operator"))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(75, "operator")


def test_a_drain_ends_by_its_deadline_at_the_latest() -> None:
    agent = with_worker()
    agent.do(DrainSignalled("SIGTERM", 20 * S))
    began_ns = agent.now_ns
    effects: list[AgentEffect] = []
    stops: list[float] = []
    while not of(effects, ExitAgent):
        effects = agent.at_deadline()
        for message in agent.told(1):
            if isinstance(message, Ping):
                agent.process(1, Pong(message.number))
            else:
                assert message == Stop("the time to drain is over: SIGTERM", 5 * S)
                stops.append((agent.now_ns - began_ns) / S)
    assert stops == [15.0]
    assert [type(effect) for effect in effects] == [Kill, ExitAgent]
    assert agent.now_ns - began_ns == 20 * S
    assert effects[-1].code == 75


@pytest.mark.parametrize("first_s", [30, 0], ids=["after a first signal", "at once"])
def test_a_signal_without_time_ends_everything_now(first_s: int) -> None:
    agent = with_worker()
    agent.do(ProcessStarted(2, 1002))
    effects = agent.do(DrainSignalled("SIGTERM", first_s * S))
    if first_s:
        assert [kill.process_id for kill in of(effects, Kill)] == [2]
        effects = agent.do(DrainSignalled("SIGTERM again", 0))
    assert 1 in {kill.process_id for kill in of(effects, Kill)}
    assert effects[-1] == ExitAgent(75, "the time to drain is over: SIGTERM")
    assert agent.machine.next_deadline_ns() is None


def test_a_signal_without_time_hastens_an_end_that_has_begun() -> None:
    agent = with_worker()
    agent.hear(Release("drained"))
    assert not of(agent.last, ExitAgent)
    effects = agent.do(DrainSignalled("SIGTERM", 0))
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert effects[-1] == ExitAgent(75, "drained")


@pytest.mark.parametrize("make", [Agent, connecting], ids=["never stepped", "connecting"])
def test_a_node_that_nobody_knows_and_that_runs_nothing_leaves_at_once(make: Any) -> None:
    agent = make()
    effects = agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert effects[-1] == ExitAgent(75, "SIGTERM")


def test_a_cut_off_node_stays_while_it_drains_until_its_last_worker_is_gone() -> None:
    agent = with_worker()
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    assert not of(agent.do(DrainSignalled("SIGTERM", 30 * S)), ExitAgent)
    assert of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)


def test_a_cut_off_node_stays_while_it_drains_for_reports_that_nobody_has_taken() -> None:
    agent = with_worker()
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 1))
    agent.process(1, reported(W1, 1, 0))
    agent.do(ConnectionLost(agent.session, "reset", 0.0))
    agent.do(DrainSignalled("SIGTERM", 30 * S))
    assert not of(agent.do(ProcessExited(1, CRASHED)), ExitAgent)
    agent.at_deadline()
    agent.do(Connected(agent.session))
    agent.hear(Welcome("c"))
    assert agent.sent(Reported) == [reported(W1, 1, 0)]


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

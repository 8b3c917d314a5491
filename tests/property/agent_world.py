"""An operating system and a coordinator around one agent, as a model that checks every effect.

Rule: the model knows only what it did itself and what the machine asked it to do.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from elastic.core.config import AgentConfig
from elastic.core.events import agent as ae
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import (
    ExitCause,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.agent import AgentMachine
from elastic.core.messages import (
    Assign,
    ForgetWorker,
    Hello,
    LeaveGroup,
    Ping,
    Pong,
    Progress,
    Refusal,
    Release,
    ReportAck,
    SaveState,
    StartWorker,
    StopWorker,
    Warm,
    Welcome,
    WorkerUpdate,
)
from tests.property.machine_facts import (
    CAUSES,
    GENERATIONS,
    KILLED,
    NODE,
    WORKERS,
    S,
    announce,
    reported,
    spec,
    update,
    workers_of,
)

coordinator_messages = st.one_of(
    st.just(Welcome("c")),
    st.builds(Refusal, st.just("no"), st.just(False)),
    st.builds(lambda w, gpus: StartWorker(w, spec(gpus)), workers_of, st.integers(0, 2)),
    st.builds(StopWorker, workers_of, st.sampled_from([0, S, 9 * S]), st.just("why")),
    st.builds(ForgetWorker, workers_of),
    st.builds(announce, workers_of, GENERATIONS),
    st.builds(LeaveGroup, workers_of, GENERATIONS, st.booleans(), st.just("why")),
    st.builds(SaveState, workers_of, GENERATIONS, st.integers(1, 3)),
    st.builds(ReportAck, workers_of, GENERATIONS, st.integers(0, 2), st.booleans()),
)
process_messages = st.one_of(
    st.builds(Warm, st.integers(1, 9)),
    st.builds(Pong, st.integers(0, 5)),
    st.builds(update, workers_of, st.sampled_from(WorkerPhase), GENERATIONS),
    st.builds(reported, workers_of, GENERATIONS, st.integers(0, 2)),
    st.builds(Progress, workers_of, GENERATIONS, st.just(1)),
)


class AgentWorld(RuleBasedStateMachine):
    """An operating system and a coordinator around one agent."""

    @initialize(spares=st.integers(0, 2), failures=st.integers(1, 3), devices=st.integers(0, 3))
    def begin(self, spares: int, failures: int, devices: int) -> None:
        config = AgentConfig(num_spares=spares, spawn_failures_max=failures, control_timeout_s=3.0)
        self.num_devices = devices
        self.machine = AgentMachine(NODE, config, tuple(str(at) for at in range(devices)))
        self.now_ns = 0
        self.asked: list[int] = []
        self.live: dict[int, bool] = {}  # process -> has it been killed
        self.gone: set[int] = set()
        self.warm: set[int] = set()
        self.opened: dict[int, Assign] = {}
        self.assigned: dict[int, Assign] = {}
        self.pings: dict[int, int] = {}
        self.session = SessionId("")
        self.sessions: list[SessionId] = []
        self.link = "none"  # none, wanted, standing, greeted, registered
        self.accepted: dict[WorkerId, bool] = {}  # worker -> may the machine have forgotten it
        self.told: dict[WorkerId, WorkerReport] = {}
        self.exit: ae.ExitAgent | None = None
        self.step(Tick())

    def step(self, event: Any) -> tuple[Any, ...]:
        was_over = self.exit is not None
        effects = self.machine.step(event, self.now_ns)
        assert not (was_over and effects), "the machine is over"
        for effect in effects:
            assert self.exit is None, f"{effect} after the exit"
            self.perform(effect)
        return effects

    def perform(self, effect: Any) -> None:
        if isinstance(effect, ae.Connect):
            assert self.link == "none"
            assert effect.session not in self.sessions
            self.session, self.link = effect.session, "wanted"
            self.sessions.append(effect.session)
        elif isinstance(effect, ae.Disconnect):
            assert (effect.session, self.link != "none") == (self.session, True)
            self.link = "none"
        elif isinstance(effect, ae.SendCoordinator):
            self.sent(effect)
        elif isinstance(effect, ae.Spawn):
            assert effect.process_id not in self.asked
            self.asked.append(effect.process_id)
        elif isinstance(effect, ae.OpenLog):
            self.opened[effect.process_id] = effect.assign
        elif isinstance(effect, ae.SendProcess):
            self.tell(effect)
        elif isinstance(effect, ae.Kill):
            assert self.live.get(effect.process_id) is False, f"{effect}: gone, or killed already"
            self.live[effect.process_id] = True
        elif isinstance(effect, ae.ExitAgent):
            self.exit = effect
            assert all(self.live.values()), f"not killed at the exit: {self.live}"
        else:
            assert isinstance(effect, Note)

    def sent(self, effect: ae.SendCoordinator) -> None:
        assert effect.session == self.session
        if isinstance(effect.message, Hello):
            assert self.link == "standing"
            self.link = "greeted"
            self.told = {report.worker_id: report for report in effect.message.workers}
        else:
            assert self.link == "registered", f"{effect.message} on a link that is {self.link}"
        if isinstance(effect.message, WorkerUpdate):
            report = effect.message.report
            assert (report.exit is not None) == (report.phase is WorkerPhase.EXITED)
            self.told[report.worker_id] = report

    def tell(self, effect: ae.SendProcess) -> None:
        process_id = effect.process_id
        assert self.live.get(process_id) is False, f"{effect}: gone, killed, or never started"
        if isinstance(effect.message, Assign):
            assert process_id in self.warm
            assert process_id not in self.assigned
            assert self.opened[process_id] == effect.message
            self.assigned[process_id] = effect.message
        else:
            assert process_id in self.assigned, "only a worker is told anything"
        if isinstance(effect.message, Ping):
            self.pings[process_id] = effect.message.number

    def pending(self) -> list[int]:
        return [p for p in self.asked if p not in self.live and p not in self.gone]

    def running(self) -> dict[WorkerId, int]:
        return {
            assign.worker_id: process_id
            for process_id, assign in self.assigned.items()
            if process_id in self.live
        }

    # ------------------------------------------------------------ what may happen

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.6, 4.0]))
    def time_passes(self, seconds: float) -> None:
        until_ns = self.now_ns + round(seconds * S)
        for _ in range(200):
            due_ns = self.machine.next_deadline_ns()
            if due_ns is None or due_ns > until_ns:
                break
            self.now_ns = max(self.now_ns, due_ns)
            self.step(Tick())
            following_ns = self.machine.next_deadline_ns()
            assert following_ns is None or following_ns > self.now_ns, "a hot loop"
        self.now_ns = until_ns
        self.step(Tick())

    @precondition(lambda self: self.link == "wanted")
    @rule()
    def the_stream_stands(self) -> None:
        self.link = "standing"
        self.step(ae.Connected(self.session))

    @precondition(lambda self: self.link == "greeted")
    @rule()
    def the_coordinator_welcomes(self) -> None:
        self.link = "registered"
        self.step(ae.CoordinatorMessageReceived(self.session, Welcome("c")))

    @rule(worker_id=workers_of, gpus=st.integers(0, 2))
    def all_goes_well_for_a_moment(self, worker_id: WorkerId, gpus: int) -> None:
        self.connect_and_warm_up()
        if self.link == "registered" and self.exit is None:
            self.the_coordinator_says(StartWorker(worker_id, spec(gpus)))
            self.connect_and_warm_up()

    @precondition(lambda self: self.link == "registered" and self.running())
    @rule(data=st.data())
    def the_coordinator_speaks_of_a_running_worker(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.running())))
        generation = data.draw(GENERATIONS)
        messages = [
            StopWorker(worker_id, 0, "why"),
            StopWorker(worker_id, S, "why"),
            announce(worker_id, generation),
            LeaveGroup(worker_id, generation, False, "why"),
            ReportAck(worker_id, generation, 0, True),
            ForgetWorker(worker_id),
        ]
        self.the_coordinator_says(data.draw(st.sampled_from(messages)))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def a_worker_speaks_of_itself(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.running())))
        generation = data.draw(GENERATIONS)
        pings = self.pings.get(self.running()[worker_id], 0)
        messages = [
            update(worker_id, data.draw(st.sampled_from(WorkerPhase)), generation),
            reported(worker_id, generation, data.draw(st.integers(0, 2))),
            Pong(pings),
            Pong(pings),
        ]
        message = data.draw(st.sampled_from(messages))
        self.step(ae.ProcessMessageReceived(self.running()[worker_id], message))

    @precondition(lambda self: self.link != "none")
    @rule(jitter=st.sampled_from([0.0, 0.3, 1.0, 7.0]))
    def the_stream_is_lost(self, jitter: float) -> None:
        self.link = "none"
        self.step(ae.ConnectionLost(self.session, "reset", jitter))

    @precondition(lambda self: self.link in ("greeted", "registered"))
    @rule(message=coordinator_messages)
    def the_coordinator_says(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.link = "registered"
        if isinstance(message, StartWorker) and self.link == "registered":
            self.accepted[message.worker_id] = False
        is_forgotten = isinstance(message, ForgetWorker) and self.link == "registered"
        if is_forgotten and message.worker_id in self.accepted:
            self.accepted[message.worker_id] = message.worker_id not in self.running()
        self.step(ae.CoordinatorMessageReceived(self.session, message))

    @rule(data=st.data(), message=coordinator_messages)
    def an_old_session_speaks(self, data: st.DataObject, message: Any) -> None:
        if self.link == "none":
            olds = [*self.sessions, SessionId("n/0/1")]
        else:
            olds = [*self.sessions[:-1], SessionId("n/0/1")]
        session = data.draw(st.sampled_from(olds))
        for event in (
            ae.Connected(session),
            ae.CoordinatorMessageReceived(session, message),
            ae.CoordinatorMessageReceived(session, Refusal("old", True)),
            ae.CoordinatorMessageReceived(session, Release("old")),
            ae.ConnectionLost(session, "old", 0.5),
        ):
            for effect in self.step(event):
                assert isinstance(effect, (ae.Connect, ae.Spawn, Note, ae.SendProcess)), effect

    @precondition(lambda self: self.exit is None)
    @rule(data=st.data(), fails=st.booleans())
    def a_process_comes_to_stand(self, data: st.DataObject, fails: bool) -> None:
        pending = self.pending()
        if pending:
            process_id = data.draw(st.sampled_from(pending))
            if fails:
                self.gone.add(process_id)
                self.step(ae.SpawnFailed(process_id, "EAGAIN"))
            else:
                self.live[process_id] = False
                self.step(ae.ProcessStarted(process_id, 1000 + process_id))

    @precondition(lambda self: self.exit is None)
    @rule()
    def nothing_can_be_spawned_for_a_while(self) -> None:
        before, until_ns = len(self.asked), self.now_ns + S
        for _ in range(200):
            pending = self.pending()
            for process_id in pending:
                self.gone.add(process_id)
                self.step(ae.SpawnFailed(process_id, "EAGAIN"))
            due_ns = self.machine.next_deadline_ns()
            if pending and self.exit is None:
                continue
            if self.exit is not None or due_ns is None or due_ns > until_ns:
                break
            self.now_ns = max(self.now_ns, due_ns)
            self.step(Tick())
        rounds = 6  # at 0, 0.1, 0.3, 0.7 s; one for what was begun before
        assert len(self.asked) - before <= rounds * (len(WORKERS) + 2), "a hot loop"
        assert self.exit is not None or not self.pending()

    @rule(data=st.data())
    def a_process_gets_warm(self, data: st.DataObject) -> None:
        cold = [p for p in self.live if p not in self.warm]
        if cold:
            process_id = data.draw(st.sampled_from(cold))
            self.warm.add(process_id)
            self.step(ae.ProcessMessageReceived(process_id, Warm(1000 + process_id)))

    @rule(data=st.data(), message=process_messages)
    def a_process_says(self, data: st.DataObject, message: Any) -> None:
        if self.live:
            process_id = data.draw(st.sampled_from(sorted(self.live)))
            if isinstance(message, Warm):
                self.warm.add(process_id)
            self.step(ae.ProcessMessageReceived(process_id, message))

    @rule(data=st.data(), cause=st.sampled_from(CAUSES))
    def a_process_exits(self, data: st.DataObject, cause: ExitCause) -> None:
        if self.live:
            process_id = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[process_id]
            self.gone.add(process_id)
            self.step(ae.ProcessExited(process_id, cause))

    @rule(data=st.data(), stopped=st.booleans())
    def a_process_is_stopped(self, data: st.DataObject, stopped: bool) -> None:
        if self.live:
            process_id = data.draw(st.sampled_from(sorted(self.live)))
            self.step(ae.ProcessStopped(process_id, stopped))

    @rule(process_id=st.integers(50, 60), message=process_messages)
    def a_process_that_does_not_exist_does_things(self, process_id: int, message: Any) -> None:
        for event in (
            ae.ProcessStarted(process_id, 5),
            ae.ProcessMessageReceived(process_id, message),
            ae.ProcessStopped(process_id, True),
            ae.SpawnFailed(process_id, "x"),
            ae.ProcessExited(process_id, KILLED),
        ):
            self.step(event)

    @precondition(lambda self: len(self.sessions) > 2)
    @rule(timeout_ns=st.sampled_from([0, S, 30 * S]))
    def the_node_is_drained(self, timeout_ns: int) -> None:
        self.step(ae.DrainSignalled("SIGTERM", timeout_ns))

    @precondition(lambda self: len(self.sessions) > 2 and self.link == "registered")
    @rule()
    def the_node_is_released(self) -> None:
        self.step(ae.CoordinatorMessageReceived(self.session, Release("drained")))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def every_accepted_worker_is_told_of_as_it_is(self) -> None:
        if self.link != "registered" or self.exit is not None:
            return
        running = self.running()
        for worker_id, may_be_forgotten in self.accepted.items():
            assert may_be_forgotten or worker_id in self.told, f"{worker_id} is not mentioned"
        for worker_id in running:
            assert self.told[worker_id].phase is not WorkerPhase.EXITED
        was_assigned = {assign.worker_id for assign in self.assigned.values()}
        for worker_id in was_assigned - set(running):
            report = self.told.get(worker_id)
            is_again = self.accepted.get(worker_id) is False and report is not None
            assert report is None or report.exit is not None or is_again

    @invariant()
    def no_device_has_two_workers_and_no_worker_two_processes(self) -> None:
        at_work = [assign for p, assign in self.assigned.items() if p in self.live]
        taken = [device for assign in at_work for device in assign.devices]
        assert len(taken) == len(set(taken))
        ids = [assign.worker_id for assign in at_work]
        assert len(ids) == len(set(ids))

    def teardown(self) -> None:
        """From anywhere, when all goes well again, workers end reported and the agent leaves."""
        for _ in range(400):
            if self.exit is not None:
                break
            self.go_well()
        assert self.exit is not None, "the agent does not end"
        assert not [p for p in self.live if not self.live[p]]

    def connect_and_warm_up(self) -> None:
        due_ns = self.machine.next_deadline_ns()
        if self.link == "none" and due_ns is not None:
            self.now_ns = max(self.now_ns, due_ns)
            self.step(Tick())
        if self.exit is not None:
            return
        if self.link == "wanted":
            self.the_stream_stands()
        elif self.link == "greeted":
            self.the_coordinator_welcomes()
        for process_id in self.pending():
            self.live[process_id] = False
            self.step(ae.ProcessStarted(process_id, 1000 + process_id))
        for process_id in [p for p in self.live if p not in self.warm]:
            self.warm.add(process_id)
            self.step(ae.ProcessMessageReceived(process_id, Warm(1000 + process_id)))

    def go_well(self) -> None:
        self.connect_and_warm_up()
        for process_id in [p for p in self.live if self.live[p]]:
            del self.live[process_id]
            self.gone.add(process_id)
            self.step(ae.ProcessExited(process_id, KILLED))
        if self.link == "registered" and self.exit is None:
            for worker_id in list(self.accepted):
                stop = StopWorker(worker_id, 0, "the end")
                self.step(ae.CoordinatorMessageReceived(self.session, stop))
            self.every_accepted_worker_is_told_of_as_it_is()
            known = [self.told.get(worker_id) for worker_id in self.accepted]
            if all(report is None or report.exit is not None for report in known):
                self.step(ae.CoordinatorMessageReceived(self.session, Release("the end")))
        due_ns = self.machine.next_deadline_ns()
        if due_ns is not None:
            self.now_ns = max(self.now_ns, due_ns)
            self.step(Tick())

"""An agent's machine with a clock in the test's hands, and agents brought to where tests begin."""

from __future__ import annotations

from typing import Any

from elastic.core.config import AgentConfig, JobSpec, ns
from elastic.core.events.agent import (
    AgentEffect,
    AgentEvent,
    Connect,
    Connected,
    ConnectionLost,
    CoordinatorMessageReceived,
    ProcessMessageReceived,
    ProcessStarted,
    SendCoordinator,
    SendProcess,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import (
    Assignment,
    Entry,
    EntryKind,
    ExitCause,
    ExitKind,
    JobId,
    Node,
    NodeId,
    Resources,
    SessionId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.agent import AgentMachine
from elastic.core.messages import (
    Announce,
    CoordinatorMessage,
    Hello,
    PipeToAgent,
    Report,
    Reported,
    StartWorker,
    Warm,
    Welcome,
    WorkerUpdate,
)

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


def reported_by(worker_id: WorkerId, phase: WorkerPhase, generation: int = 0, **more: Any) -> Any:
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
        return self.do(CoordinatorMessageReceived(self.session, message))

    def process(self, process_id: int, message: PipeToAgent) -> list[AgentEffect]:
        return self.do(ProcessMessageReceived(process_id, message))

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

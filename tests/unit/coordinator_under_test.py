"""A coordinator's machine with agents and a store played around it, and words to drive them.

Rule: what is played here is faithful and dumb: agents list in a hello all that they were not told
to forget, a worker does only what a test says, and the store keeps what `Persist` gave it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.events.coordinator import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    CheckpointRequested,
    CoordinatorEffect,
    CoordinatorEvent,
    Forget,
    NodeCordonRequested,
    NodeDrainRequested,
    PauseRequested,
    Persist,
    PersistNodes,
    Recovered,
    Reply,
    ResumeRequested,
    ScaleRequested,
    SendAgent,
    StopRequested,
    SubmitRequested,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import (
    CollectiveCount,
    ExitCause,
    ExitKind,
    Failure,
    JobId,
    Node,
    NodeId,
    SessionId,
    Strategy,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.core.messages import (
    AgentMessage,
    Announce,
    DrainNotice,
    ForgetWorker,
    Hello,
    Probe,
    ProbeAck,
    Progress,
    Pulse,
    Report,
    Reported,
    StartWorker,
    WorkerUpdate,
)
from elastic.core.records import JobRecord, NodesRecord
from elastic.core.telemetry import Telemetry
from elastic.core.view import JobView, NodeView
from tests.strategies import SCRIPT

MS = 1_000_000
KILLED = ExitCause(ExitKind.SIGNAL, int(signal.SIGKILL))
RAISED = ExitCause(ExitKind.CODE, 1)
STOPPED = ExitCause(ExitKind.STOPPED)
CONFIG = CoordinatorConfig(
    start_timeout_s=2, node_grace_s=0.5, adoption_grace_s=10, broken_grace_s=0.3,
    form_timeout_s=20, boundary_timeout_s=30, crash_loop_limit=4, healthy_after_s=30,
    restart_delay_s_max=2, ended_jobs_kept=2, jobs_max=4,
)  # fmt: skip
Kind = TypeVar("Kind")


def spec(job: str, low: int = 1, high: int | None = None, **changes: Any) -> JobSpec:
    """A job whose name is its id; a strategy may be given by name."""
    if isinstance(changes.get("strategy"), str):
        changes["strategy"] = Strategy(changes["strategy"])
    return JobSpec(
        **{
            "job_id": JobId(job), "name": job, "entry": SCRIPT, "min_workers": low,
            "max_workers": high or low, **changes,
        }
    )  # fmt: skip


@dataclass
class PlayedAgent:
    """What an agent remembers over connections."""

    node: Node
    session: SessionId | None = None
    workers: dict[WorkerId, WorkerReport] = field(default_factory=dict)


class Coordinator:
    """A machine under test, after its first event.

    Attributes:
        effects: of the last step.
        notes: names of all notes so far, with job and fields.
        store: what is durable.
        unix_ns: the wall clock when the machine's was 0.
        announced: the newest announcement that reached each worker.
        names: the node of each session, also of those that are over.
        dies_after_persist: the next step is the last of this life, and is cut off behind its
            first `Persist`.
        answers_probes: agents answer those that come while time passes.
    """

    def __init__(self, config: CoordinatorConfig = CONFIG) -> None:
        self.config = config
        self.now_ns = 0
        self.unix_ns = 1_700_000_000_000_000_000
        self.term = 0
        self.sessions = 0
        self.requests = 0
        self.agents: dict[str, PlayedAgent] = {}
        self.effects: tuple[CoordinatorEffect, ...] = ()
        self.notes: list[Note] = []
        self.store: dict[JobId, JobRecord] = {}
        self.nodes_stored = NodesRecord()
        self.announced: dict[WorkerId, Announce] = {}
        self.names: dict[SessionId, str] = {}
        self.dies_after_persist = False
        self.answers_probes = True
        self.restart()

    # ------------------------------------------------------------ the door

    def step(self, event: CoordinatorEvent) -> None:
        """Take one event; perform its effects, or only those up to the first `Persist`."""
        self.effects = self.machine.step(event, self.now_ns)
        if self.dies_after_persist:
            self.dies_after_persist = False
            last = next(i for i, e in enumerate(self.effects) if isinstance(e, Persist))
            self.effects = self.effects[: last + 1]
        for effect in self.effects:
            self._perform(effect)

    def _perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Persist):
            self.store.update({record.spec.job_id: record for record in effect.records})
        elif isinstance(effect, PersistNodes):
            self.nodes_stored = effect.record
        elif isinstance(effect, Forget):
            for job_id in effect.job_ids:
                del self.store[job_id]
        elif isinstance(effect, Note):
            self.notes.append(effect)
        elif isinstance(effect, SendAgent):
            agent = self.at(effect.session)
            if agent is not None:
                self._deliver(agent, effect.message)

    def _deliver(self, agent: PlayedAgent, message: Any) -> None:
        if isinstance(message, StartWorker):
            report = WorkerReport(message.worker_id, message.spec.job_id, WorkerPhase.STARTING)
            agent.workers.setdefault(message.worker_id, report)
        elif isinstance(message, ForgetWorker):
            agent.workers.pop(message.worker_id, None)
        elif isinstance(message, Announce):
            self.announced[message.assignment.worker_id] = message

    def at(self, session: SessionId) -> PlayedAgent | None:
        """Return the agent that listens at this session."""
        agent = self.agents.get(self.names.get(session, ""))
        return agent if agent is not None and agent.session == session else None

    def restart(self) -> None:
        """Begin another life of the coordinator with what the store holds; all streams break."""
        self.term += 1
        for agent in self.agents.values():
            agent.session = None
        self.machine = CoordinatorMachine(self.config, "coordinator")
        records, unix_ns = tuple(self.store.values()), self.unix_ns + self.now_ns
        self.step(Recovered(records, self.term, nodes=self.nodes_stored, unix_ns=unix_ns))

    def advance(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline; effects of all ticks are kept."""
        until = self.now_ns + ns(seconds)
        effects: list[CoordinatorEffect] = []
        while (due := self.machine.next_deadline_ns()) is not None and due <= until:
            assert due >= self.now_ns, "the machine asks for a moment that is over"
            self.now_ns = due
            self.step(Tick())
            effects.extend(self.effects)
            self._answer_probes()
            again = self.machine.next_deadline_ns()
            assert again is None or again > due, "the machine asks for the same moment again"
        self.now_ns = until
        self.effects = tuple(effects)

    def _answer_probes(self) -> None:
        for effect in self.of(SendAgent) if self.answers_probes else []:
            if isinstance(effect.message, Probe) and self.at(effect.session) is not None:
                self.step(AgentMessageReceived(effect.session, ProbeAck(effect.message.number)))

    # ------------------------------------------------------------ agents

    def agent(self, name: str, slots: int = 1, **changes: Any) -> None:
        """Connect an agent: the one of this name again, or a new life of it."""
        known = self.agents.get(name)
        incarnation = changes.pop("incarnation", known.node.incarnation if known else 1)
        hello = {k: changes.pop(k) for k in [*changes] if k in Hello.__dataclass_fields__}
        if known is None or known.node.incarnation != incarnation:
            node = Node(NodeId(name), incarnation, f"host-{name}", slots, **changes)
            known = self.agents[name] = PlayedAgent(node)
        self.sessions += 1
        known.session = SessionId(f"s{self.sessions}")
        self.names[known.session] = name
        self.step(
            AgentConnected(known.session, Hello(known.node, tuple(known.workers.values()), **hello))
        )

    def disconnect(self, name: str) -> None:
        """Break the agent's stream."""
        session, self.agents[name].session = self.agents[name].session, None
        assert session is not None, f"agent {name} is not connected"
        self.step(AgentDisconnected(session, "stream broke"))

    def says(self, name: str, message: AgentMessage) -> None:
        """Send a message of a connected agent."""
        session = self.agents[name].session
        assert session is not None, f"agent {name} is not connected"
        self.step(AgentMessageReceived(session, message))

    def notice(self, name: str, seconds: float, reason: str = "SIGTERM") -> None:
        """Let the agent say that its node is about to leave."""
        self.says(name, DrainNotice(reason, ns(seconds)))

    # ------------------------------------------------------------ workers

    def report_of(self, worker: str) -> WorkerReport:
        """Return what the agent knows of its worker."""
        return self.agents[worker.partition("/")[0]].workers[WorkerId(worker)]

    def update(self, worker: str, phase: WorkerPhase, generation: int = -1, **changes: Any) -> None:
        """Let a worker enter a phase, by default of the group that it is in.

        It enters a group that it was announced into by forming or training in it. While the
        agent's stream is broken only the agent knows of all this.
        """
        name, worker_id = worker.partition("/")[0], WorkerId(worker)
        before = self.report_of(worker)
        told = self.announced.get(worker_id)
        if generation < 0:
            enters = phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING)
            generation = told.assignment.generation if told and enters else before.generation
        report = replace(before, phase=phase, generation=generation, **changes)
        self.agents[name].workers[worker_id] = report
        if self.agents[name].session is not None:
            self.says(name, WorkerUpdate(report))

    def ready(self, *workers: str) -> None:
        """Let workers serve their store and wait for a generation."""
        for worker in workers:
            name, _, serial = worker.partition("/")
            address = f"host-{name}:{5000 + int(serial) % 1000}"
            self.update(worker, WorkerPhase.READY, store_address=address, pid=100)

    def training(self, *workers: str) -> None:
        """Let workers train in the generation that they were announced into."""
        for worker in workers:
            self.update(worker, WorkerPhase.TRAINING)

    def broken(self, worker: str) -> None:
        """Let a worker find its group broken."""
        self.update(worker, WorkerPhase.BROKEN)

    def finished(self, worker: str, result: str = "null") -> None:
        """Let a worker's train function return."""
        self.update(worker, WorkerPhase.FINISHED, result=result)

    def exits(self, worker: str, cause: ExitCause = KILLED, **changes: Any) -> None:
        """Let a worker's process end."""
        self.update(worker, WorkerPhase.EXITED, exit=cause, **changes)

    def raises(
        self, worker: str, message: str = "boom", position: str = "", damaged: str = ""
    ) -> None:
        """Let user code raise in a worker, which ends it."""
        traceback = f"Traceback: {message} in {worker}"
        failure = Failure("ValueError", message, traceback, position, damaged)
        self.exits(worker, RAISED, failure=failure)

    def reports(self, worker: str, index: int, **fields: Any) -> None:
        """Let a worker call `train.report` in its generation."""
        self.says(worker.partition("/")[0], self.reported(worker, index, **fields))

    def reported(self, worker: str, index: int, **fields: Any) -> Reported:
        """Return what the agent says for a call of `train.report`."""
        known = self.report_of(worker)
        told = self.announced.get(WorkerId(worker))
        report = Report(
            known.worker_id, known.job_id, known.generation, index,
            rank=told.assignment.rank if told else 0, metrics="{}",
        )  # fmt: skip
        return Reported(replace(report, **fields))

    def steps(
        self,
        worker: str,
        steps: int,
        first_ns: int = 0,
        place: tuple[int, int] = (0, 0),
        unsaved: str = "",
    ) -> None:
        """Let a worker tell how far it is, at which epoch and step, and what storage refuses."""
        generation = self.report_of(worker).generation
        progress = Progress(
            WorkerId(worker), generation, steps, first_ns,
            telemetry=Telemetry(epoch=place[0], step=place[1], unsaved=unsaved),
        )  # fmt: skip
        self.says(worker.partition("/")[0], progress)

    def pulse(
        self,
        worker: str,
        *begun: CollectiveCount,
        waits: float = 0,
        stands: float = 0,
        step: int = 0,
    ) -> None:
        """Let a worker say for how many seconds it waits or stands still; for none, it moves."""
        generation = self.report_of(worker).generation
        pulse = Pulse(WorkerId(worker), generation, ns(waits), ns(stands), 0, step, begun)
        self.says(worker.partition("/")[0], pulse)

    # ------------------------------------------------------------ users

    def submit(
        self, job: str, low: int = 1, high: int | None = None, *, by: str = "", **changes: Any
    ) -> Reply:
        """Submit a job; its name is its id."""
        return self._ask(SubmitRequested(self._request(), spec(job, low, high, **changes), by))

    def stop(self, job: str, reason: str = "", *, now: bool = False) -> Reply:
        """Stop a job."""
        return self._ask(StopRequested(self._request(), JobId(job), reason, now))

    def checkpoint(self, job: str) -> Reply:
        """Wish for a checkpoint now."""
        return self._ask(CheckpointRequested(self._request(), JobId(job)))

    def pause(self, job: str) -> Reply:
        """Pause a job."""
        return self._ask(PauseRequested(self._request(), JobId(job)))

    def resume(self, job: str) -> Reply:
        """Resume a job."""
        return self._ask(ResumeRequested(self._request(), JobId(job)))

    def scale(self, job: str, low: int = 0, high: int = 0) -> Reply:
        """Set other bounds."""
        return self._ask(ScaleRequested(self._request(), JobId(job), low, high))

    def cordon(self, name: str, reason: str = "upgrade", *, cordoned: bool = True) -> Reply:
        """Cordon a node, or take that back."""
        event = NodeCordonRequested(self._request(), NodeId(name), cordoned, reason)
        return self._ask(event)

    def drain(self, name: str, seconds: float = 30, reason: str = "upgrade") -> Reply:
        """Drain a node as an operator does."""
        return self._ask(NodeDrainRequested(self._request(), NodeId(name), ns(seconds), reason))

    def _request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def _ask(self, event: CoordinatorEvent) -> Reply:
        self.step(event)
        (reply,) = self.of(Reply)
        return reply

    # ------------------------------------------------------------ what came of it

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the last effects of this kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[Kind]) -> list[Kind]:
        """Return the messages of this kind among the last effects."""
        return [e.message for e in self.of(SendAgent) if isinstance(e.message, kind)]

    def noted(self, name: str) -> list[dict[str, str]]:
        """Return the fields of every note of this name so far."""
        return [dict(note.fields) for note in self.notes if note.name == name]

    def job(self, job: str) -> JobView:
        """Return what status shows of a job."""
        views = self.machine.view(self.now_ns).jobs
        return next(view for view in views if view.record.spec.job_id == job)

    def node(self, name: str) -> NodeView:
        """Return what status shows of a node."""
        views = self.machine.view(self.now_ns).nodes
        return next(view for view in views if view.node.node_id == name)

    def members(self, job: str) -> str:
        """Return the newest group as "g2: n1/1 n2/1"."""
        group = self.job(job).record.group
        return f"g{group.generation}: {' '.join(group.worker_ids())}" if group else ""


def running(job: str = "a", *, nodes: int = 3, low: int = 1, **changes: Any) -> Coordinator:
    """A job that trains with one worker on each of `nodes` nodes, n1, n2, ..."""
    coordinator = Coordinator(changes.pop("config", CONFIG))
    names = [f"n{number}" for number in range(1, nodes + 1)]
    for name in names:
        coordinator.agent(name)
    coordinator.submit(job, low, changes.pop("high", nodes), **changes)
    workers = [f"{name}/1" for name in names]
    coordinator.ready(*workers)
    coordinator.training(*workers)
    coordinator.advance(0.1)
    assert coordinator.members(job) == f"g1: {' '.join(workers)}"
    return coordinator

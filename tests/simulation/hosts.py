"""The simulated agent's process: the real state machine with a simulated driver.

Rule: as in `coordinators`: it behaves as the real driver does, and can die between any two effects.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.config import AgentConfig
from elastic.core.events import agent as agent_events
from elastic.core.events.shared import Tick
from elastic.core.facts import ExitCause, ExitKind, Node, NodeId, SessionId
from elastic.core.machine.agent import AgentMachine
from elastic.core.messages import (
    CoordinatorMessage,
    PipeToAgent,
    Welcome,
)
from tests.simulation.coordinators import CoordinatorHost
from tests.simulation.copying import CopyHost
from tests.simulation.network import Network, Stream
from tests.simulation.process import PIDS_OF_A_LIFE, SimProcess
from tests.simulation.training import DataPlane
from tests.simulation.world import MS, Alarm, Timeline


class AgentHost:
    """A node: the agent's process and all processes that it started."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        plane: DataPlane,
        *,
        node: Node,
        config: AgentConfig,
        coordinators: list[CoordinatorHost],
    ) -> None:
        """Create a node that is down; `start` starts its agent."""
        self.timeline = timeline
        self.network = network
        self.plane = plane
        self.node = node
        self.config = config
        self.coordinators = coordinators
        self.machine: AgentMachine | None = None
        self.processes: dict[int, SimProcess] = {}
        self.exit_code: int | None = None
        self.life = 0
        self.is_frozen = False
        self._frozen_events: list[agent_events.AgentEvent] = []
        self._terms: dict[SessionId, int] = {}
        self._alarm = Alarm(timeline, lambda: self.post(Tick()))
        self._next_pid = 0
        self._pipe_free: dict[tuple[int, str], int] = {}
        self.copies = CopyHost(
            plane.copying,
            node.node_id,
            node.host,
            post=self.post,
            is_up=lambda: self.machine is not None and not self.is_frozen,
            has_memory=lambda job_id: any(p.job_id == job_id for p in self.workers()),
        )

    @property
    def node_id(self) -> NodeId:
        """Return the id of this node."""
        return self.node.node_id

    def start(self) -> None:
        """Start a new agent process, with a higher incarnation."""
        if self.machine is not None:
            return
        self.life += 1
        incarnation = self.timeline.now_ns + self.life
        self.node = Node(
            self.node.node_id,
            incarnation,
            self.node.host,
            self.node.num_slots,
            self.node.resources,
        )
        self.copies.life = self.life
        self.machine = AgentMachine(self.node, self.config, (), copies_at=self.copies.address)
        self.exit_code = None
        self._alarm.reset()
        self.timeline.tell(self.node_id, f"agent starts, life {self.life}")
        self.post(Tick())

    def crash(self) -> None:
        """Simulate SIGKILL: the agent ends, and the kernel kills all its workers."""
        if self.machine is None:
            return
        self.timeline.tell(self.node_id, "agent killed")
        self.machine = None
        self.is_frozen = False
        self._frozen_events = []
        self._end_processes()
        self.network.host_died(self.node_id)

    def _end_processes(self) -> None:
        self.copies.died()
        processes, self.processes = self.processes, {}
        for process in processes.values():
            process.agent_died()

    def freeze(self, frozen: bool) -> None:
        """Simulate SIGSTOP or SIGCONT of the agent alone; its workers keep running."""
        if self.machine is None or frozen == self.is_frozen:
            return
        self.is_frozen = frozen
        self.timeline.tell(self.node_id, "agent frozen" if frozen else "agent thaws")
        if frozen:
            self.network.cut(self.node_id, "both")
            return
        self.network.heal(self.node_id)
        pending, self._frozen_events = self._frozen_events, []
        for event in pending:
            self.post(event)

    def post(self, event: agent_events.AgentEvent) -> None:
        """Pass an event to the driver."""
        if self.machine is None:
            return
        if self.is_frozen:
            self._frozen_events.append(event)
            return
        for effect in self.machine.step(event, self.timeline.now_ns):
            self._perform(effect)
            if self.machine is None:
                return
        busy = sum(1 for p in self.processes.values() if p.is_alive and p.worker_id)
        self.plane.checkers.started(self.node_id, busy, self.node.num_slots)
        self._arm()

    def receives(self, stream: Stream, message: CoordinatorMessage) -> None:
        """Receive a message over a stream."""
        self.post(agent_events.CoordinatorMessageReceived(stream.session, message))
        if self.machine is not None and not self.is_frozen:
            self._obey(stream, message)

    def loses(self, stream: Stream, reason: str) -> None:
        """Handle the end of a stream."""
        jitter = self.timeline.rng.random()
        self.post(agent_events.ConnectionLost(stream.session, reason, jitter))

    def workers(self) -> list[SimProcess]:
        """Return the running processes that are workers of a job."""
        return [p for p in self.processes.values() if p.is_alive and p.worker_id]

    # ------------------------------------------------------------ effects

    def _perform(self, effect: agent_events.AgentEffect) -> None:
        if isinstance(effect, agent_events.Connect):
            self._connect(effect.session)
        elif isinstance(effect, agent_events.Disconnect):
            self.network.close_from_agent(effect.session)
        elif isinstance(effect, agent_events.SendCoordinator):
            self.network.send_up(effect.session, effect.message)
        elif isinstance(effect, agent_events.Spawn):
            self._spawn(effect.process_id)
        elif isinstance(effect, agent_events.SendProcess):
            process = self.processes.get(effect.process_id)
            if process is not None:
                message = effect.message
                self._pipe(process.pid, "down", process.receive, message)
        elif isinstance(effect, agent_events.Kill):
            process = self.processes.get(effect.process_id)
            if process is not None:
                process.die(ExitCause(ExitKind.SIGNAL, 9))
        elif isinstance(effect, agent_events.ShowStacks):
            self.timeline.tell(self.node_id, f"process {effect.process_id} shows its stacks")
        elif isinstance(effect, agent_events.HandleCopy):
            self.copies.perform(effect.order)
        elif isinstance(effect, agent_events.ProbeLinks):
            self.plane.links.reach_out(self, effect.order)
        elif isinstance(effect, agent_events.ExitAgent):
            self._exit(effect.code, effect.reason)

    def _connect(self, session: SessionId) -> None:
        life = self.life

        def answered() -> None:
            if self.life != life:
                return
            blocked = self.network.conditions.cut.get(self.node_id)
            coordinator = self._leader()
            if coordinator is None or blocked:
                jitter = self.timeline.rng.random()
                self.post(agent_events.ConnectionLost(session, "no answer", jitter))
                return
            stream = self.network.open(session, self.node_id, coordinator.name)
            stream.coordinator_side = True
            self.post(agent_events.Connected(session))

        blocked = self.network.conditions.cut.get(self.node_id)
        wait = 1000 * MS if blocked else 2 * self.network.delay()
        self.timeline.after(wait, answered)

    def _leader(self) -> CoordinatorHost | None:
        """Return a coordinator that believes to be the leader; any of several."""
        cut = self.network.conditions.cut_hosts
        alone = len(self.coordinators) == 1
        taking = [
            host
            for host in self.coordinators
            if host.machine is not None
            and host.name not in cut
            and (alone or (host.may_act() and not host.is_frozen))
        ]
        return self.timeline.rng.choice(taking) if len(taking) > 1 else next(iter(taking), None)

    def _obey(self, stream: Stream, message: CoordinatorMessage) -> None:
        """Record the term under which this agent accepts orders."""
        if isinstance(message, Welcome):
            self._terms[stream.session] = message.term
        if stream.agent_side and stream.session in self._terms:
            self.plane.checkers.obeyed(self.node_id, self.life, self._terms[stream.session])

    def _spawn(self, process_id: int) -> None:
        self._next_pid += 1
        pid = self.life * PIDS_OF_A_LIFE + self._next_pid
        life = self.life

        def say(message: PipeToAgent) -> None:
            if self.life == life:
                event = agent_events.ProcessMessageReceived(process_id, message)
                self._pipe(pid, "up", self._deliver, process_id, event)

        def exited(cause: ExitCause) -> None:
            # As in the driver, the pipe is drained before the exit is reported.
            event = agent_events.ProcessExited(process_id, cause)
            self.timeline.after(MS, self._deliver, process_id, event)

        process = SimProcess(
            self.timeline, self.plane, node_id=self.node_id, pid=pid, say=say, exited=exited
        )
        self.processes[process_id] = process
        event = agent_events.ProcessStarted(process_id, pid)
        self.timeline.after(MS, self._deliver, process_id, event)

    def _pipe(self, pid: int, way: str, action: Callable[..., None], *args: object) -> None:
        """Deliver a message through a worker's pipe: delayed, and in order."""
        moment = self.timeline.now_ns + self.timeline.between(20_000, 200_000)
        moment = max(moment, self._pipe_free.get((pid, way), 0))
        self._pipe_free[pid, way] = moment
        self.timeline.at(moment, action, *args)

    def _deliver(self, process_id: int, event: agent_events.AgentEvent) -> None:
        if process_id in self.processes and self.machine is not None:
            if isinstance(event, agent_events.ProcessExited):
                del self.processes[process_id]
            self.post(event)

    def _exit(self, code: int, reason: str) -> None:
        self.timeline.tell(self.node_id, f"agent exits {code}: {reason}")
        self.exit_code = code
        self.machine = None
        self._end_processes()
        self.network.host_died(self.node_id)

    def _arm(self) -> None:
        self._alarm.set(self.machine.next_deadline_ns() if self.machine else None)

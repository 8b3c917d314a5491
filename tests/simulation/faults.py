"""The faults of a simulated run: drawn from the seed, and all healed at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.core.events.agent import DrainSignalled, HealthChanged, ProcessStopped
from elastic.core.facts import ExitCause, ExitKind, JobId, NodeId
from tests.simulation.blame import Blame
from tests.simulation.coordinators import CoordinatorHost
from tests.simulation.hosts import AgentHost
from tests.simulation.network import Network
from tests.simulation.process import SimProcess
from tests.simulation.training import DataPlane
from tests.simulation.world import MS, S, Timeline

NOTICE_NS_MIN = 30 * S
"""Longer than any script needs to leave at its next boundary, with all delays."""
RECEIVED_NS = 450 * MS
"""Time within which a machine's notice is received; otherwise it does not count as announced."""
UNRECEIVED_NS = 1 * S
"""A group's progress may be unknown for so long: workers report twice a second."""


@dataclass(frozen=True)
class Mix:
    """The weights of the faults, and the mean time between two faults."""

    weights: tuple[tuple[str, float], ...]
    mean_gap_ns: int


ALL_FAULTS = (
    "kill_worker", "stop_worker", "kill_agent", "freeze_agent", "cut_link", "kill_coordinator",
    "slow_disk", "drain", "kill_spare", "kill_everything", "hang_worker", "slow_worker",
    "silence_node", "freeze_coordinator",
)  # fmt: skip


FELLED_SEED = 7
"""Of fifteen seeds, one with several coordinators: two leaders in turn die while a group forms."""
BROKEN_SEED = 5
"""Of six seeds, the one in which all workers that compute on one node hang."""
PARTED_SEED = 5
"""Of seven seeds, the one in which two members of a group lose each other's messages."""
CABLES_SEED = 3
"""Of eleven seeds, the one in which links between nodes that train together are cut."""


def draw_mix(timeline: Timeline) -> Mix:
    """Draw which faults this run has, and their rate (swarm testing)."""
    rng = timeline.rng
    weights = [(name, rng.choice([0.0, 0.3, 1.0])) for name in ALL_FAULTS]
    return Mix(tuple(weights), rng.choice([200 * MS, 1 * S, 4 * S]))


SLOW_NS_MAX = 20 * S
"""For so long a slow member keeps the others waiting."""
PREEMPTIONS_ONLY = Mix((("notice", 1.0),), 4 * S)
"""Only preemption notices: then no loss is charged, and no step is repeated."""


class Faults:
    """Injects faults until `heal`."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        coordinators: list[CoordinatorHost],
        agents: list[AgentHost],
        *,
        plane: DataPlane,
        mix: Mix,
    ) -> None:
        """Schedule nothing yet; `begin` schedules the first fault."""
        self.timeline = timeline
        self.network = network
        self.coordinators = coordinators
        self.agents = agents
        self.plane = plane
        self.mix = mix
        self.is_over = False
        self.count = 0
        self.blame = Blame(timeline, network.conditions, plane.links, fail=plane.checkers.failed)
        self._stopped: list[tuple[AgentHost, SimProcess]] = []
        self._noticed: set[tuple[str, int]] = set()

    def begin(self) -> None:
        """Schedule the next fault."""
        gap = round(self.timeline.rng.expovariate(1.0) * self.mix.mean_gap_ns)
        self.timeline.after(gap, self._strike)

    def heal(self) -> None:
        """Start the liveness phase: restart, continue and reconnect everything."""
        self.is_over = True
        for host in self.coordinators:
            host.disk_delay_max_ns = 5 * MS
            host.doze_ns = 0
            host.freeze(False)
            self.network.heal_host(host.name)
            if host.candidate is not None:
                host.candidate.is_cut = host.candidate.store.is_away = False
            host.start()
        for agent in self.agents:
            agent.freeze(False)
            self.network.heal(agent.node_id)
            agent.start()
            agent.post(HealthChanged(()))
        for agent, process in self._stopped:
            self._continue(agent, process)
        self.join_nodes()

    def _strike(self) -> None:
        if self.is_over:
            return
        names = [name for name, weight in self.mix.weights if weight > 0]
        weights = [weight for _, weight in self.mix.weights if weight > 0]
        if names:
            name = self.timeline.rng.choices(names, weights)[0]
            self.count += 1
            action: Callable[[], None] = getattr(self, f"_{name}")
            action()
        self.begin()

    @property
    def coordinator(self) -> CoordinatorHost:
        """Return the leader with probability 0.7, if there is one; otherwise any coordinator."""
        hosts = self.coordinators
        if len(hosts) == 1:
            return hosts[0]
        leading = [host for host in hosts if host.machine is not None]
        found = leading if leading and self.timeline.chance(0.7) else hosts
        return self.timeline.rng.choice(found)

    def _agent(self) -> AgentHost:
        return self.timeline.rng.choice(self.agents)

    def _worker(self) -> tuple[AgentHost, SimProcess] | None:
        workers = [(a, p) for a in self.agents for p in a.workers()]
        return self.timeline.rng.choice(workers) if workers else None

    def _kill_worker(self) -> None:
        found = self._worker()
        if found is not None:
            agent, process = found
            self.timeline.tell(agent.node_id, f"worker {process.worker_id} killed")
            process.die(ExitCause(ExitKind.SIGNAL, 9))

    def _kill_spare(self) -> None:
        spares = [p for a in self.agents for p in a.processes.values() if not p.worker_id]
        if spares:
            self.timeline.rng.choice(spares).die(ExitCause(ExitKind.SIGNAL, 9))

    def _stop_worker(self) -> None:
        found = self._worker()
        if found is None or found[1].is_stopped:
            return
        agent, process = found
        self.timeline.tell(agent.node_id, f"worker {process.worker_id} stopped")
        process.set_stopped(True)
        self.blame.trouble(process.worker_id)
        self._stopped.append(found)
        self._show_stopped(agent, process, True)
        wait = self.timeline.between(100 * MS, 3 * S)
        self.timeline.after(wait, self._continue, agent, process)

    def _member(self) -> SimProcess | None:
        """Choose a computing worker in a group with other members that make progress."""
        found = self._computing()
        return self.timeline.rng.choice(found) if found else None

    def _computing(self) -> list[SimProcess]:
        found = []
        for agent in self.agents:
            for process in agent.workers():
                group = self.plane.group_of(process)
                others = group.members.values() if group is not None else ()
                if process.waiting_since_ns:
                    continue
                if any(other is not process and other.moves() for other in others):
                    found.append(process)
        return found

    def _hang_worker(self) -> None:
        process = self._member()
        if process is not None:
            self.timeline.tell(process.node_id, f"worker {process.worker_id} hangs")
            process.is_hung = True
            self.blame.trouble(process.worker_id)

    def plan_rare(self, seed: int) -> None:
        """Plan a broken node, and cut connections within groups, in some seeds."""
        if self.mix is PREEMPTIONS_ONLY:
            return
        if seed % 6 == BROKEN_SEED:
            self.timeline.after(self.timeline.between(5 * S, 30 * S), self.break_node)
        for _ in range(3 if seed % 7 == PARTED_SEED else 0):
            self.timeline.after(self.timeline.between(5 * S, 50 * S), self.part_workers)
        if seed % 11 == CABLES_SEED:
            # At the usual rate, other faults would replace groups before a cut link is detected.
            self.mix = replace(self.mix, mean_gap_ns=max(self.mix.mean_gap_ns, 4 * S))
        for _ in range(8 if seed % 11 == CABLES_SEED else 0):
            self.timeline.after(self.timeline.between(1 * S, 40 * S), self.part_nodes)

    def group_formed(self, seed: int) -> None:
        """Plan the death of leaders while a group forms, in some seeds."""
        is_felled = seed % 15 == FELLED_SEED and self.mix is not PREEMPTIONS_ONLY
        if is_felled and self.timeline.chance(0.2):
            self.fell_leaders()

    def break_node(self) -> None:
        """Make all workers that compute on one node hang, repeatedly."""
        until_ns, chosen = self.timeline.now_ns + 40 * S, list[NodeId]()

        def strike() -> None:
            if self.is_over or self.timeline.now_ns > until_ns:
                return
            found = [process for process in self._computing() if process.moves()]
            if found and not chosen:
                chosen.append(self.timeline.rng.choice(found).node_id)
            for process in found:
                if process.node_id in chosen and self._is_missed(process):
                    self.timeline.tell(process.node_id, f"worker {process.worker_id} hangs")
                    process.is_hung = True
                    self.blame.trouble(process.worker_id)
            self.timeline.after(1 * S, strike)

        strike()

    def _is_missed(self, process: SimProcess) -> bool:
        """Return whether a member on another node makes progress, and so would wait for it."""
        group = self.plane.group_of(process)
        others = group.members.values() if group is not None else ()
        return any(other.node_id != process.node_id and other.moves() for other in others)

    def fell_leaders(self) -> None:
        """Kill the leader while a group forms, and then the next one."""
        for delay in (self.timeline.between(0, 20 * MS), self.timeline.between(2 * S, 4 * S)):
            self.timeline.after(delay, self._fell)

    def _fell(self) -> None:
        host = self.coordinator
        if not self.is_over and host.machine is not None:
            self.count += 1
            host.crash()
            self.timeline.after(self.timeline.between(1 * S, 5 * S), host.start)

    def _slow_worker(self) -> None:
        process = self._member()
        if process is not None:
            wait = self.timeline.between(300 * MS, SLOW_NS_MAX)
            process.slow_until_ns = self.timeline.now_ns + wait
            self.timeline.tell(process.node_id, f"worker {process.worker_id} is slow")

    def _silence_node(self) -> None:
        """Freeze a whole machine: the agent and all processes that it started."""
        agent = self._agent()
        if agent.machine is None or agent.is_frozen:
            return
        agent.freeze(True)
        for process in agent.processes.values():
            if process.is_alive and not process.is_stopped:
                process.set_stopped(True)
                self.blame.trouble(process.worker_id)
                self._stopped.append((agent, process))
        wait = self.timeline.between(100 * MS, 6 * S)
        self.timeline.after(wait, self._wake_node, agent, list(agent.processes.values()))

    def _wake_node(self, agent: AgentHost, processes: list[SimProcess]) -> None:
        for process in processes:
            process.set_stopped(False)
        agent.freeze(False)

    def _continue(self, agent: AgentHost, process: SimProcess) -> None:
        if process.is_stopped:
            process.set_stopped(False)
            self._show_stopped(agent, process, False)

    def _show_stopped(self, agent: AgentHost, process: SimProcess, stopped: bool) -> None:
        for process_id, known in agent.processes.items():
            if known is process:
                agent.post(ProcessStopped(process_id, stopped))
                return

    def _kill_agent(self) -> None:
        agent = self._agent()
        agent.crash()
        self.timeline.after(self.timeline.between(50 * MS, 10 * S), agent.start)

    def _freeze_agent(self) -> None:
        agent = self._agent()
        agent.freeze(True)
        wait = self.timeline.between(100 * MS, 6 * S)
        self.timeline.after(wait, agent.freeze, False)

    def _cut_link(self) -> None:
        agent = self._agent()
        how = self.timeline.rng.choice(["up", "down", "both"])
        self.timeline.tell(agent.node_id, f"link cut: {how}")
        self.network.cut(agent.node_id, how)
        wait = self.timeline.between(50 * MS, 6 * S)
        self.timeline.after(wait, self._mend, agent)

    def _mend(self, agent: AgentHost) -> None:
        if not agent.is_frozen:
            self.network.heal(agent.node_id)

    def _kill_coordinator(self) -> None:
        host = self.coordinator
        host.crash()
        wait = self.timeline.between(10 * MS, 15 * S)
        self.timeline.after(wait, host.start)
        if host.candidate is not None:
            self._part_coordinators()

    def _freeze_coordinator(self) -> None:
        """Freeze it now, or while it waits for replies; rarely until all agents give it up."""
        host = self.coordinator
        wait = self.timeline.between(50 * MS, 1400 * MS)
        if host.candidate is not None:
            self._freeze_candidate(host)
        elif self.timeline.chance(0.5):
            host.doze_ns = wait
        elif wait % 8:
            host.freeze(True)
            self.timeline.after(wait, host.freeze, False)
        elif not host.is_frozen and host.is_up:
            self._freeze_for(host, 30 * wait)

    def _freeze_candidate(self, host: CoordinatorHost) -> None:
        """Freeze it, perhaps for longer than its lease, so that agents and store give it up."""
        if host.is_frozen or not host.is_up:
            return
        wait = self.timeline.between(50 * MS, 60 * S if self.timeline.chance(0.3) else 6 * S)
        self._freeze_for(host, wait, wait if self.timeline.chance(0.3) else 0)

    def _freeze_for(self, host: CoordinatorHost, wait: int, paused: int = 0) -> None:
        """Freeze it and cut it off for `wait` ns; its clock is paused for `paused` ns of them."""
        host.freeze(True)
        self.network.cut_host(host.name)

        def wake() -> None:
            self.network.heal_host(host.name)
            host.freeze(False, paused)

        self.timeline.after(wait, wake)

    def _part_coordinators(self) -> None:
        """Cut a coordinator from the store or from the agents, or take down the store."""
        host = self.timeline.rng.choice(self.coordinators)
        candidate = host.candidate
        if candidate is None:
            return
        wait = self.timeline.between(100 * MS, 15 * S)
        what = self.timeline.rng.choice(["store", "agents", "both", "quorum", "nothing"])
        self.timeline.tell(host.name, f"cut off: {what}")

        def mend() -> None:
            candidate.is_cut = candidate.store.is_away = False
            if not host.is_frozen:
                self.network.heal_host(host.name)

        if what in ("store", "both"):
            candidate.is_cut = True
        if what in ("agents", "both"):
            self.network.cut_host(host.name)
        if what == "quorum":
            candidate.store.is_away = True
        self.timeline.after(wait, mend)

    def _slow_disk(self) -> None:
        delay = self.timeline.rng.choice([5 * MS, 200 * MS, 2 * S])
        for host in self.coordinators:
            host.disk_delay_max_ns = delay

    def _drain(self) -> None:
        agent = self._agent()
        self.timeline.tell(agent.node_id, "drain signalled")
        agent.post(DrainSignalled("SIGTERM", self.timeline.between(0, 10 * S)))
        self.timeline.after(self.timeline.between(11 * S, 20 * S), agent.start)

    def _notice(self) -> None:
        """Preempt a machine with a notice of the time, and sometimes earlier than that."""
        agent = self._agent()
        life = (agent.node_id, agent.life)
        if agent.machine is None or life in self._noticed:
            return
        self._noticed.add(life)
        within_ns = self.timeline.between(NOTICE_NS_MIN, 60 * S)
        self.timeline.tell(agent.node_id, f"notice: gone within {within_ns / S:.1f} s")
        is_received = agent.machine.is_registered
        agent.post(DrainSignalled("spot notice", within_ns))
        gone_ns = within_ns
        if self.timeline.chance(0.5):
            # Before the announced time; perhaps before workers can have reached a boundary.
            longest_ns = self.timeline.rng.choice([2 * RECEIVED_NS, within_ns])
            early_ns = self.timeline.between(RECEIVED_NS, longest_ns)
            # An agent that is not registered yet has not passed on its notice.
            gone_ns = early_ns if is_received else within_ns
        self.timeline.after(gone_ns, self._take, agent, agent.life)

    def _take(self, agent: AgentHost, life: int) -> None:
        """Take the machine away, and replace it by another one later."""
        if agent.life == life:
            agent.crash()
        self.timeline.after(self.timeline.between(1 * S, 10 * S), agent.start)

    def sicken(self) -> None:
        """Report a full disk on a node, and later that it is healthy again."""
        if self.is_over:
            return
        agent = self._agent()
        agent.post(HealthChanged(("the disk is full",)))
        wait = self.timeline.between(100 * MS, 10 * S)
        self.timeline.after(wait, agent.post, HealthChanged(()))

    def part_workers(self) -> None:
        """Cut the connection of two members of a group, until the next group.

        Not in a group with hidden waits (`in_parts`): a hidden member looks like the hung one.
        """
        member = None if self.is_over else self._member()
        group = self.plane.group_of(member) if member is not None else None
        if group is not None and not self.plane.scripts[group.job_id].in_parts:
            self.timeline.tell(group.job_id, f"group {group.generation} is parted")
            self.plane.links.lose(group.job_id, group.generation)

    def part_nodes(self) -> None:
        """Cut the link between two nodes that train together, for a while.

        Not in a group with hidden waits, as above.
        """
        member = None if self.is_over else self._member()
        group = self.plane.group_of(member) if member is not None else None
        if member is None or group is None or self.plane.scripts[group.job_id].in_parts:
            return
        others = {p.node_id for p in group.members.values()} - {member.node_id}
        if others:
            other = self.timeline.rng.choice(sorted(others))
            self.plane.links.cut(member.node_id, other)
            lasts = self.timeline.between(1 * S, 40 * S)
            self.timeline.after(lasts, self.join_nodes, member.node_id, other)

    def join_nodes(self, *nodes: NodeId) -> None:
        """Restore the link of these two nodes, or all links, and let waiting groups form."""
        self.plane.links.heal(*nodes)
        for group in [*self.plane.groups.values()]:
            self.plane.try_form(group)

    def is_stuck(self, job_id: JobId, generation: int, decided_ns: int) -> bool:
        """Return whether a group cannot continue by itself, as far as reports can have shown.

        Args:
            job_id: the group's job.
            generation: the group's generation.
            decided_ns: when it was judged stuck; with a slow store the note is seconds later.
        """
        group = self.plane.groups[job_id, generation]
        members = group.members.values() or group.waiting.values()
        nodes = {process.node_id for process in members}
        since_ns = decided_ns - UNRECEIVED_NS
        return self.plane.is_held(group, members) or any(
            self.plane.links.were_cut(one, other, since_ns)
            for one, other in itertools.combinations(sorted(nodes), 2)
        )

    def _kill_everything(self) -> None:
        if not self.timeline.chance(0.1):
            return
        self._kill_coordinator()
        for agent in self.agents:
            agent.crash()
            self.timeline.after(self.timeline.between(50 * MS, 10 * S), agent.start)

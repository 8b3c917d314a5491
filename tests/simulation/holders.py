"""Faults of nodes that hold copies, and a limit for how long a run may be without copies.

Holders are restarted so quickly that they do not count as lost, lose their copies, or are drained.
Their copies must soon be on another node again; a drained holder may leave once they are.

Rule: the limit applies only while nothing else is wrong: the coordinator keeps leading, and the
nodes that train the run and those that could hold its copies have been up and reachable for a
while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.core.events.coordinator import NodeDrainRequested
from elastic.core.facts import JobId, JobPhase, NodeId
from tests.simulation.checkers import Checkers
from tests.simulation.coordinators import CoordinatorHost
from tests.simulation.copying import Copying, Trained
from tests.simulation.disk import Disk
from tests.simulation.hosts import AgentHost
from tests.simulation.network import Conditions
from tests.simulation.world import MS, S, Timeline

POLL_NS = 500 * MS
CALM_NODE_NS = 36 * S
"""A node that could not be reached is not asked again for 30 s; then it counts as calm."""
CALM_COORDINATOR_NS = 13 * S
"""A new leader first waits for agents to reconnect, since they may hold copies."""
EXPOSED_NS = 9 * S
"""Time to detect that a holder is lost, choose another, and copy to it."""
UNREACHED_NS = 4 * S
"""Additional time for each node that may be chosen first but cannot be reached."""
DRAIN_NS = 12 * S
SLOW_DISK_NS = 200 * MS
MOMENTS_S = (12, 22, 32, 42, 52, 98, 100)
"""Times of the faults; the last are in the liveness phase, when all nodes have long been up."""


@dataclass
class Cluster:
    """The parts of a simulation that `Holders` reads."""

    agents: Sequence[AgentHost]
    coordinators: Sequence[CoordinatorHost]
    copying: Copying
    conditions: Conditions
    disk: Disk


@dataclass
class Holders:
    """Restarts and drains holders, and checks the copies.

    Attributes:
        since_ns: since when a node or coordinator has been healthy in its newest life.
        lives: those lives.
        exposed_ns: since when a run has had no copy though it could have one.
    """

    timeline: Timeline
    checkers: Checkers
    cluster: Cluster
    since_ns: dict[str, int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    exposed_ns: dict[JobId, int] = field(default_factory=dict)

    def plan(self) -> None:
        """Draw the faults, and start to check."""
        for moment in MOMENTS_S:
            action = self.timeline.rng.choice([self._restart, self._lose, self._drain])
            self.timeline.after(moment * S + self.timeline.between(0, 3 * S), action)
        self.timeline.after(POLL_NS, self._check)

    # ------------------------------------------------------------ faults

    def _holding(self) -> list[AgentHost]:
        """Return the agents that hold copies and have no workers."""
        return [
            agent
            for agent in self.cluster.agents
            if agent.machine is not None and agent.copies.jobs() and not agent.workers()
        ]

    def _restart(self) -> None:
        """Kill a holder's agent and restart it at once."""
        found = self._holding()
        if found:
            agent = self.timeline.rng.choice(found)
            agent.crash()
            self.timeline.after(self.timeline.between(10 * MS, 300 * MS), agent.start)

    def _lose(self) -> None:
        """Drop a holder's copies, and nothing else."""
        found = self._holding()
        if found:
            self.timeline.rng.choice(found).copies.lose()

    def _drain(self) -> None:
        """Request a drain of a holder, as an operator."""
        found, leading = self._holding(), [h for h in self.cluster.coordinators if h.machine]
        if found and leading:
            name = self.timeline.rng.choice(found).node_id
            leading[0].post(NodeDrainRequested(f"drain {name}", name, DRAIN_NS, "operator"))

    # ------------------------------------------------------------ health

    def _note(self, name: str, life: int, is_well: bool) -> None:
        if not is_well:
            self.since_ns.pop(name, None)
        elif self.lives.get(name) != life or name not in self.since_ns:
            self.since_ns[name], self.lives[name] = self.timeline.now_ns, life

    def _is_well(self, agent: AgentHost) -> bool:
        machine = agent.machine
        if machine is None or agent.is_frozen or machine.leave_by_ns is not None:
            return False
        return not self.cluster.conditions.was_troubled(
            agent.node_id, self.timeline.now_ns - POLL_NS
        )

    def _calm(self, name: str, for_ns: int) -> bool:
        return self.timeline.now_ns - self.since_ns.get(name, self.timeline.now_ns) >= for_ns

    def _leader(self) -> CoordinatorHost | None:
        """Return the leader, if it has been healthy for a while."""
        for host in self.cluster.coordinators:
            if host.machine is not None and self._calm(host.name, CALM_COORDINATOR_NS):
                return host
        return None

    def _check(self) -> None:
        for agent in self.cluster.agents:
            self._note(agent.node_id, agent.life, self._is_well(agent))
        for host in self.cluster.coordinators:
            leads = host.machine is not None and not host.is_frozen and not host.doze_ns
            is_quick = host.disk_delay_max_ns <= SLOW_DISK_NS
            self._note(host.name, host.life, leads and is_quick and host.may_act())
        for job_id, record in self.cluster.disk.records.items():
            is_running = record.phase is JobPhase.RUNNING
            trained = self.cluster.copying.trained(job_id) if is_running else None
            self._check_at(job_id, trained)
        self.timeline.after(POLL_NS, self._check)

    # ------------------------------------------------------------ properties

    def _check_at(self, job_id: JobId, trained: Trained | None) -> None:
        if (
            trained is None
            or not self._may_copy(job_id, trained)
            or self._is_copied(job_id, trained)
        ):
            self.exposed_ns.pop(job_id, None)
            return
        now_ns = self.timeline.now_ns
        since_ns = self.exposed_ns.setdefault(job_id, now_ns)
        odd = [a for a in self.cluster.agents if not self._calm(a.node_id, CALM_NODE_NS)]
        limit_ns = EXPOSED_NS + UNREACHED_NS * len(odd) + 8 * self.cluster.conditions.delay_max_ns
        took_s = (now_ns - since_ns) / S
        self.checkers.require(
            now_ns - since_ns <= limit_ns,
            "a snapshot lies on another node again, soon after the one that held it has died",
            f"job {job_id} generation {trained.age[0]}: exposed for {took_s:.1f} s",
        )

    def _may_copy(self, job_id: JobId, trained: Trained) -> bool:
        """Return whether a run can have all its copies on other nodes."""
        copying = self.cluster.copying
        if not copying.is_wanted(job_id) or self._leader() is None or not trained.steps_done:
            return False
        if not all(self._calm(node_id, CALM_NODE_NS) for node_id in trained.nodes):
            return False
        run = copying.shards.runs.get(job_id)
        if run is not None and run.newest.generation != run.generation:
            return False  # It has not taken its first snapshot yet.
        return self._has_room(job_id, trained.nodes)

    def _has_room(self, job_id: JobId, nodes: Sequence[NodeId], without: str = "") -> bool:
        """Return whether there is a node for each copy that has long been healthy."""
        there = {
            agent.node_id
            for agent in self.cluster.agents
            if agent.node_id != without and self._calm(agent.node_id, CALM_NODE_NS)
        }
        if job_id not in self.cluster.copying.shards.runs:
            return bool(there - {*nodes})
        return all(there - {node} for node in nodes)

    def _is_copied(self, job_id: JobId, trained: Trained) -> bool:
        copying = self.cluster.copying
        if job_id in copying.shards.runs:
            return copying.shards.is_protected(job_id)
        held = copying.held(job_id)
        return any(
            node not in trained.nodes and age[0] == trained.age[0] for node, age in held.items()
        )

    def _has_received(
        self, leader: CoordinatorHost, job_id: JobId, agent: AgentHost, before_ns: int
    ) -> bool:
        """Return whether the leader has known for `before_ns` that a node alone has some copies."""
        until_ns = self.timeline.now_ns - before_ns
        view = leader.machine.view(self.timeline.now_ns) if leader.machine is not None else None
        jobs = view.jobs if view is not None else ()
        copies = [copy for job in jobs if job.record.spec.job_id == job_id for copy in job.copies]
        elsewhere = {
            (c.source, c.generation, c.steps) for c in copies if c.node_id != agent.node_id
        }
        return any(
            c.node_id == agent.node_id
            and c.since_ns <= until_ns
            and (c.source, c.generation, c.steps) not in elsewhere
            for c in copies
        )

    def released(self, agent: AgentHost) -> None:
        """Check that a drained node leaves early only if its copies are not needed or movable."""
        leave_by_ns = agent.machine.leave_by_ns if agent.machine is not None else None
        slack_ns = S + 4 * self.cluster.conditions.delay_max_ns
        if leave_by_ns is None or self.timeline.now_ns + slack_ns >= leave_by_ns:
            return
        for job_id in sorted(agent.copies.jobs()):
            record = self.cluster.disk.records.get(job_id)
            is_running = record is not None and record.phase is JobPhase.RUNNING
            trained = self.cluster.copying.trained(job_id) if is_running else None
            leader = self._leader()
            if trained is None or leader is None:
                continue
            if not self._has_received(leader, job_id, agent, slack_ns):
                continue
            calm = all(self._calm(node_id, CALM_NODE_NS) for node_id in trained.nodes)
            self.checkers.require(
                not calm or not self._has_room(job_id, trained.nodes, agent.node_id),
                "a drained node is let go when what it holds lies elsewhere",
                f"job {job_id}: {agent.node_id} held copies, and could have stayed for "
                f"{(leave_by_ns - self.timeline.now_ns) / S:.1f} s",
            )

"""A whole cluster on a virtual clock: real machines, everything else simulated, one seed.

    python -m tests.simulation.simulator --seeds 500 --first 0
    python -m tests.simulation.simulator --seeds 1 --first 4711 --transcript

The seed draws the configuration (nodes, bounds, delays, fault mix, scripts). A run has a safety
phase, in which faults are injected and no property may be violated, and a liveness phase, in which
all faults are healed and every job must end within a bounded virtual time. A seed replays only on
the commit on which it was found; a bug that it found becomes a scenario.

Source: the two phases and drawing the configuration from the seed are TigerBeetle's VOPR.
"""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass, replace

import click

from elastic.core.config import JobSpec, ns
from elastic.core.events.coordinator import (
    CheckpointRequested,
    NodeDrainRequested,
    StopRequested,
    SubmitRequested,
)
from elastic.core.events.shared import Note
from elastic.core.facts import JobId, Node, NodeId
from elastic.core.machine.nodes import PRESENT
from elastic.core.machine.suspicion import FORMING_PROBES
from elastic.core.messages import (
    AgentMessage,
    CoordinatorMessage,
    Drain,
    Release,
)
from elastic.core.policy.hang import FIRST_TIMES, LONGEST_TIMES
from elastic.core.records import JobRecord
from elastic.errors import ElasticError
from tests.simulation import crowd, draws, holders
from tests.simulation.checkers import Checkers, CheckFailed
from tests.simulation.coordinators import CoordinatorHost
from tests.simulation.disk import Disk
from tests.simulation.faults import PREEMPTIONS_ONLY, SLOW_NS_MAX, Faults, draw_mix
from tests.simulation.goodput_checks import GoodputChecks
from tests.simulation.hosts import AgentHost
from tests.simulation.network import Conditions, Network, Stream
from tests.simulation.terms import LeaseStore
from tests.simulation.training import DataPlane, Script
from tests.simulation.world import MS, S, Timeline

SAFETY_NS = 60 * S
LIVENESS_NS = 240 * S
WAITING_NS = 120 * S
"""Limit of the liveness phase, in addition to the steps of jobs that can only run in sequence."""
HUNG_SLACK_NS = 20 * S
"""Additional time, since the next group may have to detect the hung worker again."""
PARTS_SEED = 0
"""Of three seeds, the one in which ranks also synchronize in subgroups of their group."""
SICK_SEED = 3
"""Of four seeds, the one in which disks fill up."""
GENTLE_SEED = 7
"""Of ten seeds, the one whose only faults are preemptions of machines, with notices."""
REPLACED_SEED = 4
"""Of ten seeds, the one in which a coordinator is replaced just after it ordered a drain."""
COPIES_SEED = 2
"""Of four seeds, the one whose runs have copies of their state on other nodes."""
RARELY_SEED = 10
"""Of sixteen seeds, those from this on make copies so rarely that a lost one matters."""
PATIENT_SEED, PATIENCE = 3, 4
"""Of seven seeds, the one with a larger --silence."""
REPORTING_SEED = 5
"""Of nine seeds, the one whose scripts report without a checkpoint, once, in the middle. Not with
several jobs: without a checkpoint there is no boundary at which one makes room for another."""
LEFT_SEED = 12
"""Of thirteen seeds, one in which a member leaves while the others wait for it."""
STARTING_SEED = 3
"""Of seventeen seeds, the one in which first steps take several times the hang timeout, and rank 0
works alone after its reports. Not with several jobs: their waits are bounded."""
IN_PLACE_SEED = 9
"""Of twenty-four seeds, the one whose jobs train in loops that continue in place, and that storage
accepts no checkpoint of: a state is in memory, or lost. Not with several jobs, nor with copies, nor
with notices alone, where members save what they cannot pass on."""
STARTS_TIMES = 4
"""Duration of such a first step, in hang timeouts."""
WELL_NS = 40 * S
"""A worker whose node could always be reached for so long must not lose its state."""
SLACK_NS = 3 * S
"""The coordinator may handle an event so much later, when its disk is slow."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    seed: int
    virtual_s: float
    faults: int
    groups: int
    steps: int
    jobs: tuple[tuple[str, str], ...]


class Simulation:
    """One run of the simulation."""

    def __init__(self, seed: int, *, keep_log: bool = True) -> None:
        """Draw the configuration from the seed."""
        self.seed = seed
        self.timeline = Timeline(seed, keep_log=keep_log)
        rng = self.timeline.rng
        self.checkers = Checkers(is_gentle=seed % 10 == GENTLE_SEED)
        self.network = Network(
            self.timeline,
            Conditions(
                delay_max_ns=rng.choice([500_000, 2 * MS, 50 * MS, 400 * MS]),
                late=rng.choice([0.0, 0.5]),
            ),
        )
        self.plane = DataPlane(self.timeline, self.checkers)
        self.disk = Disk(self.checkers)
        config = draws.draw_config(seed, self.timeline, self.network.conditions)
        self.lease = LeaseStore(self.checkers)
        self.coordinators = [
            CoordinatorHost(self.timeline, self.network, self.disk, config, candidate=candidate)
            for candidate in draws.draw_candidates(seed, self.timeline, self.lease)
        ]
        agent_config = draws.draw_agent_config(seed, self.timeline)
        self.agents = [
            AgentHost(
                self.timeline,
                self.network,
                self.plane,
                node=Node(NodeId(f"n{i + 1}"), 1, f"10.0.0.{i + 1}", rng.randint(1, 3)),
                config=agent_config,
                coordinators=self.coordinators,
            )
            for i in range(rng.randint(1, 12))
        ]
        self.by_node = {agent.node_id: agent for agent in self.agents}
        self.network.wire(
            self._to_coordinator,
            self._to_agent,
            lost_at_coordinator=lambda stream, why: self.host_of(stream).loses(stream.session, why),
            lost_at_agent=lambda stream, why: self.by_node[stream.node_id].loses(stream, why),
        )
        self.faults = Faults(
            self.timeline,
            self.network,
            self.coordinators,
            self.agents,
            plane=self.plane,
            mix=PREEMPTIONS_ONLY if self.checkers.is_gentle else draw_mix(self.timeline),
        )
        for host in self.coordinators:
            host.on_note = self._noted
            host.on_step = GoodputChecks(self.checkers.failed).stepped
        self.crowd = crowd.Crowd(
            self.timeline,
            crowd.Place(self.disk, [str(a.node_id) for a in self.agents]),
            self.checkers.crowd,
            lambda event: self.coordinator.post(event),
            fail=self.checkers.failed,
            seed=seed,
        )
        self.crowd.leavers.waits = self.plane.loops.waits
        self.holders = self._check_at_holders()
        self.submissions: dict[str, JobSpec] = {}
        # The life of each agent that received an operator's drain order.
        self.leave_requested: dict[NodeId, int] = {}
        self.stops: set[JobId] = set()

    def _check_at_holders(self) -> holders.Holders:
        parts = (self.agents, self.coordinators, self.plane.copying)
        seen = holders.Cluster(*parts, self.network.conditions, self.disk)
        return holders.Holders(self.timeline, self.checkers, seen)

    @property
    def is_starting_slowly(self) -> bool:
        """Return whether first steps are slow in this run."""
        return self.seed % 17 == STARTING_SEED and not crowd.has_crowd(self.seed)

    @property
    def coordinator(self) -> CoordinatorHost:
        """Return the coordinator that believes to be the leader; the first if none does."""
        leading = [h for h in self.coordinators if h.machine is not None and h.may_act()]
        return leading[0] if leading else self.coordinators[0]

    def host_of(self, stream: Stream) -> CoordinatorHost:
        """Return the coordinator at the other end of a stream."""
        return next(host for host in self.coordinators if host.name == stream.host)

    def _to_coordinator(self, stream: Stream, message: AgentMessage) -> None:
        self.host_of(stream).receives(stream.session, message)

    def _to_agent(self, stream: Stream, message: CoordinatorMessage) -> None:
        agent = self.by_node[stream.node_id]
        # A frozen agent may have closed the stream by the time it reads this.
        if isinstance(message, Drain) and stream.agent_side and not agent.is_frozen:
            self.leave_requested[stream.node_id] = agent.life
            if self.seed % 10 == REPLACED_SEED:
                self.timeline.after(0, self._replace)
        if isinstance(message, Release) and stream.agent_side and not agent.is_frozen:
            self.holders.released(agent)
        agent.receives(stream, message)

    def _noted(self, note: Note) -> None:
        """Check a verdict of the coordinator against the injected faults."""
        said = dict(note.fields)
        self.faults.blame.noted(note)
        self.checkers.failed(
            self.crowd.noted(note.name, note.job_id, said), f"{note.job_id} {said}"
        )
        if note.name == "node_silent":
            window = FORMING_PROBES * ns(self.coordinator.config.probe_timeout_s) + SLACK_NS
            since_ns = self.timeline.now_ns - window
            was_troubled = self.network.conditions.was_troubled(NodeId(said["node"]), since_ns)
            self.checkers.accused_node(said["node"], is_guilty=was_troubled)
        elif note.name == "node_registered":
            self.plane.copying.forget_shown()
        elif note.name == "group_formed":
            self._show_copies(note)
            self._owe(note)
            self.faults.group_formed(self.seed)
        elif note.name == "worker_hung":
            processes = self.by_node[NodeId(said["node"])].workers()
            innocent = [p for p in processes if p.worker_id == said["worker"] and not p.is_hung]
            self.checkers.accused_worker(said["worker"], is_guilty=not innocent)
        elif note.name == "group_stuck":
            decided_ns, generation = self.coordinator.stepped_ns, int(said["generation"])
            is_stuck = self.faults.is_stuck(JobId(note.job_id), generation, decided_ns)
            self.checkers.accused_group(note.job_id, said["generation"], is_guilty=is_stuck)

    def _show_copies(self, note: Note) -> None:
        """Record the nodes on which status shows a job's rows when its group is announced."""
        machine, job_id = self.coordinator.machine, JobId(note.job_id)
        if machine is None or not self.plane.scripts[job_id].is_sharded:
            return
        view = machine.view(self.timeline.now_ns)
        there = {state.node.node_id for state in view.nodes if state.phase in PRESENT}
        copies = [job.copies for job in view.jobs if job.record.spec.job_id == job_id]
        shown = [copy.node_id for held in copies for copy in held if copy.node_id in there]
        self.plane.copying.formed(job_id, int(dict(note.fields)["generation"]), shown)

    def _owe(self, note: Note) -> None:
        """Record the newest step that a well worker holds when a group is announced."""
        job_id, since_ns = JobId(note.job_id), self.timeline.now_ns - WELL_NS
        if not self.plane.scripts[job_id].in_place:
            return
        for agent in self.agents:
            is_well = not self.network.conditions.was_troubled(agent.node_id, since_ns)
            for process in agent.workers() if is_well else ():
                if process.job_id == job_id and self.faults.blame.is_well(process):
                    self.plane.loops.owe(job_id, int(dict(note.fields)["generation"]), process)

    def _check_hung(self) -> None:
        """Check that all workers that hung before the liveness phase have been ended."""
        hung = [str(p.worker_id) for a in self.agents for p in a.workers() if p.is_hung]
        self.checkers.still_hung(hung)

    # ------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Run both phases.

        Raises:
            CheckFailed: a property does not hold.
            InvariantViolation: a state machine violates its own invariant.
        """
        self.network.conditions.keepalive_ns *= PATIENCE if self.seed % 7 == PATIENT_SEED else 1
        for host in self.coordinators:
            self.timeline.after(0, host.start)
        for agent in self.agents:
            self.timeline.after(self.timeline.between(0, 5 * S), agent.start)
        for index in range(self.timeline.rng.randint(1, 3) + self.crowd.more_jobs):
            self._plan_job(index)
        self.crowd.plan_rivals(sum(agent.node.num_slots for agent in self.agents), self._enter)
        self.faults.begin()
        if self.seed % 4 == COPIES_SEED:
            self.holders.plan()
        # Not in every seed, see `_plan_job`.
        for _ in range(3 if self.seed % 4 == SICK_SEED else 0):
            self.timeline.after(self.timeline.between(5 * S, 50 * S), self.faults.sicken)
        self.faults.plan_rare(self.seed)
        if self.seed % 10 == REPLACED_SEED:
            for _ in range(3):
                self.timeline.after(self.timeline.between(10 * S, 50 * S), self._drain_some_node)
        self.timeline.run_until(SAFETY_NS)
        self.timeline.tell("world", "liveness phase: all is healed")
        self.faults.heal()
        self.crowd.heal()
        steps_ns = sum(
            one.steps * one.step_ns + 4 * one.starts_ns + 3 * one.works_ns
            for one in self.plane.scripts.values()
        )
        limit = max(LIVENESS_NS, WAITING_NS + steps_ns)
        until = self.timeline.now_ns + limit
        self.timeline.after(1 * S, self._keep_alive)
        longest = draws.HANG_TIMEOUTS_S[-1]
        # The others may be in first steps of their own before they wait for a hung one.
        longest *= FIRST_TIMES + STARTS_TIMES if self.is_starting_slowly else 1
        if self.seed % 3 == PARTS_SEED:
            # Who has waited in a subgroup for a slow member has paused for as long itself.
            longest = max(longest, LONGEST_TIMES * SLOW_NS_MAX / S)
        longest += self.coordinator.config.form_timeout_s
        self.timeline.after(round(longest * S) + HUNG_SLACK_NS, self._check_hung)
        if not self.timeline.run_until(until, self._is_done):
            raise CheckFailed(
                "every job that can end ends", f"after {limit // S} s: {self.pending()}"
            )
        return Outcome(
            self.seed,
            self.timeline.now_ns / S,
            self.faults.count,
            self.checkers.groups,
            self.checkers.steps,
            tuple(sorted((str(j), r.phase.value) for j, r in self.disk.records.items())),
        )

    def _plan_job(self, index: int) -> None:
        slots = sum(agent.node.num_slots for agent in self.agents)
        spec, script = draws.draw_job(
            self.timeline, index, slots, is_gentle=self.checkers.is_gentle
        )
        job_id, rng = spec.job_id, self.timeline.rng
        spec, script = self.crowd.plan_job(spec, script)
        if self.seed % 4 == COPIES_SEED:
            # In these runs all jobs have copies, and run long enough for the faults and checks.
            every = rng.choice([1, 5, 20])
            script = replace(script, copies_every=every, steps=max(300, script.steps))
            if self.seed % 16 >= RARELY_SEED and index == 0:
                script = replace(script, copies_every=10_000, steps=600, step_ns=200 * MS)
            script = replace(script, is_sharded=self.seed % 8 == 6)
        self._enter(spec, script, self.timeline.between(0, 20 * S))
        if self.timeline.chance(0.15):
            moment = self.timeline.between(20 * S, 60 * S)
            self.timeline.after(moment, self._stop, job_id)
        if self.timeline.chance(0.15) and not self.checkers.is_gentle:
            moment = self.timeline.between(10 * S, 50 * S)
            self.timeline.after(moment, self._drain_some_node)
        # Not in every seed: see the rule of `draws`.
        if self.seed % 4 == 1 and self.timeline.chance(0.8):
            moment = self.timeline.between(5 * S, 50 * S)
            self.timeline.after(moment, self._request_checkpoint, job_id)

    def _enter(self, spec: JobSpec, script: Script, at_ns: int) -> None:
        """Schedule the submission of a job."""
        script = replace(script, in_parts=self.seed % 3 == PARTS_SEED)
        if self.seed % 9 == REPORTING_SEED and not crowd.has_crowd(self.seed):
            script = replace(script, tell_every=script.steps // 2 + 1, report_every=script.steps)
        if self.is_starting_slowly:
            longest_ns = round(spec.hang_timeout_s * S)
            script = replace(script, starts_ns=STARTS_TIMES * longest_ns, works_ns=2 * longest_ns)
            script = replace(script, report_every=max(script.report_every, script.steps // 2))
        if self.seed % 24 == IN_PLACE_SEED and not self.checkers.is_gentle:
            script = replace(script, in_place=True, saved_from_ns=crowd.NEVER_NS)
        if self.seed % 13 == LEFT_SEED and not self.checkers.is_gentle:
            # Once only, or each time at the same step, where retries do not help.
            script = replace(script, leaves_at=10, leaves=1_000 if self.seed % 2 else 1)
        self.plane.scripts[spec.job_id] = script
        self.checkers.specs[spec.job_id] = spec
        self.timeline.after(at_ns, self._submit, spec)

    def _request_checkpoint(self, job_id: JobId) -> None:
        """Request a checkpoint as a user, without a retry if it is refused."""
        self.coordinator.post(CheckpointRequested(f"save {job_id}", job_id))

    def _submit(self, spec: JobSpec) -> None:
        """Submit a job, and retry until its record exists, as a client does."""
        if spec.job_id in self.disk.records:
            return
        self.submissions[spec.name] = spec
        self.coordinator.post(SubmitRequested(f"submit {spec.name}", spec))
        self.timeline.after(2 * S, self._submit, spec)

    def _stop(self, job_id: JobId) -> None:
        self.stops.add(job_id)
        self.coordinator.post(StopRequested(f"stop {job_id}", job_id, "the user said so"))

    def _drain_some_node(self) -> None:
        agent = self.timeline.rng.choice(self.agents)
        event = NodeDrainRequested(f"drain {agent.node_id}", agent.node_id, 3 * S, "operator")
        self.coordinator.post(event)

    def _replace(self) -> None:
        """Kill the coordinator that ordered a drain before the agent has left."""
        host = self.coordinator
        if not self.faults.is_over and host.machine is not None:
            host.crash()
            self.timeline.after(self.timeline.between(10 * MS, 1 * S), host.start)

    def _keep_alive(self) -> None:
        """In the liveness phase, restart agents that are down or drained; check each second."""
        for agent in self.agents:
            agent.start()
        healed_ns = self.timeline.now_ns - SAFETY_NS  # Before, nobody may have been there to judge.
        for job_id in self.plane.scripts:
            waited_ns = min(self.plane.waits_in_vain_ns(job_id), healed_ns)
            self.checkers.waits_in_vain(job_id, waited_ns / S)
        self.plane.copying.check_copied(
            [j for j, s in self.plane.scripts.items() if s.copies_every]
        )
        self.timeline.after(1 * S, self._keep_alive)

    # ------------------------------------------------------------ the end

    def _is_done(self) -> bool:
        return not self.pending()

    def pending(self) -> str:
        """Return what is not done yet, "" if the run is complete."""
        for spec in self.submissions.values():
            record = self.disk.records.get(spec.job_id)
            if record is None:
                return f"{spec.name} is not in the store"
            if record.phase.value in ("pending", "running", "paused"):
                if self._can_never_run(record):
                    continue
                return f"{spec.name} is {record.phase.value}: {record.reason}"
        for agent in self.agents:
            for process in agent.workers():
                record = self.disk.records.get(process.job_id)
                if record is None or record.phase.value not in ("pending", "running", "paused"):
                    return f"worker {process.worker_id} of an ended job still runs"
            if agent.machine is not None and self.leave_requested.get(agent.node_id) == agent.life:
                return f"node {agent.node_id}, which an operator wants to leave, is still there"
            for job_id in sorted(agent.copies.jobs()):
                if job_id in self.checkers.ended:
                    return f"node {agent.node_id} holds a copy of {job_id}, which has ended"
        return ""

    def _can_never_run(self, record: JobRecord) -> bool:
        slots = sum(agent.node.num_slots for agent in self.agents)
        return slots < record.bounds[0]


def run_seed(seed: int, *, transcript: bool = False) -> tuple[Outcome | None, list[str], str]:
    """Run one seed; return its outcome (None if it failed), its transcript and the failure."""
    simulation = Simulation(seed, keep_log=transcript)
    try:
        return simulation.run(), simulation.timeline.log, ""
    except ElasticError as failure:
        return None, simulation.timeline.log, f"{type(failure).__name__}: {failure}"
    except Exception:
        # An exception of a machine is a failure like any other, with a seed and a transcript.
        return None, simulation.timeline.log, traceback.format_exc()


@click.command()
@click.option("--seeds", default=100, show_default=True, help="How many seeds to run.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--transcript", is_flag=True, help="Print what happened in every run.")
def main(seeds: int, first: int, transcript: bool) -> None:
    """Run seeds; stop at the first failure and print how to replay it."""
    began = time.perf_counter()
    faults = groups = steps = 0
    for seed in range(first, first + seeds):
        outcome, log, failure = run_seed(seed, transcript=transcript)
        if transcript:
            print("\n".join(log))
        if outcome is None:
            if not transcript:
                print("\n".join(run_seed(seed, transcript=True)[1][-60:]))
            print(f"seed {seed} failed: {failure}")
            replay = f"--seeds 1 --first {seed} --transcript"
            print(f"replay: python -m tests.simulation.simulator {replay}")
            sys.exit(1)
        faults += outcome.faults
        groups += outcome.groups
        steps += outcome.steps
    took_s = time.perf_counter() - began
    print(
        f"{seeds} seeds passed in {took_s:.1f} s: {faults} faults, {groups} groups formed, "
        f"{steps} steps"
    )


if __name__ == "__main__":
    main()

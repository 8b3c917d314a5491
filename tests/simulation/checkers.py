"""Safety and liveness properties; independent of the runtime's code.

Rule: checkers receive only what is visible outside (announcements as workers receive them, records
as they become durable, groups as they form, steps as they happen) and compare only these with each
other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.facts import Assignment, Generation, JobId, NodeId, WorkerId
from elastic.core.records import JobRecord
from elastic.errors import ElasticError
from tests.simulation.crowd_checks import CrowdChecks
from tests.simulation.row_checks import RowChecks

LEFT_S_MAX = 30.0
"""Long enough for a coordinator that is replaced meanwhile to get new reports and judge again."""


class CheckFailed(ElasticError):
    """A property does not hold; the run can be replayed by its seed."""

    def __init__(self, prop: str, detail: str) -> None:
        """Name the property and its counterexample."""
        self.prop = prop
        super().__init__(f"{prop}: {detail}")


@dataclass(frozen=True)
class DurableGroup:
    """A group as the store had it when it became durable."""

    generation: Generation
    ranks: tuple[WorkerId, ...]


@dataclass
class Checkers:
    """All properties, over one run.

    Attributes:
        specs: the submitted jobs.
        durable: every group that ever became durable, by job and generation.
        newest: the newest durable generation of each job.
        announced_ranks: the worker that each rank was announced to, by job and generation.
        leaders: the leader of each term.
        obeyed_terms: the newest term from which each life of an agent accepted orders.
        crowd: users' requests for several jobs, for the properties of queue, pause and cordon.
        rows: the copies of sharded runs.
        copied: the newest copy of each job that a node ever accepted: generation and steps.
        is_gentle: all faults of this cluster are announced in good time.
        reached: the last step of each job's newest group.
        notices: number of workers that received a notice of leaving nodes.
    """

    specs: dict[JobId, JobSpec] = field(default_factory=dict)
    durable: dict[tuple[JobId, Generation], DurableGroup] = field(default_factory=dict)
    newest: dict[JobId, Generation] = field(default_factory=dict)
    announced_ranks: dict[tuple[JobId, Generation, int], WorkerId] = field(default_factory=dict)
    recorded: dict[tuple[JobId, str, Generation], None] = field(default_factory=dict)
    ended: dict[JobId, str] = field(default_factory=dict)
    _shaped: dict[tuple[JobId, Generation], None] = field(default_factory=dict)
    returned: dict[tuple[JobId, Generation, int], None] = field(default_factory=dict)
    leaders: dict[int, str] = field(default_factory=dict)
    obeyed_terms: dict[tuple[NodeId, int], int] = field(default_factory=dict)
    crowd: CrowdChecks = field(default_factory=CrowdChecks)
    copied: dict[JobId, dict[NodeId, tuple[Generation, int]]] = field(default_factory=dict)
    rows: RowChecks = field(default_factory=RowChecks)
    is_gentle: bool = False
    reached: dict[JobId, int] = field(default_factory=dict)
    metrics: dict[tuple[JobId, Generation], str] = field(default_factory=dict)
    notices: int = 0
    steps: int = 0
    groups: int = 0

    def require(self, condition: bool, prop: str, detail: str = "") -> None:
        """Fail the run unless the property holds."""
        if not condition:
            raise CheckFailed(prop, detail)

    def failed(self, prop: str, detail: str) -> None:
        """Fail the run if `prop` is not ""."""
        self.require(not prop, prop, detail)

    # ------------------------------------------------------------ the store

    def persisted(
        self, job_id: JobId, group: DurableGroup | None, generation: Generation, phase: str
    ) -> None:
        """Check a job's record that became durable."""
        before = self.newest.get(job_id, 0)
        self.require(
            generation >= before,
            "a generation never falls",
            f"job {job_id}: {before} was durable, now {generation}",
        )
        self.newest[job_id] = generation
        if job_id in self.ended:
            self.require(
                phase == self.ended[job_id],
                "an ended job stays ended",
                f"job {job_id}: {self.ended[job_id]}, now {phase}",
            )
        if phase == "succeeded":
            self.require(
                (job_id, generation, 0) in self.returned,
                "a job succeeds only if its leader's train function returned",
                f"job {job_id} generation {generation}",
            )
        if phase in ("succeeded", "failed", "stopped"):
            self.ended[job_id] = phase
        if group is None:
            return
        key = (job_id, group.generation)
        known = self.durable.setdefault(key, group)
        self.require(
            known == group,
            "a generation is never reused",
            f"job {job_id} generation {group.generation}: {known.ranks}, now {group.ranks}",
        )
        if key not in self._shaped:
            self._shaped[key] = None
            self._check_shape(job_id, group)

    def _check_shape(self, job_id: JobId, group: DurableGroup) -> None:
        spec = self.specs[job_id]
        size = len(group.ranks)
        who = f"job {job_id} generation {group.generation}"
        low, high = self.crowd.bounds.get(job_id, (spec.min_workers, spec.max_workers))
        self.require(
            low <= size <= high,
            "a group is within min and max",
            f"{who}: {size} members, allowed {low} to {high}",
        )
        self.require(
            size % spec.workers_per_replica == 0,
            "a group is made of whole replicas",
            f"{who}: {size} members, replicas of {spec.workers_per_replica}",
        )
        self.require(
            len(set(group.ranks)) == size, "ranks are a permutation", f"{who}: {group.ranks}"
        )

    def checkpoint_recorded(
        self, job_id: JobId, path: str, generation: Generation, current: Generation
    ) -> None:
        """Check a checkpoint record that became durable while `current` was the newest group."""
        key = (job_id, path, generation)
        if key in self.recorded:
            return
        self.recorded[key] = None
        self.require(
            generation == current,
            "only the current generation commits checkpoints",
            f"job {job_id}: {path} of generation {generation} at generation {current}",
        )

    # ------------------------------------------------------------ leadership

    def took_leader_state(self, name: str, term: int) -> None:
        """Record that a coordinator acquired the lease."""
        self.require(
            term not in self.leaders,
            "one coordinator leads in a term",
            f"term {term}: {self.leaders.get(term)} and {name}",
        )
        self.leaders[term] = name

    def wrote(self, name: str, term: int) -> None:
        """Check a coordinator's write to the store."""
        newest = max(self.leaders)
        self.require(
            term == newest and self.leaders[term] == name,
            "only the newest leader writes",
            f"{name} under term {term}, newest is {newest} of {self.leaders[newest]}",
        )

    def commanded(self, name: str, term: int, newest: int) -> None:
        """Check an order of a coordinator whose clock was never paused in its term."""
        self.require(
            term == newest,
            "a leader stops before another one can lead",
            f"{name} under term {term}, newest is {newest} of {self.leaders[newest]}",
        )

    def obeyed(self, node_id: NodeId, life: int, term: int) -> None:
        """Check that an agent accepted an order of a leader with this term."""
        key = (node_id, life)
        newest = self.obeyed_terms.setdefault(key, term)
        self.require(
            term >= newest,
            "an agent obeys no leader that was replaced",
            f"node {node_id}: term {term} after {newest}",
        )
        self.obeyed_terms[key] = term

    # ------------------------------------------------------------ the workers

    def announced(self, worker_id: WorkerId, assignment: Assignment) -> None:
        """Check an assignment that a worker received."""
        key = (assignment.job_id, assignment.generation)
        who = f"job {key[0]} generation {key[1]}: worker {worker_id}"
        group = self.durable.get(key)
        self.require(group is not None, "nobody acts on a generation before it is durable", who)
        if group is None:
            return
        self.require(
            assignment.world_size == len(group.ranks),
            "all members know one world size",
            f"{who}: {assignment.world_size}, durable {len(group.ranks)}",
        )
        rank_key = (*key, assignment.rank)
        holder = self.announced_ranks.setdefault(rank_key, worker_id)
        self.require(
            holder == worker_id,
            "ranks are a permutation",
            f"{who} and {holder} both have rank {assignment.rank}",
        )
        self.require(
            0 <= assignment.rank < len(group.ranks) and group.ranks[assignment.rank] == worker_id,
            "ranks are a permutation",
            f"{who} was told rank {assignment.rank} of {group.ranks}",
        )

    def group_formed(
        self, job_id: JobId, generation: Generation, members: tuple[WorkerId, ...]
    ) -> None:
        """Check a group that formed in the data plane."""
        self.groups += 1
        group = self.durable.get((job_id, generation))
        self.require(
            group is not None and group.ranks == members,
            "the group that trains is the durable one",
            f"job {job_id} generation {generation}: {members}",
        )

    def stepped(self, job_id: JobId, generation: Generation, step: int) -> None:
        """Check a step that a group made."""
        self.steps += 1
        self.reached[job_id] = step
        self.require(
            (job_id, generation) in self.durable,
            "only durable generations train",
            f"job {job_id} generation {generation} step {step}",
        )

    def train_returned(self, job_id: JobId, generation: Generation, rank: int) -> None:
        """Record that a train function returned in a running process."""
        self.returned[job_id, generation, rank] = None

    def told(self, job_id: JobId, generation: Generation, metrics: str) -> None:
        """Record the metrics that a group's script reported."""
        self.metrics[job_id, generation] = metrics

    def succeeded(self, job_id: JobId, generation: Generation, metrics: str) -> None:
        """Check the metrics of a job whose success became durable."""
        told = self.metrics.get((job_id, generation), metrics)
        self.require(
            metrics == told,
            "a job that succeeds has the metrics that its script told last",
            f"job {job_id} generation {generation}: told {told}, has {metrics}",
        )

    def reported_of_preemption(self, worker_id: WorkerId, reason: str) -> None:
        """Check a worker's notice that nodes of its group leave."""
        self.require(bool(reason), "a notice says why", f"worker {worker_id}")
        self.notices += 1

    def begins(self, job_id: JobId, generation: Generation, step: int, cause: str) -> None:
        """Check the step from which a group starts to train."""
        reached = self.reached.get(job_id, 0)
        can_save = job_id != self.crowd.unsaved
        if self.is_gentle and can_save and cause in ("join", "drain"):
            self.require(
                step >= reached,
                "nothing is done twice when there is time to leave",
                f"job {job_id} generation {generation} begins at step {step}, {reached} were done",
            )
        self.require(
            step >= reached or job_id not in self.crowd.careful,
            "a job that leaves by plan does nothing twice",
            f"job {job_id} generation {generation} begins at step {step}, {reached} were done",
        )
        self.reached[job_id] = step

    def ended_by_script(self, job_id: JobId, record: JobRecord) -> None:
        """Check the record of a job that has failed."""
        is_taken = 0 <= record.spec.max_preemptions < record.preemptions
        self.require(
            record.failure is not None or is_taken,
            "strikes alone never end a job",
            f"job {job_id}: {record.reason}",
        )

    def charged(self, job_id: JobId, losses: int, preemptions: int) -> None:
        """Check the counts in a record that became durable."""
        if self.is_gentle:
            self.require(
                losses == 0,
                "what was announced is charged to nobody",
                f"job {job_id}: {losses} losses, {preemptions} preemptions",
            )

    # ------------------------------------------------------------ accusations

    def accused_node(self, node_id: str, *, is_guilty: bool) -> None:
        """Check that a node that the coordinator gave up as silent really did not reply."""
        self.require(
            is_guilty, "a node that answers is never given up as silent", f"node {node_id}"
        )

    def accused_worker(self, worker_id: str, *, is_guilty: bool) -> None:
        """Check that a worker that the coordinator is about to kill as hung really hangs."""
        self.require(
            is_guilty, "a worker that moves is never killed as hung", f"worker {worker_id}"
        )

    def accused_group(self, job_id: str, generation: str, *, is_guilty: bool) -> None:
        """Check that a group that the coordinator is about to replace as stuck really is."""
        self.require(
            is_guilty,
            "a group that goes on is never replaced as stuck",
            f"job {job_id} generation {generation}",
        )

    def still_hung(self, worker_ids: list[str]) -> None:
        """Fail if any workers have hung for longer than allowed."""
        self.require(not worker_ids, "a hung worker is killed in time", " ".join(worker_ids))

    def waits_in_vain(self, job_id: JobId, seconds: float) -> None:
        """Check for how long members have waited for one that has left for good."""
        self.require(
            seconds <= LEFT_S_MAX,
            "a job in which one member has left ends",
            f"job {job_id}: the others wait for it since {seconds:.0f} s",
        )

    def started(self, node_id: NodeId, busy: int, num_slots: int) -> None:
        """Check the number of workers that an agent runs."""
        self.require(
            busy <= num_slots,
            "a node is never overbooked",
            f"node {node_id} runs {busy} workers on {num_slots} slots",
        )

    # ------------------------------------------------------------ copies

    def copy_taken(
        self, job_id: JobId, node_id: NodeId, age: tuple[Generation, int], source: NodeId
    ) -> None:
        """Check a copy that a node received from another one."""
        self.require(
            node_id != source,
            "a copy lies on another node than the one that took it",
            f"job {job_id}: node {node_id}",
        )
        taken = self.copied.setdefault(job_id, {})
        taken[node_id] = max(age, taken.get(node_id, age))

    def copy_freed(self, job_id: JobId, node_id: NodeId, age: tuple[Generation, int]) -> None:
        """Check an order to a node to free a copy."""
        others = [a for node, a in self.copied.get(job_id, {}).items() if node != node_id]
        self.require(
            job_id in self.ended or max(others, default=(0, 0)) >= age,
            "no copy is freed before another node has a newer one",
            f"job {job_id}: node {node_id} freed {age}; others had {others}",
        )

    def never_copied(self, job_id: JobId, generation: Generation) -> None:
        """Fail: a run has trained for long without a copy, though a node could hold one."""
        self.require(
            False,
            "a run has a copy if there is a node for it",
            f"job {job_id} generation {generation}",
        )

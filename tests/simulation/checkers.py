"""What must never happen, and what must happen in the end; knows nothing of the runtime's code.

Rule: checkers are fed with what became visible outside (announcements as workers receive them,
records as they become durable, groups as they form, steps as they happen) and compare only
these with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.events.coordinator import JobRecord
from elastic.core.world import Assignment, Generation, JobId, NodeId, WorkerId
from elastic.errors import ElasticError
from tests.simulation.crowd_checks import CrowdChecks
from tests.simulation.row_checks import RowChecks

LEFT_S_MAX = 30.0
"""A coordinator that is replaced meanwhile hears of it again, and judges anew."""


class CheckFailed(ElasticError):
    """A property does not hold; the run that showed it can be replayed by its seed."""

    def __init__(self, prop: str, detail: str) -> None:
        """Name the property and what contradicts it."""
        self.prop = prop
        super().__init__(f"{prop}: {detail}")


@dataclass(frozen=True)
class DurableGroup:
    """What the store held when a group became durable."""

    generation: Generation
    ranks: tuple[WorkerId, ...]


@dataclass
class Checkers:
    """All properties, over one run.

    Attributes:
        specs: what was submitted.
        durable: every group that ever became durable, by job and generation.
        newest: the newest durable generation of each job.
        announced_ranks: which worker was told which rank, by job and generation.
        leaders: who led under each term.
        obeyed_terms: the newest term that each life of an agent took orders under.
        crowd: what users did with several jobs, for the properties of queue, pause and cordon.
        rows: the copies of sharded runs.
        copied: the newest copy of each job that a node ever took: generation and steps.
        is_gentle: nothing happens to this cluster but what was announced in good time.
        reached: the last step of each job's newest group.
        notices: workers that learned of nodes that leave.
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
        """Fail the run if a property is named."""
        self.require(not prop, prop, detail)

    # ------------------------------------------------------------ the store

    def persisted(
        self, job_id: JobId, group: DurableGroup | None, generation: Generation, phase: str
    ) -> None:
        """A record became durable."""
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
        """A checkpoint record became durable beside the group `current`."""
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
        """A coordinator holds the lease from here on."""
        self.require(
            term not in self.leaders,
            "one coordinator leads in a term",
            f"term {term}: {self.leaders.get(term)} and {name}",
        )
        self.leaders[term] = name

    def wrote(self, name: str, term: int) -> None:
        """A coordinator changed the store."""
        newest = max(self.leaders)
        self.require(
            term == newest and self.leaders[term] == name,
            "only the newest leader writes",
            f"{name} under term {term}, newest is {newest} of {self.leaders[newest]}",
        )

    def commanded(self, name: str, term: int, newest: int) -> None:
        """A coordinator, whose clock never stood still in its term, gives an order."""
        self.require(
            term == newest,
            "a leader stops before another one can lead",
            f"{name} under term {term}, newest is {newest} of {self.leaders[newest]}",
        )

    def obeyed(self, node_id: NodeId, life: int, term: int) -> None:
        """An agent took an order of the coordinator that leads under this term."""
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
        """A worker acts on a generation."""
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
        """A group stands in the data plane."""
        self.groups += 1
        group = self.durable.get((job_id, generation))
        self.require(
            group is not None and group.ranks == members,
            "the group that trains is the durable one",
            f"job {job_id} generation {generation}: {members}",
        )

    def stepped(self, job_id: JobId, generation: Generation, step: int) -> None:
        """A group made a step."""
        self.steps += 1
        self.reached[job_id] = step
        self.require(
            (job_id, generation) in self.durable,
            "only durable generations train",
            f"job {job_id} generation {generation} step {step}",
        )

    def train_returned(self, job_id: JobId, generation: Generation, rank: int) -> None:
        """A train function returned in a living process."""
        self.returned[job_id, generation, rank] = None

    def told(self, job_id: JobId, generation: Generation, metrics: str) -> None:
        """A group's script reported this."""
        self.metrics[job_id, generation] = metrics

    def succeeded(self, job_id: JobId, generation: Generation, metrics: str) -> None:
        """A job's success became durable, with these metrics."""
        told = self.metrics.get((job_id, generation), metrics)
        self.require(
            metrics == told,
            "a job that succeeds has the metrics that its script told last",
            f"job {job_id} generation {generation}: told {told}, has {metrics}",
        )

    def reported_of_preemption(self, worker_id: WorkerId, reason: str) -> None:
        """A worker learned that nodes of its group leave."""
        self.require(bool(reason), "a notice says why", f"worker {worker_id}")
        self.notices += 1

    def begins(self, job_id: JobId, generation: Generation, step: int, cause: str) -> None:
        """A group is about to train, from this step on."""
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
        """A record says that the job has failed."""
        is_taken = 0 < record.spec.preemption_limit <= record.preemptions
        self.require(
            record.failure is not None or is_taken,
            "strikes alone never end a job",
            f"job {job_id}: {record.reason}",
        )

    def charged(self, job_id: JobId, losses: int, preemptions: int) -> None:
        """A record became durable with these counts."""
        if self.is_gentle:
            self.require(
                losses == 0,
                "what was announced is charged to nobody",
                f"job {job_id}: {losses} losses, {preemptions} preemptions",
            )

    # ------------------------------------------------------------ accusations

    def accused_node(self, node_id: str, *, is_guilty: bool) -> None:
        """The coordinator gave up a node because it did not answer."""
        self.require(
            is_guilty, "a node that answers is never given up as silent", f"node {node_id}"
        )

    def accused_worker(self, worker_id: str, *, is_guilty: bool) -> None:
        """The coordinator is about to kill a worker because it does not move."""
        self.require(
            is_guilty, "a worker that moves is never killed as hung", f"worker {worker_id}"
        )

    def accused_group(self, job_id: str, generation: str, *, is_guilty: bool) -> None:
        """The coordinator is about to replace a group because none of its members moves."""
        self.require(
            is_guilty,
            "a group that goes on is never replaced as stuck",
            f"job {job_id} generation {generation}",
        )

    def still_hung(self, worker_ids: list[str]) -> None:
        """These workers hung for longer than they may."""
        self.require(not worker_ids, "a hung worker is killed in time", " ".join(worker_ids))

    def waits_in_vain(self, job_id: JobId, seconds: float) -> None:
        """Members have waited for so long for one that has left for good."""
        self.require(
            seconds <= LEFT_S_MAX,
            "a job in which one member has left ends",
            f"job {job_id}: the others wait for it since {seconds:.0f} s",
        )

    def started(self, node_id: NodeId, busy: int, num_slots: int) -> None:
        """An agent runs this many workers now."""
        self.require(
            busy <= num_slots,
            "a node is never overbooked",
            f"node {node_id} runs {busy} workers on {num_slots} slots",
        )

    # ------------------------------------------------------------ copies

    def copy_taken(
        self, job_id: JobId, node_id: NodeId, age: tuple[Generation, int], source: NodeId
    ) -> None:
        """A node holds a copy that another one has brought."""
        self.require(
            node_id != source,
            "a copy lies on another node than the one that took it",
            f"job {job_id}: node {node_id}",
        )
        taken = self.copied.setdefault(job_id, {})
        taken[node_id] = max(age, taken.get(node_id, age))

    def copy_freed(self, job_id: JobId, node_id: NodeId, age: tuple[Generation, int]) -> None:
        """A node was told to free a copy."""
        others = [a for node, a in self.copied.get(job_id, {}).items() if node != node_id]
        self.require(
            job_id in self.ended or max(others, default=(0, 0)) >= age,
            "no copy is freed before another node has a newer one",
            f"job {job_id}: node {node_id} freed {age}; others had {others}",
        )

    def never_copied(self, job_id: JobId, generation: Generation) -> None:
        """A run has trained for long, beside a node that could hold a copy of it."""
        self.require(
            False,
            "a run has a copy if there is a node for it",
            f"job {job_id} generation {generation}",
        )

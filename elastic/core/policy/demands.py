"""Data types of the queue: a job's demand and allocation, and the texts of reasons.

Rule: an allocation draft is changed only by its own plan; everything else is frozen.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.facts import JobId, NodeId, Strategy, WorkerId
from elastic.core.policy.packing import WorkerPlacer

HeldSlot = tuple[WorkerId, NodeId]
NAMED_MAX = 3
"""Maximum number of other jobs named in a reason."""


@dataclass(frozen=True)
class Demand:
    """The demand of one job for workers.

    Attributes:
        spec: needs, and the current bounds.
        sequence: order of submission.
        held_slots: its workers on usable nodes, in the order in which it would keep them.
        away: number of its workers on nodes that do not answer now.
        out: nodes on which no more of its workers may start, whatever they have free.
        trains: it has a group.
        is_ending: members of its group have finished, so it is not changed any more.
        keeps_state: its workers hold training state, or had a group before.
        in_place: its group leaves at a step boundary, not only at a report.
        stays: why it cannot be preempted, "" if it can.
        passed_over_until_ns, passed_over_why: it is not preempted before, and why.
    """

    spec: JobSpec
    sequence: int
    held_slots: tuple[HeldSlot, ...] = ()
    away: int = 0
    out: frozenset[NodeId] = frozenset()
    trains: bool = False
    is_ending: bool = False
    keeps_state: bool = False
    in_place: bool = False
    stays: str = "does not give way"
    passed_over_until_ns: int = 0
    passed_over_why: str = ""


@dataclass(frozen=True)
class Allocation:
    """The workers that one job may have.

    Attributes:
        size: workers in all, 0 if it is not admitted and holds none.
        starts: number of new workers by node.
        yields: workers that it must release at its next boundary, or at once if no group needs
            them.
        reason: why it must wait and what would let it run, "" if the queue does not hold it back.
        yields_to: the job that preempts it, once its state is saved, with the priorities: "j-1
            (priority 10 over 0)"; "" for none.
    """

    job_id: JobId
    size: int
    starts: tuple[tuple[NodeId, int], ...] = ()
    yields: tuple[WorkerId, ...] = ()
    reason: str = ""
    yields_to: str = ""


@dataclass
class AllocationDraft:
    """An allocation while the plan is computed.

    Attributes:
        kept: its slots that are counted.
        tried: number of its slots that need not be checked again. Full or barred nodes stay so
            while the plan grows; code that frees something resets this to 0.
        starts, num_starts: new workers by node, and in all.
    """

    demand: Demand
    kept: dict[WorkerId, NodeId] = field(default_factory=dict)
    tried: int = 0
    starts: dict[NodeId, int] = field(default_factory=dict)
    num_starts: int = 0
    is_admitted: bool = False
    reason: str = ""
    placer: WorkerPlacer | None = None
    yields_to: AllocationDraft | None = None

    @property
    def size(self) -> int:
        """Return how many workers it has in the plan so far."""
        return len(self.kept) + self.demand.away + self.num_starts

    def hosting(self) -> dict[NodeId, int]:
        """Return how many of its workers are counted on each node."""
        found = dict(self.starts)
        for node_id in self.kept.values():
            found[node_id] = found.get(node_id, 0) + 1
        return found

    def holds(self, nodes: Container[NodeId]) -> int:
        """Return how many workers it has in the plan so far, if any is on one of these nodes."""
        if not any(node_id in nodes for node_id in self.hosting()):
            return 0
        return len(self.kept) + self.num_starts

    def is_to_start_off(self, node_id: NodeId) -> bool:
        """Return whether new workers start on another node, the only one that it may have."""
        is_bound = self.demand.spec.strategy is Strategy.STRICT_PACK
        return is_bound and bool(self.starts) and node_id not in self.starts

    def unkept(self) -> list[HeldSlot]:
        return [slot for slot in self.demand.held_slots if slot[0] not in self.kept]


def priority_key(demand: Demand) -> tuple[int, int]:
    """Return the sort key of jobs: priority, then age."""
    return -demand.spec.priority, demand.sequence


def listed(names: Sequence[str]) -> str:
    """Return "n1, n2, n3, ..."."""
    return ", ".join(names[:NAMED_MAX]) + (", ..." if len(names) > NAMED_MAX else "")


def named(demand: Demand) -> str:
    """Return "j-1 (priority 10)"."""
    return f"{demand.spec.job_id} (priority {demand.spec.priority})"


def over(first: AllocationDraft, draft: AllocationDraft) -> str:
    """Return "j-1 (priority 10 over 0)"."""
    spec = first.demand.spec
    return f"{spec.job_id} (priority {spec.priority} over {draft.demand.spec.priority})"


def gives(draft: AllocationDraft) -> str:
    """Return a phrase for what a training job releases, and when."""
    demand, count = draft.demand, len(draft.unkept())
    if draft.yields_to is not None:
        how = "a checkpoint is written" if demand.in_place else "it has reported a checkpoint"
        return f"{named(demand)} gives way with all {count} as soon as {how}"
    where = "step boundary" if demand.in_place else "report"
    return f"{named(demand)} gives {count} back at its next {where}"


def holders(held: Sequence[tuple[AllocationDraft, int]]) -> str:
    """Return a phrase for which jobs keep how many workers, and why."""
    mins = [(d, n) for d, n in held if d.is_admitted and not d.demand.is_ending]
    parts = [f"{named(d.demand)} keeps {n}" for d, n in mins[:NAMED_MAX]]
    clauses = []
    if parts:
        more = f" and {len(mins) - NAMED_MAX} more" if len(mins) > NAMED_MAX else ""
        right = "is its min" if len(mins) == 1 else "are their mins"
        clauses.append(f"{', '.join(parts)}{more}, which {right}")
    # A job that trains keeps what it has while others of its workers leave or are lost.
    others = [(d, n) for d, n in held if not d.is_admitted or d.demand.is_ending]
    for d, n in others[:NAMED_MAX]:
        why = ", and is about to end" if d.demand.is_ending else ", and lacks workers itself"
        clauses.append(f"{named(d.demand)} keeps {n}{why}")
    return "; ".join(clauses)


def blocker(demand: Demand) -> str:
    """Return a phrase for why a job cannot use nodes on which no other job has workers."""
    clauses = []
    if demand.away:
        clauses.append(f"workers of its own ({demand.away}) are on nodes that do not answer")
    if demand.out:
        clauses.append(
            f"none may start on {listed(sorted(demand.out))}, cut off from its other nodes"
        )
    return " and ".join(clauses) or "the nodes on which its workers are have no more room"


def workers(spec: JobSpec, count: int) -> str:
    """Return "4 workers of GPU=1"."""
    amounts = " ".join(f"{n}={a:g}" for n, a in spec.resources_per_worker.as_dict().items())
    return f"{count} worker{'' if count == 1 else 's'}{' of ' if amounts else ''}{amounts}"


def behind(draft: AllocationDraft, ahead: AllocationDraft) -> str:
    """Return a phrase that free slots are reserved for another job."""
    spec = draft.demand.spec
    return (
        f"needs {workers(spec, spec.min_workers)}; free slots are kept for {named(ahead.demand)}, "
        f"which comes first and needs {ahead.demand.spec.min_workers}"
    )

"""The queue: how many workers each job may have, and which workers are released for another job.

Rule, in this order:

1. A training job keeps its min, unless one of strictly higher priority cannot start otherwise:
   then as few jobs as possible, of the lowest priority, are preempted (`eviction`), and wait.
2. Waiting jobs are admitted by priority, then by age. A job is admitted with its whole min or
   holds nothing.
3. For the first one that does not fit, free slots that it could use are reserved: a stream of small
   jobs cannot starve it. Later ones may only have slots that it could never use. One that would not
   fit even alone reserves nothing.
4. The remaining slots go to all admitted jobs, replica by replica, by priority, then to the
   smallest: elastic jobs grow into free slots, also into reserved ones, and release them at a
   boundary when the waiting job can start.

The result depends on the jobs and nodes, and hardly on the present placement: after a plan was
carried out, the next plan is the same, so that jobs do not grow and shrink in turn.
Source: gang admission and reclaimable growth are those of Kueue and of Volcano's DRF; keeping slots
for the first is "backfill" without run times, which are unknown for training jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from elastic.core.facts import NodeId
from elastic.core.policy import eviction
from elastic.core.policy.decision import Decision
from elastic.core.policy.demands import (
    NAMED_MAX,
    Allocation,
    AllocationDraft,
    Demand,
    behind,
    blocker,
    gives,
    holders,
    named,
    over,
    priority_key,
    workers,
)
from elastic.core.policy.packing import FreeCapacity, NodeCapacity, WorkerPlacer, together


def decide(
    demands: Sequence[Demand], nodes: Sequence[NodeCapacity], *, now_ns: int = 0
) -> Decision[tuple[Allocation, ...]]:
    """Divide the cluster.

    Args:
        demands: every job that has not ended and is not paused, in any order.
        nodes: the nodes on which workers may start, in any order.
        now_ns: the moment, on the clock of `Demand.passed_over_until_ns`.

    Returns:
        One allocation for each demand, by order of submission; when to decide again if a job waits
        for one that is passed over for a while.

    Guarantees (tests/property/test_queue.py):
        No node is overcommitted. An admitted job has min, in whole replicas; a training job keeps
        it, except for one of higher priority. A plan that was carried out is planned again.
    """
    plan = _Plan(sorted(demands, key=lambda c: c.sequence), nodes, now_ns)
    plan.keep_training()
    plan.admit_waiting()
    plan.keep_survivors()
    plan.extend()
    grants = tuple(plan.grant(draft) for draft in plan.drafts)
    admitted = sum(1 for draft in plan.drafts if draft.is_admitted)
    return Decision(grants, f"{admitted} of {len(grants)} jobs fit", plan.wake_ns)


class _Plan:
    """All drafts, and the free capacity of the nodes."""

    def __init__(
        self, demands: Sequence[Demand], nodes: Sequence[NodeCapacity], now_ns: int
    ) -> None:
        self.now_ns = now_ns
        self.wake_ns: int | None = None
        self.drafts = [AllocationDraft(demand) for demand in demands]
        self.space = FreeCapacity(nodes)
        self._barred: dict[NodeId, AllocationDraft] = {}

    # ------------------------------------------------------------ the four steps

    def keep_training(self) -> None:
        """Keep min workers of training jobs, and all workers of jobs that are about to end."""
        for draft in sorted(self.drafts, key=lambda d: priority_key(d.demand)):
            demand = draft.demand
            if not demand.trains and not demand.is_ending:
                continue
            # Workers on nodes that do not answer do not count here: they may be lost.
            self._keep_workers(
                draft, len(demand.held_slots) if demand.is_ending else demand.spec.min_workers
            )
            draft.is_admitted = demand.is_ending or draft.size >= demand.spec.min_workers

    def admit_waiting(self) -> None:
        """Give waiting jobs their min, in order; reserve free slots for those that do not fit."""
        waiting = [draft for draft in self.drafts if not draft.is_admitted]
        for draft in self._by_turn(waiting):
            spec = draft.demand.spec
            need = spec.min_workers - draft.size
            shape = self.space.shape(spec)
            cordoned = sum(1 for _, n in draft.demand.held_slots if self.space.nodes[n].cordoned)
            if shape.fitting(spec) + cordoned + draft.demand.away < spec.min_workers:
                continue  # It never fits on these nodes: placement reports what is missing.
            ahead = next((self._barred[n] for n in shape.capacity if n in self._barred), None)
            can_have = any(node_id not in self._barred for node_id in shape.capacity)
            if self._place(draft, need) or (can_have and self._evict(draft, need, waiting)):
                draft.is_admitted = True
                draft.yields_to = None  # It was moved: elsewhere it fits.
                continue
            if ahead is not None:
                draft.reason = behind(draft, ahead)
            else:
                draft.reason = self._in_vain(draft)
            for node_id in shape.capacity:
                self._barred.setdefault(node_id, draft)

    def _evict(self, draft: AllocationDraft, need: int, waiting: list[AllocationDraft]) -> bool:
        """Preempt other jobs if the job fits then; they wait from here on."""
        if draft.yields_to is not None:
            return False  # It still trains; once it waits it may preempt others.
        able = []
        for other in sorted(self.drafts, key=lambda d: priority_key(d.demand), reverse=True):
            demand = other.demand
            is_lower = demand.spec.priority < draft.demand.spec.priority
            if not (is_lower and demand.trains) or demand.is_ending:
                continue
            if demand.stays or not other.kept:
                continue
            if demand.passed_over_until_ns > self.now_ns:
                self._wake_at(demand.passed_over_until_ns)
                continue
            able.append(other)

        def fits(chosen: tuple[int, ...]) -> bool:
            return self._place_without(draft, need, [able[i] for i in chosen], keep=False)

        victims = [able[i] for i in eviction.fewest(len(able), fits)]
        if not victims or not self._place_without(draft, need, victims, keep=True):
            return False
        for victim in victims:
            victim.yields_to = draft
            if victim.is_admitted:  # One that has too few nodes waits already.
                victim.is_admitted = False
                waiting.append(victim)
                heapq.heappush(self._turns, (self._turn(victim), len(waiting) - 1))
        return True

    def _place_without(
        self, draft: AllocationDraft, need: int, victims: Sequence[AllocationDraft], *, keep: bool
    ) -> bool:
        """Try to place a job's workers without these jobs; `keep`: and keep the result."""
        slots = [dict(victim.kept) for victim in victims]
        kept, starts, num_starts = len(draft.kept), dict(draft.starts), draft.num_starts
        for victim in victims:
            self._release(victim, 0)
        fits = self._place(draft, need)
        for other in self.drafts:
            other.tried = 0  # Capacity was freed, here or in between.
        if fits and keep:
            return True
        if fits:
            self._release(draft, kept)
            for node_id, count in draft.starts.items():
                for _ in range(count - starts.get(node_id, 0)):
                    self.space.give(node_id, draft.demand.spec.resources_per_worker, is_new=True)
            draft.starts, draft.num_starts = starts, num_starts
        for victim, before in zip(victims, slots, strict=True):
            for node_id in before.values():
                self.space.take(node_id, victim.demand.spec.resources_per_worker, is_new=False)
            victim.kept = before
        return fits

    def _release(self, draft: AllocationDraft, count: int) -> None:
        """Release all but the first `count` kept slots."""
        over = list(draft.kept)[count:]
        for worker_id in over:
            node_id = draft.kept.pop(worker_id)
            self.space.give(node_id, draft.demand.spec.resources_per_worker, is_new=False)
        draft.placer = None

    def _wake_at(self, moment: int) -> None:
        self.wake_ns = moment if self.wake_ns is None else min(self.wake_ns, moment)

    def keep_survivors(self) -> None:
        """Keep the slots of waiting workers with state, as long as no other job can use them."""
        self._barred = {}
        for draft in self.drafts:
            draft.tried = 0
            if draft.is_admitted or draft.demand.trains or not draft.demand.keeps_state:
                continue
            self._keep_workers(draft, len(draft.demand.held_slots))

    def extend(self) -> None:
        """Distribute the remaining slots, one replica at a time."""
        able = [d for d in self.drafts if d.is_admitted and not d.demand.is_ending]
        for draft in self._by_turn(able, again=True):
            spec = draft.demand.spec
            step = spec.workers_per_replica
            # After a loss a job may hold a part of a replica.
            step -= draft.size % step
            if draft.size + step > spec.max_workers:
                continue
            if self._place(draft, step):
                self._again(draft)

    # ------------------------------------------------------------ order

    def _by_turn(
        self, drafts: Sequence[AllocationDraft], *, again: bool = False
    ) -> Iterator[AllocationDraft]:
        """Yield drafts in order; those that are pushed again meanwhile are yielded again."""
        self._size_counts = again
        self._turns = [(self._turn(d), i) for i, d in enumerate(drafts)]
        heapq.heapify(self._turns)
        while self._turns:
            _, self._index = heapq.heappop(self._turns)
            yield drafts[self._index]

    def _again(self, draft: AllocationDraft) -> None:
        heapq.heappush(self._turns, (self._turn(draft), self._index))

    def _turn(self, draft: AllocationDraft) -> tuple[int, int, int]:
        size = draft.size if self._size_counts else 0
        return -draft.demand.spec.priority, size, draft.demand.sequence

    # ------------------------------------------------------------ slots and nodes

    def _keep_workers(self, draft: AllocationDraft, limit: int) -> int:
        """Count up to `limit` of its workers where they are; return how many."""
        need, slots, count = draft.demand.spec.resources_per_worker, draft.demand.held_slots, 0
        while count < limit and draft.tried < len(slots):
            worker_id, node_id = slots[draft.tried]
            draft.tried += 1
            if worker_id in draft.kept or node_id in self._barred or draft.is_to_start_off(node_id):
                continue
            if not self.space.capacity(node_id, need):
                continue
            self.space.take(node_id, need, is_new=False)
            draft.kept[worker_id] = node_id
            if draft.placer is not None:
                draft.placer.host(node_id)
            count += 1
        return count

    def _place(self, draft: AllocationDraft, count: int) -> bool:
        """Give `count` more workers, its own slots first; all of them or none."""
        spec = draft.demand.spec
        need = spec.resources_per_worker
        num_kept_before, tried_before = len(draft.kept), draft.tried
        missing = count - self._keep_workers(draft, count)
        chosen = self._choose(draft, missing) if missing else []
        if len(chosen) == missing:
            for node_id in chosen:
                draft.starts[node_id] = draft.starts.get(node_id, 0) + 1
            draft.num_starts += missing
            if self._barred:
                draft.placer = None  # It covers only the nodes that are not reserved for others.
            return True
        for node_id in chosen:
            self.space.give(node_id, need, is_new=True)
        undone = list(draft.kept)[num_kept_before:]
        for worker_id in undone:
            self.space.give(draft.kept.pop(worker_id), need, is_new=False)
        draft.tried = tried_before
        draft.placer = None
        return False

    def _choose(self, draft: AllocationDraft, count: int) -> list[NodeId]:
        """Take capacity for up to `count` new workers; return their nodes."""
        spec = draft.demand.spec
        if draft.placer is None:
            demand = draft.demand
            barred = {**self._barred, **dict.fromkeys(demand.out)} if demand.out else self._barred
            draft.placer = WorkerPlacer(
                spec, self.space, draft.hosting(), barred=barred, pinned=demand.away > 0
            )
        return draft.placer.place(count)

    # ------------------------------------------------------------ results and reasons

    def grant(self, draft: AllocationDraft) -> Allocation:
        reason = draft.reason
        if draft.is_admitted and not draft.demand.trains:
            reason = self._waits_for_slots(draft)
        return Allocation(
            job_id=draft.demand.spec.job_id,
            size=draft.size,
            starts=tuple(sorted(draft.starts.items())) if draft.is_admitted else (),
            yields=tuple(worker_id for worker_id, _ in draft.unkept()),
            reason=reason,
            yields_to=over(draft.yields_to, draft) if draft.yields_to else "",
        )

    def _waits_for_slots(self, draft: AllocationDraft) -> str:
        """Return which jobs release the slots that an admitted job still lacks, "" for none."""
        spec = draft.demand.spec
        need = spec.min_workers - len(draft.kept) - draft.demand.away
        free = sum(
            min(count, self.space.nodes[node_id].free_slots)
            for node_id, count in draft.starts.items()
        )
        if free >= need:
            return ""
        givers = [d for d in self.drafts if d.demand.trains and d.unkept()]
        parts = [gives(d) for d in givers[:NAMED_MAX]]
        if not parts:
            parts = ["the others come free as workers that are told to end do so"]
        return f"needs {workers(spec, need)}, {free} free; {'; '.join(parts)}"

    def _in_vain(self, draft: AllocationDraft) -> str:
        """Return what a job that does not fit lacks."""
        spec = draft.demand.spec
        shape = self.space.shape(spec)
        need = spec.min_workers - len(draft.kept) - draft.demand.away
        left = together(
            spec.strategy,
            [
                self.space.capacity(n, spec.resources_per_worker)
                for n in shape.capacity
                if n not in draft.demand.out
            ],
        )
        held = [(d, n) for d in self.drafts if d is not draft and (n := d.holds(shape.capacity))]
        if not held:
            return (
                f"needs {workers(spec, need)} by {spec.strategy.value}, and no other job is in its "
                f"way: {blocker(draft.demand)}; waits for that to change"
            )
        return (
            f"needs {workers(spec, need)} by {spec.strategy.value}, {left} can be had: "
            f"{holders(held)}; waits for an end, or for more slots ({max(1, need - left)})"
            f"{self._who_stays(draft)}"
        )

    def _who_stays(self, draft: AllocationDraft) -> str:
        """Return why jobs of lower priority are not preempted for it."""
        lower = [
            f"; {named(d.demand)} {d.demand.stays or d.demand.passed_over_why}"
            for d in self.drafts
            if d.is_admitted
            and d.demand.trains
            and d.demand.spec.priority < draft.demand.spec.priority
            and (d.demand.stays or d.demand.passed_over_until_ns > self.now_ns)
        ]
        return "".join(lower[:NAMED_MAX])

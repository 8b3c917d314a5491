"""Who of several jobs may have how many workers, and which workers are given back for another.

Rule, in this order:

1. A job that trains keeps its min; whole jobs are never taken down for others.
2. Jobs that wait are admitted by priority, then by the share that their project has already (its
   workers by its weight), then by age. A job is admitted with its whole min or holds nothing.
3. Behind the first one that does not fit, free slots that it could use are kept: a stream of small
   jobs cannot starve it. Later ones may only have what it could never use. One that would not fit
   if it were alone, or whose project is at its limit, keeps nothing from others.
4. What is left goes to all that were admitted, replica by replica, by the same order: elastic jobs
   grow into free slots, those that are kept for a waiting job too, and give them back at a boundary
   when it can start.

The answer depends on who is there, and hardly on who sits where: a plan that has been carried out
is planned again the same way, so that nobody grows and shrinks in turn.
Source: gang admission and reclaimable growth are those of Kueue and of Volcano's DRF; keeping slots
for the first is "backfill" without run times, which nobody knows of a training job.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.policy.decision import Decision
from elastic.core.policy.packing import Dealer, Room, Space, together
from elastic.core.projects import ProjectShare
from elastic.core.world import JobId, NodeId, Resources, WorkerId

Seat = tuple[WorkerId, NodeId]
NAMED_MAX = 3
"""So many other jobs are named in a reason."""


@dataclass(frozen=True)
class Claim:
    """One job that wants workers.

    Attributes:
        spec: needs, and the bounds that hold now.
        sequence: order of submission.
        seats: its workers on nodes that may be used, in the order in which it would keep them.
        away: its workers on nodes that do not answer at the moment.
        trains: a group of it is out there.
        is_ending: members of its group have finished: it is left alone.
        keeps_state: its workers hold training state, or had a group at some time.
        in_place: its group leaves at a step boundary, not only at a report.
    """

    spec: JobSpec
    sequence: int
    seats: tuple[Seat, ...] = ()
    away: int = 0
    trains: bool = False
    is_ending: bool = False
    keeps_state: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Grant:
    """What one job may have.

    Attributes:
        size: workers in all, 0 if it is not admitted and holds none.
        starts: on which nodes how many of them are new.
        yields: workers that it has and gives back at its next boundary, or at once if no group
            needs them.
        reason: why it must wait and what would let it run, "" if nothing of the queue is in its
            way.
    """

    job_id: JobId
    size: int
    starts: tuple[tuple[NodeId, int], ...] = ()
    yields: tuple[WorkerId, ...] = ()
    reason: str = ""


@dataclass
class _Draft:
    """A grant in the making."""

    claim: Claim
    kept: list[Seat] = field(default_factory=list)
    starts: dict[NodeId, int] = field(default_factory=dict)
    is_admitted: bool = False
    reason: str = ""
    dealer: Dealer | None = None

    @property
    def size(self) -> int:
        return len(self.kept) + self.claim.away + sum(self.starts.values())

    def hosting(self) -> dict[NodeId, int]:
        """Return how many of its workers are counted on each node."""
        found = dict(self.starts)
        for _, node_id in self.kept:
            found[node_id] = found.get(node_id, 0) + 1
        return found

    def unkept(self) -> list[Seat]:
        """Return its seats that are not counted yet."""
        kept = {worker_id for worker_id, _ in self.kept}
        return [seat for seat in self.claim.seats if seat[0] not in kept]


def decide(
    claims: Sequence[Claim], rooms: Sequence[Room], projects: Sequence[ProjectShare]
) -> Decision[tuple[Grant, ...]]:
    """Divide the cluster.

    Args:
        claims: every job that has not ended and is not paused, in any order.
        rooms: the nodes on which workers may start, in any order.
        projects: shares and limits; others have weight 1 and no limit.

    Returns:
        One grant for each claim, by order of submission.

    Guarantees (tests/property/test_queue.py):
        No node holds more than it has. Who is admitted has min, in whole replicas; who trains
        keeps it. No project grows above its limits. Carried out, the same plan comes again.
    """
    plan = _Plan(sorted(claims, key=lambda c: c.sequence), rooms, projects)
    plan.keep_training()
    plan.admit_waiting()
    plan.keep_survivors()
    plan.grow()
    grants = tuple(plan.grant(draft) for draft in plan.drafts)
    admitted = sum(1 for draft in plan.drafts if draft.is_admitted)
    return Decision(grants, f"{admitted} of {len(grants)} jobs fit")


class _Plan:
    """All drafts, and what they leave of the nodes."""

    def __init__(
        self, claims: Sequence[Claim], rooms: Sequence[Room], projects: Sequence[ProjectShare]
    ) -> None:
        self.drafts = [_Draft(claim) for claim in claims]
        self.space = Space(rooms)
        self._shares = {share.project: share for share in projects}
        self._workers: dict[str, int] = {}
        self._taken: dict[str, dict[str, int]] = {}
        self._barred: dict[NodeId, _Draft] = {}
        for claim in claims:
            self._count(claim.spec, claim.away)

    # ------------------------------------------------------------ the four steps

    def keep_training(self) -> None:
        """Who trains keeps min; who is about to end keeps all."""
        for draft in sorted(self.drafts, key=lambda d: _rank(d.claim)):
            claim = draft.claim
            if not claim.trains and not claim.is_ending:
                continue
            # Those that are away do not count here: they may turn out to be lost.
            self._keep_seats(draft, len(claim.seats) if claim.is_ending else claim.spec.min_workers)
            draft.is_admitted = claim.is_ending or draft.size >= claim.spec.min_workers

    def admit_waiting(self) -> None:
        """Give the others their min, one after the other; keep free slots for the first in vain."""
        for draft in self._by_turn([d for d in self.drafts if not d.is_admitted]):
            spec = draft.claim.spec
            need = spec.min_workers - draft.size
            shape = self.space.shape(spec)
            cordoned = sum(1 for _, n in draft.claim.seats if self.space.rooms[n].cordoned)
            if shape.fitting(spec) + cordoned + draft.claim.away < spec.min_workers:
                continue  # Not with these nodes: what is missing is said where workers are placed.
            above = self._excess(spec, need)
            if above:
                draft.reason = self._at_limit(spec, above)
                continue
            ahead = next((self._barred[n] for n in shape.capacity if n in self._barred), None)
            if self._place(draft, need):
                draft.is_admitted = True
                continue
            if ahead is not None:
                draft.reason = _behind(draft, ahead)
            else:
                draft.reason = self._in_vain(draft)
            for node_id in shape.capacity:
                self._barred.setdefault(node_id, draft)

    def keep_survivors(self) -> None:
        """Workers that wait with state keep their slots as long as nobody can start on them."""
        self._barred = {}
        for draft in self.drafts:
            if draft.is_admitted or draft.claim.trains or not draft.claim.keeps_state:
                continue
            count = len(draft.claim.seats)
            # They count for their project: none may keep another job of it from its min.
            while count and self._excess(draft.claim.spec, count):
                count -= 1
            self._keep_seats(draft, count)

    def grow(self) -> None:
        """Deal what is left, one replica at a time."""
        able = [d for d in self.drafts if d.is_admitted and not d.claim.is_ending]
        for draft in self._by_turn(able, again=True):
            spec = draft.claim.spec
            step = spec.workers_per_replica
            # After a loss a job may hold a part of a replica.
            step -= draft.size % step
            if draft.size + step > spec.max_workers or self._excess(spec, step):
                continue
            if self._place(draft, step):
                self._again(draft)

    # ------------------------------------------------------------ whose turn it is

    def _by_turn(self, drafts: Sequence[_Draft], *, again: bool = False) -> Iterator[_Draft]:
        """Yield drafts by order; what is given meanwhile only makes a turn come later."""
        self._size_counts = again
        self._turns = [(self._turn(d), i) for i, d in enumerate(drafts)]
        self._dealt = list(drafts)
        heapq.heapify(self._turns)
        while self._turns:
            turn, index = heapq.heappop(self._turns)
            now = self._turn(drafts[index])
            if now != turn:
                heapq.heappush(self._turns, (now, index))
                continue
            self._index = index
            yield drafts[index]

    def _again(self, draft: _Draft) -> None:
        heapq.heappush(self._turns, (self._turn(draft), self._index))

    def _turn(self, draft: _Draft) -> tuple[int, float, int, int]:
        spec = draft.claim.spec
        share = self._shares.get(spec.project)
        used = self._workers.get(spec.project, 0) / (share.weight if share else 1.0)
        size = draft.size if self._size_counts else 0
        return -spec.priority, used, size, draft.claim.sequence

    # ------------------------------------------------------------ seats and nodes

    def _keep_seats(self, draft: _Draft, limit: int) -> int:
        """Count up to `limit` of its workers where they are; return how many."""
        need, count = draft.claim.spec.resources_per_worker, 0
        for seat in draft.unkept():
            if count >= limit:
                break
            if seat[1] in self._barred or not self.space.capacity(seat[1], need):
                continue
            self.space.take(seat[1], need, is_new=False)
            draft.kept.append(seat)
            if draft.dealer is not None:
                draft.dealer.host(seat[1], 1)
            count += 1
        self._count(draft.claim.spec, count)
        return count

    def _place(self, draft: _Draft, count: int) -> bool:
        """Give `count` more workers, its own seats first; all of them or none."""
        spec = draft.claim.spec
        need = spec.resources_per_worker
        seats_before = len(draft.kept)
        missing = count - self._keep_seats(draft, count)
        chosen = self._choose(draft, missing) if missing else []
        if len(chosen) == missing:
            for node_id in chosen:
                draft.starts[node_id] = draft.starts.get(node_id, 0) + 1
            self._count(spec, missing)
            if self._barred:
                draft.dealer = None  # It knows only the nodes that are not kept for others.
            return True
        for node_id in chosen:
            self.space.give(node_id, need, is_new=True)
        undone = draft.kept[seats_before:]
        for _, node_id in undone:
            self.space.give(node_id, need, is_new=False)
        del draft.kept[seats_before:]
        self._count(spec, -len(undone))
        draft.dealer = None
        return False

    def _choose(self, draft: _Draft, count: int) -> list[NodeId]:
        """Take room for up to `count` new workers; return where."""
        spec = draft.claim.spec
        if draft.dealer is None:
            draft.dealer = Dealer(
                spec, self.space, draft.hosting(), barred=self._barred, pinned=draft.claim.away > 0
            )
        chosen: list[NodeId] = []
        while len(chosen) < count:
            node_id = draft.dealer.next()
            if node_id is None:
                break
            self.space.take(node_id, spec.resources_per_worker, is_new=True)
            draft.dealer.host(node_id, 1)
            chosen.append(node_id)
        return chosen

    # ------------------------------------------------------------ projects

    def _count(self, spec: JobSpec, count: int) -> None:
        """Charge workers to the job's project."""
        self._workers[spec.project] = self._workers.get(spec.project, 0) + count
        taken = self._taken.setdefault(spec.project, {})
        for name, amount in spec.resources_per_worker.milli:
            taken[name] = taken.get(name, 0) + count * amount

    def _excess(self, spec: JobSpec, more: int) -> str:
        """Return the limit of its project that `more` workers would break, "" for none."""
        share = self._shares.get(spec.project)
        if share is None:
            return ""
        taken = dict(self._taken.get(spec.project, {}))
        for name, amount in spec.resources_per_worker.milli:
            taken[name] = taken.get(name, 0) + more * amount
        pairs = tuple((name, taken[name]) for name in sorted(taken) if taken[name])
        return share.excess(self._workers.get(spec.project, 0) + more, Resources(pairs))

    # ------------------------------------------------------------ the answer, and why

    def grant(self, draft: _Draft) -> Grant:
        """Return what came of a draft."""
        reason = draft.reason
        if draft.is_admitted and not draft.claim.trains:
            reason = self._waits_for_slots(draft)
        return Grant(
            job_id=draft.claim.spec.job_id,
            size=draft.size,
            starts=tuple(sorted(draft.starts.items())) if draft.is_admitted else (),
            yields=tuple(worker_id for worker_id, _ in draft.unkept()),
            reason=reason,
        )

    def _waits_for_slots(self, draft: _Draft) -> str:
        """Say who gives back what an admitted job still lacks, "" if it lacks nothing."""
        spec = draft.claim.spec
        need = spec.min_workers - len(draft.kept) - draft.claim.away
        free = sum(
            min(count, self.space.rooms[node_id].free_slots)
            for node_id, count in draft.starts.items()
        )
        if free >= need:
            return ""
        givers = [(d, len(d.unkept())) for d in self.drafts if d.claim.trains and d.unkept()]
        parts = [
            f"{_named(d.claim)} gives {count} back at its next "
            f"{'step boundary' if d.claim.in_place else 'report'}"
            for d, count in givers[:NAMED_MAX]
        ]
        if not parts:
            parts = ["the others come free as workers that are told to end do so"]
        return f"needs {_workers(spec, need)}, {free} free; {'; '.join(parts)}"

    def _in_vain(self, draft: _Draft) -> str:
        """Say what the first one in vain lacks."""
        spec = draft.claim.spec
        shape = self.space.shape(spec)
        need = spec.min_workers - len(draft.kept) - draft.claim.away
        left = together(
            spec.strategy,
            [self.space.capacity(n, spec.resources_per_worker) for n in shape.capacity],
        )
        holders = [
            f"{_named(d.claim)} keeps {len(d.kept) + sum(d.starts.values())}"
            for d in self.drafts
            if d.is_admitted and any(n in shape.capacity for n in d.hosting())
        ]
        others = f" and {len(holders) - NAMED_MAX} more" if len(holders) > NAMED_MAX else ""
        return (
            f"needs {_workers(spec, need)} by {spec.strategy.value}, {left} can be had: "
            f"{', '.join(holders[:NAMED_MAX]) or 'nobody gives any back'}{others}, which "
            f"{'is its min' if len(holders) == 1 else 'are their mins'}; waits for an end, or for "
            f"more slots ({max(1, need - left)})"
        )

    def _at_limit(self, spec: JobSpec, above: str) -> str:
        has = self._workers.get(spec.project, 0)
        return (
            f"needs {_workers(spec, spec.min_workers)}; project {spec.project or '(none)'} may "
            f"have {above}, and jobs of it that come first need {has}: waits for one of them to end"
        )


def _rank(claim: Claim) -> tuple[int, int]:
    return -claim.spec.priority, claim.sequence


def _named(claim: Claim) -> str:
    return f"{claim.spec.job_id} (priority {claim.spec.priority})"


def _workers(spec: JobSpec, count: int) -> str:
    """Return "4 workers of GPU=1"."""
    amounts = " ".join(f"{n}={a:g}" for n, a in spec.resources_per_worker.as_dict().items())
    return f"{count} worker{'' if count == 1 else 's'}{' of ' if amounts else ''}{amounts}"


def _behind(draft: _Draft, ahead: _Draft) -> str:
    spec = draft.claim.spec
    return (
        f"needs {_workers(spec, spec.min_workers)}; free slots are kept for {_named(ahead.claim)}, "
        f"which comes first and needs {ahead.claim.spec.min_workers}"
    )

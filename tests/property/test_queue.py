"""The queue against what its docstring guarantees, and against naive arithmetic on equal slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.config import JobSpec
from elastic.core.facts import JobId, NodeId, Resources, Strategy, WorkerId
from elastic.core.policy import eviction, queue
from elastic.core.policy.demands import Allocation, Demand
from elastic.core.policy.packing import NodeCapacity
from tests.effort import examples
from tests.strategies import SCRIPT

LIMITS = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
GPU = Resources.of({"GPU": 1})
ROUNDS_TO_REST = 6


@st.composite
def specs(draw: st.DrawFn, number: int, *, plain: bool) -> JobSpec:
    replica = 1 if plain else draw(st.sampled_from([1, 1, 2]))
    low = draw(st.integers(1, 4))
    return JobSpec(
        job_id=JobId(f"j{number}"), name=f"job{number}", entry=SCRIPT,
        min_workers=replica * low, max_workers=replica * draw(st.integers(low, low + 4)),
        workers_per_replica=replica, priority=draw(st.integers(0, 2)),
        strategy=Strategy.PACK if plain else draw(st.sampled_from(Strategy)),
        resources_per_worker=Resources() if plain else draw(st.sampled_from([Resources(), GPU])),
        accelerator_type="" if plain else draw(st.sampled_from(["", "", "H100"])),
    )  # fmt: skip


@st.composite
def room_lists(draw: st.DrawFn, *, plain: bool) -> list[NodeCapacity]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        slots = draw(st.integers(1, 4))
        gpus = 0 if plain else draw(st.integers(0, slots))
        kind = "" if plain else draw(st.sampled_from(["", "H100"]))
        found.append(
            NodeCapacity(
                NodeId(f"n{number}"), slots, Resources.of({"GPU": gpus}), slots, kind,
                draw(st.sampled_from([(), (("zone", "a"),), (("zone", "b"),)])),
            )
        )  # fmt: skip
    return found


@dataclass
class Small:
    """A cluster in which everything that was planned has happened by the next look."""

    nodes: list[NodeCapacity]
    demands: list[Demand] = field(default_factory=list)
    serial: int = 0
    is_whole: bool = False

    def look(self) -> dict[JobId, Allocation]:
        decision = queue.decide(self.demands, self._nodes_now())
        return {grant.job_id: grant for grant in decision.value}

    def _nodes_now(self) -> list[NodeCapacity]:
        held = Counter(node_id for demand in self.demands for _, node_id in demand.held_slots)
        return [replace(r, free_slots=max(0, r.slots - held[r.node_id])) for r in self.nodes]

    def carry_out(self, grants: dict[JobId, Allocation]) -> None:
        for index, demand in enumerate(self.demands):
            grant = grants[demand.spec.job_id]
            assert self.is_whole or not grant.yields_to
            seats = [seat for seat in demand.held_slots if seat[0] not in grant.yields]
            for node_id, count in grant.starts:
                for _ in range(count):
                    self.serial += 1
                    seats.append((WorkerId(f"{node_id}/{self.serial}"), node_id))
            trains = len(seats) >= demand.spec.min_workers
            self.demands[index] = replace(
                demand,
                held_slots=tuple(seats),
                trains=trains,
                keeps_state=demand.keeps_state or trains,
            )

    def check(self, before: Sequence[Demand]) -> None:
        held = Counter(node_id for demand in self.demands for _, node_id in demand.held_slots)
        gpus = Counter(
            n for c in self.demands for _, n in c.held_slots if c.spec.resources_per_worker == GPU
        )
        for room in self.nodes:
            assert held[room.node_id] <= room.slots
            assert gpus[room.node_id] <= room.resources.amount("GPU")
        for old, demand in zip(before, self.demands, strict=True):
            spec, size = demand.spec, len(demand.held_slots)
            assert size <= spec.max_workers
            assert size % spec.workers_per_replica == 0 or not demand.trains
            assert size == 0 or size >= spec.min_workers, "holds something below min"
            first = max((c.spec.priority for c in self.demands), default=0)
            taken_down = old.trains and not demand.trains
            assert not taken_down or (self.is_whole and spec.priority < first)
            nodes = [node_id for _, node_id in demand.held_slots]
            if spec.strategy is Strategy.STRICT_PACK:
                assert len(set(nodes)) <= 1
            if spec.strategy is Strategy.STRICT_SPREAD:
                assert len(set(nodes)) == len(nodes)

    def to_rest(self) -> None:
        for _ in range(ROUNDS_TO_REST):
            before = list(self.demands)
            self.carry_out(self.look())
            self.check(before)
            if before == self.demands:
                return
        raise AssertionError(f"grows and shrinks in turn: {self.demands}")


@LIMITS
@given(st.data())
def test_arrivals_and_ends_keep_all_guarantees_and_come_to_rest(data: st.DataObject) -> None:
    small = Small(data.draw(room_lists(plain=False)))
    for number in range(data.draw(st.integers(1, 6))):
        if small.demands and data.draw(st.booleans()):
            small.demands.remove(data.draw(st.sampled_from(small.demands)))
        else:
            spec = data.draw(specs(number, plain=False))
            small.demands.append(Demand(spec, sequence=number, in_place=True))
        small.to_rest()


@LIMITS
@given(st.data())
def test_jobs_that_give_way_come_to_rest_too_and_only_for_greater_priorities(
    data: st.DataObject,
) -> None:
    small = Small(data.draw(room_lists(plain=False)), is_whole=True)
    for number in range(data.draw(st.integers(1, 6))):
        if small.demands and data.draw(st.booleans()):
            small.demands.remove(data.draw(st.sampled_from(small.demands)))
        else:
            spec = data.draw(specs(number, plain=False))
            stays = data.draw(st.sampled_from(["", "", "stays"]))
            small.demands.append(Demand(spec, sequence=number, in_place=True, stays=stays))
        small.to_rest()


@LIMITS
@given(st.data())
def test_on_equal_slots_nobody_waits_while_lower_ones_hold_what_it_needs(
    data: st.DataObject,
) -> None:
    small = Small(data.draw(room_lists(plain=True)), is_whole=True)
    slots = sum(room.slots for room in small.nodes)
    for number in range(data.draw(st.integers(1, 6))):
        spec = data.draw(specs(number, plain=True))
        small.demands.append(Demand(spec, sequence=number, in_place=True, stays=""))
        small.to_rest()
        running = {c.spec.job_id: c for c in small.demands if c.trains}
        for demand in small.demands:
            if demand.spec.job_id in running or demand.spec.min_workers > slots:
                continue
            equals = [c for c in running.values() if c.spec.priority >= demand.spec.priority]
            mins = sum(c.spec.min_workers for c in equals)
            ahead = any(
                c.spec.priority >= demand.spec.priority and c.spec.min_workers <= slots
                for c in small.demands
                if c.spec.job_id not in running and c is not demand
            )
            assert ahead or mins + demand.spec.min_workers > slots


@LIMITS
@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 20))
def test_no_more_give_way_than_it_takes(sizes: list[int], need: int) -> None:
    def fits(chosen: tuple[int, ...]) -> bool:
        return sum(sizes[i] for i in chosen) >= need

    chosen = eviction.fewest(len(sizes), fits)
    if not sizes or not fits(tuple(range(len(sizes)))):
        assert chosen == ()
        return
    assert need == 0 or fits(chosen)
    assert all(not fits(tuple(i for i in chosen if i != left)) for left in chosen) or need == 0
    assert not any(fits(tuple(range(count))) for count in range(max(chosen)))


@LIMITS
@given(st.data())
def test_the_order_of_claims_and_rooms_does_not_matter(data: st.DataObject) -> None:
    nodes = data.draw(room_lists(plain=False))
    demands = [
        Demand(data.draw(specs(number, plain=False)), sequence=number)
        for number in range(data.draw(st.integers(0, 4)))
    ]
    expected = queue.decide(demands, nodes)
    shuffled = queue.decide(data.draw(st.permutations(demands)), data.draw(st.permutations(nodes)))
    assert shuffled == expected


@LIMITS
@given(st.data())
def test_a_job_that_fits_alone_runs_before_any_that_came_later_with_no_greater_priority(
    data: st.DataObject,
) -> None:
    """Small jobs come and go for ever; as soon as the first ones have ended it is its turn."""
    nodes = list(data.draw(room_lists(plain=True)))
    slots = sum(room.slots for room in nodes)
    small = Small(nodes)
    for number in range(data.draw(st.integers(0, 3))):
        small.demands.append(Demand(data.draw(specs(number, plain=True)), sequence=number))
    small.to_rest()
    first = {demand.spec.job_id for demand in small.demands}
    big = replace(
        data.draw(specs(10, plain=True)), min_workers=max(1, slots), max_workers=max(1, slots)
    )
    small.demands.append(Demand(big, sequence=10))
    for number in range(11, 17):
        later = data.draw(specs(number, plain=True))
        later = replace(later, priority=min(later.priority, big.priority))
        small.demands.append(Demand(later, sequence=number))
        small.to_rest()
        running = [demand for demand in small.demands if demand.trains]
        if not any(demand.spec.job_id in first for demand in small.demands):
            assert slots == 0 or any(c.spec.job_id == big.job_id for c in running)
            return
        # One of the first ends in each round, waiting or not.
        gone = next(demand for demand in small.demands if demand.spec.job_id in first)
        small.demands.remove(gone)
        small.to_rest()


def naive(demands: Sequence[Demand], slots: int) -> dict[str, int]:
    """Count equal slots for jobs of which none runs yet, by the rules of the docstring."""
    sizes = {demand.spec.job_id: 0 for demand in demands}

    def turn(demand: Demand, *, counting: bool) -> tuple[int, ...]:
        mine = sizes[demand.spec.job_id] if counting else 0
        return -demand.spec.priority, mine, demand.sequence

    def give(demand: Demand, count: int) -> bool:
        if sum(sizes.values()) + count > slots:
            return False
        sizes[demand.spec.job_id] += count
        return True

    is_kept = False
    for demand in sorted(demands, key=lambda c: turn(c, counting=False)):
        low = demand.spec.min_workers
        if low <= slots and (is_kept or not give(demand, low)):
            is_kept = True
    able = [demand for demand in demands if sizes[demand.spec.job_id]]
    while able:
        demand = min(able, key=lambda c: turn(c, counting=True))
        if sizes[demand.spec.job_id] >= demand.spec.max_workers or not give(demand, 1):
            able.remove(demand)
    return dict(sizes)


@LIMITS
@given(st.data())
def test_on_equal_slots_the_sizes_are_those_of_naive_arithmetic(data: st.DataObject) -> None:
    nodes = data.draw(room_lists(plain=True))
    demands = [
        Demand(data.draw(specs(number, plain=True)), sequence=number)
        for number in range(data.draw(st.integers(0, 6)))
    ]
    grants = queue.decide(demands, nodes).value
    sizes = {grant.job_id: grant.size for grant in grants}
    assert sizes == naive(demands, sum(room.slots for room in nodes))

"""Each policy against what its docstring guarantees, or a second implementation, naive and slow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.facts import (
    CheckpointRecord,
    ExitCause,
    ExitKind,
    Failure,
    JobId,
    NodeId,
    Resources,
    Strategy,
    WorkerId,
    WorkerPhase,
    zone_of,
)
from elastic.core.policy import failure, membership, placement, ranks, retention
from elastic.core.policy.membership import FORMABLE_PHASES, Candidate, CurrentGroup, GroupAction
from elastic.core.policy.packing import NodeCapacity
from elastic.core.policy.placement import NodeOffer
from tests.effort import examples
from tests.strategies import SCRIPT

LIMITS = settings(
    max_examples=examples(125), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # Two cores, shared: time says nothing here.
NODES = [NodeId(name) for name in "abcd"]
WORKERS = [WorkerId(f"{node}/{serial}") for node in NODES for serial in (1, 2, 3)]
NODE_OF = {worker_id: NodeId(worker_id[0]) for worker_id in WORKERS}
LIVING = [phase for phase in WorkerPhase if phase is not WorkerPhase.EXITED]
SECONDS = st.sampled_from([0, 90, 95, 99, 100, 101, 130]).map(ns)


@st.composite
def specs(draw: st.DrawFn, **changes: Any) -> JobSpec:
    replica = draw(st.sampled_from([1, 1, 2, 3]))
    low = draw(st.integers(1, 3))
    return JobSpec(
        job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=replica * low,
        max_workers=replica * draw(st.integers(low, 4)), workers_per_replica=replica,
        max_failures=draw(st.integers(-1, 4)), **changes,
    )  # fmt: skip


# ---------------------------------------------------------------- membership


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for worker_id in draw(st.lists(st.sampled_from(WORKERS), unique=True)):
        leaving = draw(st.sampled_from([False, False, False, True]))
        found.append(
            Candidate(
                worker_id,
                NODE_OF[worker_id],
                phase=draw(st.sampled_from(LIVING)),
                generation=draw(st.integers(0, 2)),
                since_ns=draw(SECONDS),
                present=draw(st.sampled_from([True, True, True, False])),
                reachable=draw(st.sampled_from([True, True, True, False])),
                leaving=leaving,
                leave_by_ns=draw(SECONDS) if leaving else None,
            )
        )
    return found


@st.composite
def groups(draw: st.DrawFn, job: JobSpec) -> CurrentGroup:
    """No group yet, or a legal one of generation 1 or 2."""
    sizes = range(job.min_workers, job.max_workers + 1, job.workers_per_replica)
    size = draw(st.sampled_from([0, *sizes]))
    if size == 0:
        return CurrentGroup()
    members = draw(st.permutations(WORKERS))[:size]
    return CurrentGroup(
        draw(st.integers(1, 2)), tuple(members), draw(st.booleans()), draw(st.booleans())
    )


def is_able(candidate: Candidate, current: CurrentGroup, interrupting: bool) -> bool:
    """Say in one sentence who may be announced into a group."""
    waits = candidate.phase in FORMABLE_PHASES
    interrupted = interrupting and candidate.worker_id in current.members
    told = candidate.present and candidate.reachable and not candidate.leaving
    return told and (waits or interrupted)


@given(data=st.data(), job=specs(), found=candidates(), now_ns=SECONDS)
@LIMITS
def test_a_plan_keeps_its_guarantees_and_the_order_of_candidates_is_irrelevant(
    data: st.DataObject, job: JobSpec, found: list[Candidate], now_ns: int
) -> None:
    current = data.draw(groups(job))
    config = CoordinatorConfig()
    decision = membership.decide(job, current, found, now_ns, config)
    plan = decision.value
    shuffled = data.draw(st.permutations(found))
    assert membership.decide(job, current, shuffled, now_ns, config) == decision
    assert decision.reason
    assert decision.wake_ns is None or decision.wake_ns > now_ns

    by_id = {c.worker_id: c for c in found}
    able = [c.worker_id for c in found if is_able(c, current, interrupting=current.is_open)]
    largest = min(len(able), job.max_workers) // job.workers_per_replica * job.workers_per_replica
    if plan.action is GroupAction.FORM:
        assert job.min_workers <= len(plan.members) <= job.max_workers
        assert len(plan.members) % job.workers_per_replica == 0
        assert len(set(plan.members)) == len(plan.members) == largest
        assert set(plan.members) <= set(able)
        # Whoever was a member stays before anybody new comes.
        old = [w for w in current.members if w in able]
        assert list(plan.members[: len(old)]) == old[: len(plan.members)]
        assert plan.cause in ("start", "resume", "lost", "drain", "broken", "join")
    else:
        assert plan.members == ()
    if plan.action is GroupAction.SUSPEND:
        assert largest < job.min_workers
    if plan.action in (GroupAction.ASK, GroupAction.SUSPEND, GroupAction.KEEP):
        assert current.is_open
    if plan.action is GroupAction.ASK:
        # Nobody is asked the same twice.
        assert not current.leave_requested or plan.saves is not current.saves
        assert all(by_id[w].present and by_id[w].reachable for w in current.members)
    if plan.action is GroupAction.WAIT:
        assert not current.is_open
    if plan.action is GroupAction.KEEP:
        assert all(w in by_id and by_id[w].present for w in current.members)


@given(data=st.data(), job=specs(), found=candidates())
@LIMITS
def test_the_same_facts_at_their_wake_up_give_another_answer(
    data: st.DataObject, job: JobSpec, found: list[Candidate]
) -> None:
    """Otherwise a driver would be woken for nothing, and again at once."""
    current, config = data.draw(groups(job)), CoordinatorConfig()
    now_ns = ns(100)
    first = membership.decide(job, current, found, now_ns, config)
    if first.wake_ns is None:
        return
    before = membership.decide(job, current, found, first.wake_ns - 1, config)
    assert (before.value, before.reason) == (first.value, first.reason)
    if first.value.action is not GroupAction.ASK:
        after = membership.decide(job, current, found, first.wake_ns, config)
        assert (after.value, after.wake_ns) != (first.value, first.wake_ns)


# ---------------------------------------------------------------- ranks


@given(
    members=st.lists(st.sampled_from(WORKERS), unique=True),
    previous=st.lists(st.sampled_from(WORKERS), unique=True),
    data=st.data(),
)
@LIMITS
def test_ranks_are_a_permutation_contiguous_by_node_with_survivors_first(
    members: list[WorkerId], previous: list[WorkerId], data: st.DataObject
) -> None:
    # A group before was ranked by the same rules: its nodes are contiguous.
    former = ranks.assign_ranks(previous, NODE_OF)
    before = {place.worker_id: place.node_id for place in former}
    places = ranks.assign_ranks(members, NODE_OF, before)
    assert ranks.assign_ranks(data.draw(st.permutations(members)), NODE_OF, before) == places
    by_rank = [place.worker_id for place in places]
    assert [place.rank for place in places] == list(range(len(members)))
    assert sorted(by_rank) == sorted(members)

    nodes = list(dict.fromkeys(place.node_id for place in places))
    assert [place.node_id for place in places] == sorted(
        (NODE_OF[w] for w in members), key=nodes.index
    )
    per_node = Counter(NODE_OF[w] for w in members)
    for place in places:
        assert place.node_rank == nodes.index(place.node_id)
        assert place.local_world_size == per_node[place.node_id]
        first = next(p.rank for p in places if p.node_id == place.node_id)
        assert place.local_rank == place.rank - first

    survivors = [w for w in before if w in members]
    if survivors:
        assert by_rank[0] in survivors
    for node in nodes:
        here = [w for w in by_rank if NODE_OF[w] == node]
        old = [w for w in survivors if NODE_OF[w] == node]
        assert here == [*old, *sorted(set(here) - set(old))]
    without = [all(w not in survivors for w in by_rank if NODE_OF[w] == node) for node in nodes]
    assert without == sorted(without)
    again = {place.worker_id: place.node_id for place in places}
    assert ranks.assign_ranks(members, NODE_OF, again) == places


@given(st.integers(2, 40), st.integers(1, 3), st.data())
@LIMITS
def test_a_lost_node_changes_the_ranks_of_one_other_at_most(
    num_nodes: int, on_node: int, data: st.DataObject
) -> None:
    node_of = {
        WorkerId(f"w{node}/{number}"): NodeId(f"n{node}")
        for node in range(num_nodes)
        for number in range(on_node)
    }
    lost = data.draw(st.integers(0, num_nodes - 1))
    members = [w for w, node in node_of.items() if node != f"n{lost}"]
    places = ranks.assign_ranks(members, node_of, node_of)
    old = {worker_id: rank for rank, worker_id in enumerate(node_of)}
    moved = {place.node_id for place in places if place.rank != old[place.worker_id]}
    assert moved == ({f"n{num_nodes - 1}"} if lost < num_nodes - 1 else set())


# ---------------------------------------------------------------- placement


@st.composite
def offers(draw: st.DrawFn) -> list[NodeOffer]:
    found = []
    for node_id in draw(st.lists(st.sampled_from(NODES), unique=True)):
        total = draw(st.integers(0, 4))
        found.append(
            NodeOffer(
                NodeCapacity(
                    node_id,
                    slots=draw(st.integers(0, 6)),
                    resources=Resources.of({"GPU": total}),
                    accelerator_type=draw(st.sampled_from(["", "H100"])),
                    labels=draw(st.sampled_from([(), (("zone", "x"),)])),
                ),
                free_slots=draw(st.integers(0, 4)),
                free=Resources.of({"GPU": draw(st.integers(0, total))}),
                hosting=draw(st.sampled_from([0, 0, 1, 2])),
            )
        )
    return found


def room_on(job: JobSpec, offer: NodeOffer) -> int:
    """Return what fits by trying: one worker more, and one more, until something is short."""
    if job.accelerator_type not in ("", offer.empty.accelerator_type):
        return 0
    if any(label not in offer.empty.labels for label in job.label_selector):
        return 0
    free, count = offer.free, 0
    while count < offer.free_slots and all(
        dict(free.milli).get(name, 0) >= amount for name, amount in job.resources_per_worker.milli
    ):
        free, count = free.minus(job.resources_per_worker), count + 1
    return count


def most_that_fit(job: JobSpec, found: Sequence[NodeOffer], have: int) -> int:
    """Return how many more workers of the job a perfect placement would start."""
    room = [room_on(job, offer) for offer in found]
    if job.strategy is Strategy.STRICT_SPREAD:
        room = [min(r, 0 if o.hosting else 1) for r, o in zip(room, found, strict=True)]
    if job.strategy is Strategy.STRICT_PACK:
        hosts = [r for r, o in zip(room, found, strict=True) if o.hosting]
        is_away = have > sum(o.hosting for o in found)
        fits = 0 if is_away else max(hosts or room, default=0)
    else:
        fits = sum(room)
    fits = min(fits, max(0, job.max_workers - have))
    return fits if have + fits >= job.min_workers else 0


@given(data=st.data(), strategy=st.sampled_from(Strategy), found=offers())
@settings(LIMITS, max_examples=examples(200))
def test_workers_are_placed_within_what_is_free_by_the_strategy_and_all_or_nothing(
    data: st.DataObject, strategy: Strategy, found: list[NodeOffer]
) -> None:
    need = Resources.of({"GPU": data.draw(st.sampled_from([0, 0.5, 1, 2]))})
    if strategy is Strategy.STRICT_PACK:
        # Such a job is on one node at most; a second one would be a bug before this one.
        hosts = [o.empty.node_id for o in found if o.hosting][1:]
        found = [o for o in found if o.empty.node_id not in hosts]
    job = data.draw(
        specs(
            strategy=strategy,
            resources_per_worker=need,
            accelerator_type=data.draw(st.sampled_from(["", "H100"])),
            label_selector=data.draw(st.sampled_from([(), (("zone", "x"),)])),
        )
    )
    have = sum(o.hosting for o in found) + data.draw(st.sampled_from([0, 0, 1]))
    decision = placement.place(job, found, have)
    shuffled = data.draw(st.permutations(found))
    assert placement.place(job, shuffled, have) == decision
    assert decision.reason

    by_id = {offer.empty.node_id: offer for offer in found}
    placed = Counter(decision.value)
    for node_id, count in placed.items():
        assert count <= room_on(job, by_id[node_id])
    assert len(decision.value) == most_that_fit(job, found, have)
    used = set(placed) | {o.empty.node_id for o in found if o.hosting}
    if strategy is Strategy.STRICT_PACK and placed:
        assert len(used) == 1
    if strategy is Strategy.STRICT_SPREAD:
        assert all(count == 1 and not by_id[n].hosting for n, count in placed.items())
    if strategy is Strategy.SPREAD:
        # Nobody took two where another zone, or node of it, with room took none that it could.
        load = {name: offer.hosting + placed[name] for name, offer in by_id.items()}
        zone = {name: zone_of(offer.empty.labels) for name, offer in by_id.items()}
        zones: Counter[str] = Counter()
        for node_id, count in load.items():
            zones[zone[node_id]] += count
        for busy in placed:
            for idle, offer in by_id.items():
                if placed[idle] < room_on(job, offer):
                    assert zones[zone[busy]] <= zones[zone[idle]] + 1
                    assert zone[busy] != zone[idle] or load[busy] <= load[idle] + 1


def test_workers_are_spread_over_zones_first() -> None:
    job = JobSpec(
        job_id=JobId("j"), name="j", entry=SCRIPT, min_workers=6, max_workers=6,
        strategy=Strategy.SPREAD,
    )  # fmt: skip
    offers = [
        NodeOffer(
            NodeCapacity(NodeId(name), 3, Resources(), labels=(("zone", zone),) if zone else ()),
            free_slots=3,
            free=Resources(),
        )
        for name, zone in (("b", ""), ("c", ""), ("d", "x"))
    ]
    assert Counter(placement.place(job, offers, 0).value) == {"d": 3, "b": 2, "c": 1}


def test_packed_workers_go_where_most_of_them_have_room() -> None:
    """And not where slots are left, and nothing else that they need."""
    gpus = Resources.of({"GPU": 4})
    job = JobSpec(
        job_id=JobId("j"), name="j", entry=SCRIPT, min_workers=4, max_workers=4,
        strategy=Strategy.PACK, resources_per_worker=Resources.of({"GPU": 1}),
    )  # fmt: skip
    offers = [
        NodeOffer(NodeCapacity(NodeId("a"), 8, gpus), free_slots=8, free=Resources.of({"GPU": 1})),
        NodeOffer(NodeCapacity(NodeId("b"), 4, gpus), free_slots=4, free=gpus),
    ]
    assert placement.place(job, offers, 0).value == ("b",) * 4


def test_workers_on_nodes_that_take_no_more_count_in_their_zone() -> None:
    job = JobSpec(
        job_id=JobId("j"), name="j", entry=SCRIPT, min_workers=1, max_workers=8,
        strategy=Strategy.SPREAD, accelerator_type="H100",
    )  # fmt: skip
    nothing = Resources()
    a = NodeCapacity(NodeId("a"), 1, nothing)
    b = NodeCapacity(NodeId("b"), 1, nothing, accelerator_type="H100")
    zone = (("zone", "x"),)
    c = NodeCapacity(NodeId("c"), 3, nothing, accelerator_type="H100", labels=zone)
    offers = [
        NodeOffer(a, 0, nothing, hosting=2),
        NodeOffer(b, 1, nothing, hosting=2),
        NodeOffer(c, 3, nothing, hosting=1),
    ]
    assert placement.place(job, offers, 5).value == ("c", "c", "c")


# ---------------------------------------------------------------- failure

CAUSES = st.builds(ExitCause, st.sampled_from(ExitKind), st.sampled_from([0, 1, 6, 9, 11, 15, 64]))
FAILURES = st.none() | st.builds(
    Failure,
    st.sampled_from(["ValueError", "KeyError"]),
    st.sampled_from(["a", "b"]),
    position=st.sampled_from(["report 1", "report 2"]),
)


@given(job=specs(), exits=st.lists(st.tuples(CAUSES, FAILURES), max_size=30))
@LIMITS
def test_counts_never_fall_and_a_job_ends_only_by_a_limit_that_it_names(
    job: JobSpec, exits: list[tuple[ExitCause, Failure | None]]
) -> None:
    config, history = (
        CoordinatorConfig(crash_loop_limit=4, restart_delay_s_max=3),
        failure.FailureHistory(),
    )
    for cause, raised in exits:
        decision = failure.judge_exit(job, history, cause, raised, config)
        after, fails = decision.value.history, decision.value.job_fails
        is_ordered = cause.kind is ExitKind.STOPPED
        is_users = not is_ordered and (raised is not None or failure.is_users_fault(cause))
        is_free = is_ordered or (raised is None and failure.is_kill(cause))
        assert after.failures == history.failures + is_users
        assert after.losses == history.losses + (not is_free and not is_users)
        assert 0 <= decision.value.delay_ns <= ns(3)
        assert decision.reason
        spent = is_users and 0 <= job.max_failures < after.failures
        loops = after.losses > max(history.losses, 4)
        assert fails == (spent or loops)
        history = after


@given(losses=st.integers(0, 10**6), more=st.integers(0, 10**6))
@LIMITS
def test_a_longer_row_of_losses_never_waits_shorter(losses: int, more: int) -> None:
    config = CoordinatorConfig(crash_loop_limit=10**7)
    job = JobSpec(job_id=JobId("j1"), name="a", entry=SCRIPT, min_workers=1, max_workers=1)
    delays = [
        failure.judge_exit(
            job, failure.FailureHistory(losses=row), ExitCause(ExitKind.HUNG), None, config
        ).value.delay_ns
        for row in (losses, losses + more)
    ]
    assert delays == sorted(delays)


# ---------------------------------------------------------------- retention

VALUES = st.none() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)


@given(
    values=st.lists(VALUES, max_size=12),
    num_to_keep=st.just(-1) | st.integers(1, 6),
    order=st.sampled_from(["max", "min"]),
    scored=st.booleans(),
)
@LIMITS
def test_the_newest_is_kept_and_nothing_that_goes_is_better_than_what_stays(
    values: list[Any], num_to_keep: int, order: str, scored: bool
) -> None:
    records = [
        CheckpointRecord(str(index), 1, index, json.dumps({"loss": value}))
        for index, value in enumerate(values)
    ]
    kept = retention.keep(
        records,
        num_to_keep=num_to_keep,
        score_attribute="loss" if scored else "",
        score_order=order,
    )
    assert len(kept) == (len(records) if num_to_keep == -1 else min(num_to_keep, len(records)))
    assert list(kept) == [record for record in records if record in kept]
    assert kept[-1:] == tuple(records[-1:])
    gone = [record for record in records if record not in kept]
    if not scored:
        assert list(kept) == records[len(gone) :]
        return
    worth = {r.path: score(value, order) for r, value in zip(records, values, strict=True)}
    for stays in kept[:-1]:
        for goes in gone:
            assert worth[stays.path] >= worth[goes.path]
            assert stays.index > goes.index or worth[stays.path] > worth[goes.path]


def score(value: Any, order: str) -> float:
    """Return what a metric is worth, higher is better; what is no number is worth nothing."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return float("-inf")
    if number != number:
        return float("-inf")
    return number if order == "max" else -number

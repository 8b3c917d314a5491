"""Dealing, the tree of additions, the order of samples, transfers: facts that hold for any run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan, Permutation
from elastic.core.policy.microbatch import (
    Span,
    additions_in,
    additions_over,
    all_parts,
    deal,
    split,
    subtrees,
)
from elastic.core.policy.program_points import CodePart, ProgramPoint, next_program_points
from elastic.core.policy.recovery import (
    PassPosition,
    RunPosition,
    SavedPosition,
    is_outdated,
    plan_transfers,
)
from elastic.core.policy.seeds import SEED_BITS, derive, micro_batch_seed, sample_seed, shuffle_seed
from elastic.errors import ConfigError, InvariantViolation
from tests.effort import examples

LIMITS = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # Two cores, shared: time says nothing here.
VS = st.integers(1, 70)
SEEDS = st.integers(0, 2**SEED_BITS - 1)


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, int]:
    """Draw (W, V)."""
    num_micro_batches = draw(VS)
    return draw(st.integers(1, num_micro_batches)), num_micro_batches


@st.composite
def cuts(draw: st.DrawFn, max_samples: int = 300) -> DataPlan:
    """Draw a data set, cut into steps."""
    micro_batch_size, num_micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    drop_last = draw(st.booleans())
    least = micro_batch_size * num_micro_batches if drop_last else 1
    return DataPlan(
        num_samples=draw(st.integers(least, max_samples)),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        seed=draw(SEEDS),
        shuffle=draw(st.booleans()),
        drop_last=drop_last,
    )


# ---------------------------------------------------------------- dealing


@given(deals())
@LIMITS
def test_every_micro_batch_is_dealt_once_in_order_and_evenly(drawn: tuple[int, int]) -> None:
    world_size, num_micro_batches = drawn
    held = [deal(rank, world_size, num_micro_batches) for rank in range(world_size)]
    assert [v for first, last in held for v in range(first, last)] == list(range(num_micro_batches))
    sizes = [last - first for first, last in held]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if num_micro_batches <= 2 * world_size:
        assert {len(subtrees(span, num_micro_batches)) for span in held} == {1}, "one sum each"


@given(VS, st.integers(1, 100))
def test_more_ranks_than_micro_batches_are_refused(num_micro_batches: int, more: int) -> None:
    with pytest.raises(ConfigError, match=f"share {num_micro_batches} micro-batches"):
        deal(0, num_micro_batches + more, num_micro_batches)
    with pytest.raises(ConfigError, match="0 workers"):
        deal(0, 0, num_micro_batches)


@given(deals(), st.integers(0, 100))
def test_a_rank_that_is_not_in_the_group_is_refused(drawn: tuple[int, int], more: int) -> None:
    for rank in (drawn[0] + more, -1 - more):
        with pytest.raises(InvariantViolation, match=f"rank {rank} of {drawn[0]}"):
            deal(rank, *drawn)


def test_a_span_of_one_is_not_divided() -> None:
    with pytest.raises(InvariantViolation, match="a span of 1"):
        split((4, 5))


# ---------------------------------------------------------------- the tree


def counted_up(num_micro_batches: int) -> Any:
    """Return the one expression for all leaves, found as a binary counter does."""
    stack: list[tuple[int, Any]] = []
    for leaf in range(num_micro_batches):
        stack.append((1, leaf))
        while len(stack) > 1 and stack[-2][0] == stack[-1][0]:
            (size, left), (_, right) = stack[-2:]
            stack[-2:] = [(2 * size, (left, right))]
    while len(stack) > 1:
        (one, left), (other, right) = stack[-2:]
        stack[-2:] = [(one + other, (left, right))]
    return stack[0][1]


def gathered(held: Span, num_micro_batches: int) -> tuple[dict[Span, Any], int]:
    """Return what a rank sends: its subtrees' expressions, and the most it held at a time.

    Leaf by leaf, each followed by the additions that it completes, as the reducer does.
    """
    due: dict[int, list[tuple[Span, Span, Span]]] = {}
    for part in subtrees(held, num_micro_batches):
        for one in additions_in(part):
            due.setdefault(one.right[1] - 1, []).append((one.left, one.right, one.total))
    sums: dict[Span, Any] = {}
    most = 0
    for leaf in range(*held):
        sums[leaf, leaf + 1] = leaf
        most = max(most, len(sums))
        for left, right, total in due.get(leaf, ()):
            sums[total] = (sums.pop(left), sums.pop(right))
    return sums, most


def exchanged(parts: Sequence[dict[Span, Any]], num_micro_batches: int) -> Any:
    """Return what whoever adds up everyone's sums gets."""
    values = {span: value for one in parts for span, value in one.items()}
    every = tuple(span for one in parts for span in one)
    for one in additions_over(every, num_micro_batches):
        values[one.total] = (values.pop(one.left), values.pop(one.right))
    assert list(values) == [(0, num_micro_batches)], "something was never added"
    return values[0, num_micro_batches]


@given(deals())
@LIMITS
def test_every_world_size_adds_in_one_order(drawn: tuple[int, int]) -> None:
    world_size, num_micro_batches = drawn
    sent = []
    for rank in range(world_size):
        held = deal(rank, world_size, num_micro_batches)
        sums, most = gathered(held, num_micro_batches)
        assert tuple(sums) == subtrees(held, num_micro_batches)
        assert tuple(sums) == all_parts(world_size, num_micro_batches)[rank]
        assert most <= 2 * num_micro_batches.bit_length()
        sent.append(sums)
    assert exchanged(sent, num_micro_batches) == counted_up(num_micro_batches)


@given(VS)
def test_a_rank_alone_holds_a_logarithm_of_sums_at_a_time(num_micro_batches: int) -> None:
    sums, most = gathered((0, num_micro_batches), num_micro_batches)
    assert list(sums.values()) == [counted_up(num_micro_batches)]
    assert most <= (num_micro_batches - 1).bit_length() + 1


@given(VS, st.data())
@LIMITS
def test_uneven_cuts_add_in_the_same_order(num_micro_batches: int, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, num_micro_batches)))
    edges = sorted({0, num_micro_batches, *places})
    sent = [gathered(held, num_micro_batches)[0] for held in pairwise(edges)]
    assert exchanged(sent, num_micro_batches) == counted_up(num_micro_batches)


@given(deals())
@LIMITS
def test_two_sums_of_one_rank_are_never_added_to_each_other(drawn: tuple[int, int]) -> None:
    # The exchange counts on it: it adds in place, and must not change what it sends.
    parts = all_parts(*drawn)
    owner = {part: rank for rank, of_rank in enumerate(parts) for part in of_rank}
    for one in additions_over(tuple(owner), drawn[1]):
        pair = owner.get(one.left), owner.get(one.right)
        assert pair[0] is None or pair[0] != pair[1]


@given(st.integers(2, 40), st.data())
def test_a_micro_batch_that_nobody_holds_is_noticed(size: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, size - 1))
    leaves = tuple((v, v + 1) for v in range(size) if v != lost)
    with pytest.raises(InvariantViolation, match=f"micro-batch {lost} is held by no rank"):
        additions_over(leaves, size)


# ---------------------------------------------------------------- samples


@given(st.integers(1, 600), SEEDS)
@LIMITS
def test_a_permutation_meets_every_number_once(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(permutation.at(place) for place in range(size)) == list(range(size))


@given(st.integers(1, 2**62), SEEDS, st.data())
@LIMITS
def test_a_huge_permutation_is_one_to_one_where_it_is_asked(
    size: int, seed: int, data: st.DataObject
) -> None:
    permutation = Permutation(size, seed)
    places = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    found = {permutation.at(place) for place in places}
    assert len(found) == len(places)
    assert all(0 <= number < size for number in found)


def test_permutations_of_other_seeds_and_epochs_differ() -> None:
    orders = {
        tuple(Permutation(50, shuffle_seed(seed, epoch)).at(i) for i in range(50))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_example_in_the_docstring_of_data_plan_is_right() -> None:
    plan = DataPlan(num_samples=1000, micro_batch_size=4, num_micro_batches=8)
    assert deal(1, 3, 8) == (3, 6)
    assert plan.positions(7, 3) == (236, 240)
    assert plan.samples(2, 7, 3)[:2] == (137, 507)


@given(cuts())
@LIMITS
def test_micro_batches_partition_an_epoch(epochs: DataPlan) -> None:
    end = 0
    for step in range(epochs.steps):
        spans = [epochs.positions(step, v) for v in range(epochs.num_micro_batches)]
        for first, last in spans:
            assert first == end
            assert 0 <= last - first <= epochs.micro_batch_size
            end = last
        counts = [last - first for first, last in spans]
        assert sum(counts) == epochs.step_size(step)
        filled = [count for count in counts if count]
        assert max(filled) - min(filled) <= 1
        assert filled == counts[: len(filled)]
        # One sample alone is none for BatchNorm.
        low, high = epochs.stand_in(step)
        assert spans[0][0] == low < high <= low + epochs.micro_batch_size
        if epochs.micro_batch_size > 1 and sum(counts) > 1:
            assert high - low > 1
            # Pairs hold an odd number of samples only if one of them is none.
            assert min(filled) > 1 or (epochs.micro_batch_size == 2 and sum(counts) % 2)
        if step < epochs.steps - 1 or epochs.drop_last:
            assert set(counts) == {epochs.micro_batch_size}
    left_out = epochs.num_samples - end
    assert 0 <= left_out < epochs.global_batch if epochs.drop_last else left_out == 0


@given(cuts(100), st.integers(0, 3))
@LIMITS
def test_an_epoch_has_every_sample_once(epochs: DataPlan, epoch: int) -> None:
    seen = Counter(
        sample
        for step in range(epochs.steps)
        for v in range(epochs.num_micro_batches)
        for sample in epochs.samples(epoch, step, v)
    )
    assert set(seen.values()) == {1}
    assert set(seen) <= set(range(epochs.num_samples))
    full = epochs.steps * epochs.global_batch
    assert len(seen) == (full if epochs.drop_last else epochs.num_samples)
    if not epochs.shuffle:
        assert sorted(seen) == list(range(len(seen)))


@given(cuts(60), st.data())
@LIMITS
def test_any_history_of_groups_trains_with_the_same_samples_in_each_step(
    epochs: DataPlan, data: st.DataObject
) -> None:
    sizes = st.integers(1, epochs.num_micro_batches)
    cursor, world_size, committed = Cursor(), data.draw(sizes), {}
    while cursor.epoch < 2:
        done = []
        for rank in range(world_size):
            held = deal(rank, world_size, epochs.num_micro_batches)
            done += [epochs.samples(cursor.epoch, cursor.step, v) for v in range(*held)]
        if data.draw(st.sampled_from(["goes on", "goes on", "changes", "breaks"])) == "breaks":
            world_size = data.draw(sizes)
            continue  # The same step again, by other ranks.
        committed[cursor] = done
        world_size = data.draw(sizes)
        cursor = Cursor(cursor.epoch, cursor.step + 1)
        if cursor.step == epochs.steps:
            cursor = Cursor(cursor.epoch + 1, 0)
    vs = range(epochs.num_micro_batches)
    assert committed == {
        Cursor(epoch, step): [epochs.samples(epoch, step, v) for v in vs]
        for epoch in range(2)
        for step in range(epochs.steps)
    }


@given(SEEDS, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_seeds_of_different_purposes_and_places_never_meet(
    seed: int, epoch: int, step: int, number: int
) -> None:
    here = micro_batch_seed(seed, Cursor(epoch, step), number)
    others = [
        shuffle_seed(seed, epoch),
        sample_seed(seed, epoch, number),
        micro_batch_seed(seed, Cursor(epoch, step), number + 1),
        micro_batch_seed(seed, Cursor(epoch, step + 1), number),
        micro_batch_seed(seed, Cursor(epoch + 1, step), number),
        derive(seed),
    ]
    assert len({here, *others}) == len(others) + 1
    assert all(0 <= one < 2**SEED_BITS for one in (here, *others))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 1, 1), "0 samples"),
        ((1, 0, 1), "micro-batches of 0"),
        ((1, 1, 0), "0 of them in a step"),
        ((-1, 1, 1), "-1 samples"),
    ],
)
def test_data_without_steps_is_refused(sizes: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataPlan(*sizes)


def test_drop_last_that_drops_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drop_last leaves no step at all.*7 samples.*batch 8"):
        DataPlan(7, 2, 4, drop_last=True)
    assert DataPlan(8, 2, 4, drop_last=True).steps == 1
    assert DataPlan(7, 2, 4).steps == 1


# ---------------------------------------------------------------- transfers

STEPS = 3


@st.composite
def standings(draw: st.DrawFn) -> list[RunPosition]:
    """Draw a group: newcomers, and members that are anywhere near each other."""
    cursors = st.builds(Cursor, st.integers(0, 2), st.integers(0, STEPS))
    lengths, in_pass = st.sampled_from([0, STEPS]), st.sampled_from(PassPosition)
    one = st.builds(RunPosition, st.booleans(), cursors, lengths, in_pass)
    return draw(st.lists(one, min_size=1, max_size=7))


def weights_at(cursor: Cursor, *, has: bool) -> Cursor:
    """Return the first cursor with the same weights as this one has."""
    at_end = has and cursor.step >= STEPS
    return Cursor(cursor.epoch + 1, 0) if at_end else cursor


@given(standings())
@LIMITS
def test_the_furthest_state_wins_and_reaches_all_who_lack_it(group: list[RunPosition]) -> None:
    plan = plan_transfers(group).value
    has = any(one.epoch_steps for one in group)
    at = [weights_at(one.cursor, has=has and one.is_inside) for one in group]
    with_state = [rank for rank, one in enumerate(group) if one.has_state]
    best = max((at[rank] for rank in with_state), default=at[0])
    holders = {rank for rank in with_state if at[rank] == best} or {0}
    receivers = [receiver for receiver, _ in plan.pairs]
    assert receivers == [rank for rank in range(len(group)) if rank not in holders]
    assert {sender for _, sender in plan.pairs} <= holders
    assert {weights_at(one, has=has) for one in plan.cursors} == {weights_at(best, has=has)}
    for rank in holders:
        assert plan.cursors[rank] == group[rank].cursor
    for receiver, sender in plan.pairs:
        assert plan.cursors[receiver] == plan.cursors[sender] == max(plan.cursors)
        assert plan.sender_to(receiver) == sender
        assert receiver in plan.receivers_from(sender)


@given(standings())
@LIMITS
def test_senders_share_the_work(group: list[RunPosition]) -> None:
    plan = plan_transfers(group).value
    loads = Counter(sender for _, sender in plan.pairs)
    if loads:
        assert max(loads.values()) - min(loads.values()) <= 1


@given(st.lists(st.sampled_from([Cursor(1, STEPS), Cursor(2, 0)]), min_size=1, max_size=6))
def test_the_end_of_an_epoch_and_the_start_of_the_next_are_one_state(cursors: list[Cursor]) -> None:
    group = [RunPosition(True, cursor, STEPS, PassPosition.ITERATIONS) for cursor in cursors]
    assert plan_transfers(group).value.pairs == ()
    assert plan_transfers(group).value.cursors == tuple(cursors)
    joined = plan_transfers([*group, RunPosition()]).value
    # Who joins does so after the code between the epochs, if anyone is there.
    assert joined.cursors == (*cursors, max(cursors))
    assert cursors[joined.pairs[0][1]] == max(cursors)
    again = RunPosition(True, Cursor(1, STEPS), STEPS)  # It is called again, and passed the end.
    assert plan_transfers([*group, again]).value.cursors == (*cursors, max(cursors))
    assert plan_transfers([again, again]).value.pairs == ()


def test_who_was_away_receives_a_step_that_the_others_have_done_again() -> None:
    away, others = (RunPosition(True, Cursor(1, 2), committed_in=one) for one in (4, 5))
    assert plan_transfers([away, others, others]).value.pairs == ((0, 1),)
    assert plan_transfers([away, others, away]).value.sender_to(2) == 1
    further = RunPosition(True, Cursor(1, 3), committed_in=4)
    assert plan_transfers([further, others]).value.pairs == ((1, 0),)


@pytest.mark.parametrize(
    ("position", "point"),
    [
        (
            RunPosition(True, Cursor(1, 2), STEPS, PassPosition.ITERATIONS),
            ProgramPoint(Cursor(1, 3)),
        ),
        (
            RunPosition(True, Cursor(1, 3), STEPS, PassPosition.ITERATIONS),
            ProgramPoint(Cursor(1, 3), CodePart.END),
        ),
        (RunPosition(True, Cursor(1, 3), STEPS), ProgramPoint(Cursor(1, 0))),
        (RunPosition(True, Cursor(1, 3), 0, PassPosition.ITERATIONS), ProgramPoint(Cursor(1, 4))),
    ],
)
def test_who_comes_at_the_end_of_a_pass_runs_other_code_than_who_is_inside(
    position: RunPosition, point: ProgramPoint
) -> None:
    group = [position, RunPosition()]
    found = next_program_points(group, plan_transfers(group).value)
    assert found == (point, ProgramPoint(Cursor(1, 0)))


@st.composite
def members_of_a_loop(draw: st.DrawFn) -> tuple[list[RunPosition], bool]:
    """Draw a group that meets, and whether its loop is over whole steps.

    Some members may have committed a step that others have not, or have done again without them;
    newcomers have nothing, and who is called again is in no pass.
    """
    by_steps, step = draw(st.booleans()), draw(st.integers(0, STEPS - 1))
    cursors = [Cursor(1, step), Cursor(1, step + 1)]
    cursors += [Cursor(2, 0)] if step + 1 == STEPS else []
    inside = (
        [PassPosition.BETWEEN_STEPS, PassPosition.WITHIN_STEP]
        if by_steps
        else [PassPosition.ITERATIONS]
    )
    with_state = st.builds(
        RunPosition,
        st.just(True),
        st.sampled_from(cursors),
        st.just(STEPS),
        st.sampled_from([PassPosition.NO, *inside]),
        committed_in=st.sampled_from([1, 1, 1, 2]),
    )
    members = st.one_of(with_state, with_state, st.just(RunPosition()))
    return draw(st.lists(members, min_size=1, max_size=5)), by_steps


def code_of(group: list[RunPosition], rank: int, *, by_steps: bool) -> list[ProgramPoint]:
    """Return all code that a member runs from a meeting to the end of the next epoch, in order."""
    plan, position = plan_transfers(group).value, group[rank]
    cursor, sender = plan.cursors[rank], plan.sender_to(rank)
    found, stays = [], position.is_inside and position.cursor.epoch == cursor.epoch
    began = position.in_pass is PassPosition.WITHIN_STEP and position.cursor == cursor
    if began and sender is not None and group[sender].in_pass is not PassPosition.WITHIN_STEP:
        stays = began = False  # The state that it receives lacks what this code has done.
    for epoch in range(cursor.epoch, 3):
        if not stays:
            found.append(ProgramPoint(Cursor(epoch, 0)))
        for step in range(cursor.step, STEPS):
            if by_steps and not began:
                found.append(ProgramPoint(Cursor(epoch, step), CodePart.BEGIN))
            found.append(ProgramPoint(Cursor(epoch, step + 1)))
            began = False
        found.append(ProgramPoint(Cursor(epoch, STEPS), CodePart.END))
        stays, began, cursor = False, False, Cursor(epoch + 1, 0)
    return found


@given(members_of_a_loop())
@LIMITS
def test_a_report_is_made_by_as_many_members_as_are_counted(
    drawn: tuple[list[RunPosition], bool],
) -> None:
    group, by_steps = drawn
    plan = plan_transfers(group).value
    first = next_program_points(group, plan)
    code = [code_of(group, rank, by_steps=by_steps) for rank in range(len(group))]
    assert [one[0] for one in code] == list(first)
    for one in code:
        assert one == sorted(one)
        for here in one:
            assert sum(here in other for other in code) == sum(point <= here for point in first)


@pytest.mark.parametrize(
    ("generation", "steps", "outdated"), [(6, 90, True), (6, 50, False), (5, 90, False)]
)
def test_what_is_saved_is_newer_if_a_later_group_has_come_further(
    generation: int, steps: int, outdated: bool
) -> None:
    away = RunPosition(True, generation=5, committed=50)
    newcomer = RunPosition(generation=7, saved=SavedPosition(generation, steps))
    assert is_outdated([away, newcomer]) == outdated
    one_of_them = RunPosition(True, generation=6, committed=40)
    assert not is_outdated([away, newcomer, one_of_them])
    # Memory of a node that had no worker in the groups since is newer, whenever it was taken.
    assert is_outdated([away, RunPosition(held=51)])
    assert not is_outdated([away, RunPosition(held=50)])


@given(st.integers(1, 8), st.integers(0, 5))
def test_when_nobody_has_state_all_begin_as_rank_zero(size: int, epoch: int) -> None:
    plan = plan_transfers([RunPosition(cursor=Cursor(epoch, 0))] * size).value
    assert plan.pairs == tuple((rank, 0) for rank in range(1, size))
    assert plan.cursors == (Cursor(epoch, 0),) * size

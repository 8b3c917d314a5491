"""Who hangs: the rule about members that stand still, and when a worker says that it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.config import NS_PER_S, ns
from elastic.core.events.worker import Looked
from elastic.core.machine.worker_pulse import PulseWatch
from elastic.core.policy import hang
from elastic.core.policy.hang import FRESH_NS, Sight, Watched
from elastic.core.world import Begun, WorkerId

NOW_NS = 1000 * NS_PER_S
TIMEOUT_NS = 30 * NS_PER_S
GENERATION = 7


def sight(
    *,
    waits: float | None = None,
    stands: float | None = None,
    said: float = 0.1,
    generation: int = 7,
) -> Sight:
    """What a member said `said` seconds ago; it waits or stands for so many seconds by now."""
    return Sight(
        generation,
        NOW_NS - ns(said),
        NOW_NS - ns(waits) if waits is not None else None,
        NOW_NS - ns(stands) if stands is not None else None,
    )


def members(*sights: Sight | None, out: int = -1) -> list[Watched]:
    return [Watched(WorkerId(f"n{rank}/1"), rank != out, one) for rank, one in enumerate(sights)]


WAITS, STANDS, MOVES = sight(waits=40), sight(stands=40), sight()


@pytest.mark.parametrize(
    ("watched", "culprits", "reason"),
    [
        (members(WAITS, STANDS, WAITS), ["n1/1"], "2 members wait for n1/1"),
        (members(STANDS, STANDS, WAITS), ["n0/1", "n1/1"], "1 members wait for n0/1, n1/1"),
        (members(WAITS, WAITS), [], "all wait"),
        (members(STANDS, STANDS), [], "nobody waits"),
        (members(STANDS), [], "nobody waits"),
        (members(WAITS, STANDS, MOVES), [], "n2/1 moves"),
        (members(WAITS, STANDS, None), [], "n2/1 says nothing of itself"),
        (members(WAITS, STANDS, WAITS, out=0), [], "n0/1 says nothing of itself"),
        (members(WAITS, sight(stands=40, said=3.1)), [], "n1/1 moves"),
        (members(WAITS, sight(stands=40, generation=6)), [], "n1/1 moves"),
        (members(sight(waits=29.9), STANDS), [], "waiting for n1/1"),
        (members(WAITS, sight(stands=29.9)), [], "waiting for n1/1"),
        (members(sight(waits=30), sight(stands=30)), ["n1/1"], "1 members wait for n1/1"),
        (members(), [], "nobody waits"),
    ],
)
def test_who_hangs(watched: list[Watched], culprits: list[str], reason: str) -> None:
    decision = hang.judge(GENERATION, watched, NOW_NS, TIMEOUT_NS)
    assert (list(decision.value.culprits), decision.reason) == (culprits, reason)


@pytest.mark.parametrize(
    ("watched", "is_stuck"),
    [
        (members(sight(waits=60), sight(waits=90)), True),
        (members(sight(waits=59.9), sight(waits=90)), False),
        (members(sight(waits=90), sight(waits=90), MOVES), False),
        (members(sight(waits=90), sight(waits=90), None), False),
        (members(sight(waits=90), sight(waits=90), out=0), False),
        (members(sight(waits=90), sight(waits=90, said=3.1)), False),
    ],
)
def test_a_group_in_which_all_wait_is_stuck_in_the_end_and_nobody_is_to_blame(
    watched: list[Watched], is_stuck: bool
) -> None:
    found = hang.judge(GENERATION, watched, NOW_NS, TIMEOUT_NS).value
    assert (found.is_stuck, found.culprits) == (is_stuck, ())
    assert not hang.judge(GENERATION, watched, NOW_NS, 0).value.is_stuck


def test_time_counts_from_the_last_of_all_movements() -> None:
    watched = members(sight(waits=90), sight(stands=60), sight(waits=45))
    assert hang.judge(GENERATION, watched, NOW_NS, TIMEOUT_NS).value.since_ns == NOW_NS - ns(45)


def test_a_timeout_of_zero_accuses_nobody() -> None:
    assert not hang.judge(GENERATION, members(WAITS, STANDS), NOW_NS, 0).value.culprits


SIGHTS = (
    st.none()
    | st.builds(
        sight,
        waits=st.none() | st.floats(0, 100),
        said=st.floats(0, 5),
        generation=st.sampled_from([6, 7]),
    )
    | st.builds(sight, stands=st.none() | st.floats(0, 100), said=st.floats(0, 5))
)


@given(st.lists(SIGHTS, max_size=6), st.integers(0, 40))
def test_nobody_is_accused_who_moved_in_time_or_waits(
    sights: list[Sight | None], timeout_s: int
) -> None:
    watched = members(*sights)
    found = hang.judge(GENERATION, watched, NOW_NS, timeout_s * NS_PER_S).value
    for member in watched:
        if member.worker_id in found.culprits:
            assert member.sight is not None
            assert member.sight.still_since_ns is not None
            assert NOW_NS - member.sight.still_since_ns >= timeout_s * NS_PER_S
            assert NOW_NS - member.sight.said_ns <= FRESH_NS


# ---------------------------------------------------------------- what a worker says


def said(
    looks: list[tuple[int, float]], *, every_s: float = 0.1
) -> list[tuple[float, float, float]]:
    """Look at (beats, seconds of waiting); return (moment, waiting, standing) of what is said."""
    watch, found = PulseWatch(), []
    watch.begin(0, 2)
    for index, (beats, waiting_s) in enumerate(looks, start=1):
        now_ns = ns(index * every_s)
        pulse = watch.look(Looked(beats, ns(waiting_s)), now_ns)
        if pulse is not None:
            found.append((now_ns / NS_PER_S, pulse[0] / NS_PER_S, pulse[1] / NS_PER_S))
    return found


def test_a_main_thread_that_moves_is_not_mentioned() -> None:
    assert said([(beats, 0) for beats in range(1, 100)]) == []


def test_a_main_thread_that_waits_a_little_at_each_step_is_not_mentioned() -> None:
    assert said([(beats // 3, 0.1 * (beats % 3)) for beats in range(3, 100)]) == []


def test_before_the_training_loop_is_seen_nothing_is_said() -> None:
    assert said([(0, 0)] * 100) == []


def test_waiting_is_said_every_half_second_until_it_is_over() -> None:
    looks = [(5, round(0.1 * i, 1)) for i in range(1, 14)] + [(6, 0.0)] * 3
    assert said(looks) == [(0.3, 0.3, 0), (0.8, 0.8, 0), (1.3, 1.3, 0), (1.4, 0, 0)]


def test_standing_still_is_said_every_second_until_it_is_over() -> None:
    looks = [(5, 0.0)] * 25 + [(6, 0.0)] * 3
    assert said(looks) == [(1.1, 0, 1.0), (2.1, 0, 2.0), (2.6, 0, 0)]


def test_who_stands_still_after_waiting_says_so() -> None:
    looks = [(5, 0.3), (6, 0.0), *[(6, 0.0)] * 10]
    assert said(looks) == [(0.1, 0.3, 0), (0.2, 0, 0), (1.2, 0, 1.0)]


def test_time_in_which_nobody_could_look_is_not_held_against_the_main_thread() -> None:
    watch = PulseWatch()
    watch.begin(0, 2)
    assert watch.look(Looked(5), ns(0.1)) is None
    assert watch.look(Looked(5), ns(60)) is None
    found = [watch.look(Looked(5), ns(60 + tenth / 10)) for tenth in range(1, 12)]
    # It was seen for the first time at 0.1 s, and 59.8 s were slept away.
    assert [round(one[1] / NS_PER_S, 1) for one in found if one] == [1.0]


# ---------------------------------------------------------------- groups within the group


PARTS = (("shard", (0, 1)), ("shard", (2, 3)), ("replica", (0, 2)), ("replica", (1, 3)))
"""Of two replicas of a model in two shards: rank 0 and 1 have one of them, 2 and 3 the other."""


def in_parts(one: Sight, rank: int, **counts: int) -> Sight:
    """What a rank says, and how many collectives it has begun in its groups."""
    begun = [Begun(name, ranks, counts[name]) for name, ranks in PARTS if rank in ranks]
    return replace(one, begun=tuple(begun))


def accused(*sights: Sight) -> list[str]:
    return list(hang.judge(GENERATION, members(*sights), NOW_NS, TIMEOUT_NS).value.culprits)


def test_who_seems_to_stand_and_waits_for_the_one_that_hangs_is_not_accused() -> None:
    # Rank 0 waits for rank 1 where nobody can see it: `work.wait()` of the script's own.
    assert accused(
        in_parts(STANDS, 0, shard=13, replica=4),
        in_parts(STANDS, 1, shard=12, replica=4),
        in_parts(WAITS, 2, shard=17, replica=5),
        in_parts(WAITS, 3, shard=17, replica=5),
    ) == ["n1/1"]


def test_who_stands_beside_and_is_waited_for_by_nobody_is_not_accused() -> None:
    # Ranks 2 and 3 compute for long, and have all begun what they share with others.
    assert accused(
        in_parts(WAITS, 0, shard=19, replica=6),
        in_parts(STANDS, 1, shard=18, replica=6),
        in_parts(STANDS, 2, shard=23, replica=6),
        in_parts(STANDS, 3, shard=23, replica=6),
    ) == ["n1/1"]


def test_two_that_hang_in_different_parts_are_both_accused() -> None:
    assert accused(
        in_parts(STANDS, 0, shard=13, replica=4),
        in_parts(WAITS, 1, shard=14, replica=5),
        in_parts(WAITS, 2, shard=14, replica=5),
        in_parts(STANDS, 3, shard=13, replica=4),
    ) == ["n0/1", "n3/1"]


def test_of_a_circle_all_that_stand_are_accused() -> None:
    assert accused(
        in_parts(STANDS, 0, shard=13, replica=4),
        in_parts(STANDS, 1, shard=12, replica=5),
        in_parts(WAITS, 2, shard=12, replica=5),
        in_parts(STANDS, 3, shard=13, replica=4),
    ) == ["n0/1", "n1/1", "n3/1"]


def test_nobody_of_a_circle_is_accused_before_the_time_is_over() -> None:
    early = sight(stands=29.9)
    assert not accused(
        in_parts(early, 0, shard=13, replica=4),
        in_parts(early, 1, shard=12, replica=5),
        in_parts(WAITS, 2, shard=12, replica=5),
        in_parts(early, 3, shard=13, replica=4),
    )


def test_who_waits_for_nobody_that_can_be_told_waits_for_all() -> None:
    assert accused(
        in_parts(STANDS, 0, shard=13, replica=4),
        in_parts(STANDS, 1, shard=13, replica=4),
        WAITS,
        in_parts(WAITS, 3, shard=17, replica=5),
    ) == ["n0/1", "n1/1"]


def test_two_that_hang_and_hide_those_who_wait_for_them_are_accused_in_the_end() -> None:
    def pairs(one: Sight) -> list[str]:
        return accused(
            in_parts(one, 0, shard=13, replica=4),
            in_parts(one, 1, shard=12, replica=4),
            in_parts(one, 2, shard=12, replica=4),
            in_parts(one, 3, shard=13, replica=4),
        )

    assert not pairs(sight(stands=59.9))
    assert pairs(sight(stands=60)) == ["n1/1", "n2/1"]


def test_of_those_who_all_stand_and_have_begun_the_same_nobody_is_accused() -> None:
    one = sight(stands=600)
    assert not accused(*[in_parts(one, rank, shard=13, replica=4) for rank in range(4)])


COUNTS = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3)) for _ in range(4)])


@given(COUNTS, st.tuples(*[st.booleans()] * 4))
def test_whoever_is_accused_is_waited_for_and_waits_for_nobody_who_is_spared(
    counts: tuple[tuple[int, int], ...], stands: tuple[bool, ...]
) -> None:
    sights = [
        in_parts(STANDS if stands[rank] else WAITS, rank, shard=shard, replica=replica)
        for rank, (shard, replica) in enumerate(counts)
    ]
    found = accused(*sights)
    assert bool(found) == (any(stands) and not all(stands))
    for worker_id in found:
        spared = {w for w in before(int(worker_id[1]), counts) if stands[w]}
        assert all(f"n{other}/1" in found for other in spared)


def before(rank: int, counts: tuple[tuple[int, int], ...]) -> set[int]:
    """Return whom a rank waits for, by going round until nothing is new."""
    found: set[int] = set()
    while True:
        more = {
            other
            for number, kind in enumerate(("shard", "replica"))
            for name, ranks in PARTS
            for one in ranks
            for other in ranks
            if name == kind
            if one in found | {rank} and counts[other][number] < counts[one][number]
        }
        if more <= found:
            return found
        found |= more

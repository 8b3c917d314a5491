"""Who hangs: the rule about members that stand still."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.config import NS_PER_S, ns
from elastic.core.facts import CollectiveCount, WorkerId
from elastic.core.policy import hang
from elastic.core.policy.hang import MainThreadState, WatchedMember

NOW_NS = 1000 * NS_PER_S
TIMEOUT_NS = 30 * NS_PER_S
GENERATION = 7


def sight(
    *,
    waits: float | None = None,
    stands: float | None = None,
    said: float = 0.1,
    generation: int = 7,
) -> MainThreadState:
    """What a member said `said` seconds ago; it waits or stands for so many seconds by now."""
    return MainThreadState(
        generation,
        NOW_NS - ns(said),
        NOW_NS - ns(waits) if waits is not None else None,
        NOW_NS - ns(stands) if stands is not None else None,
    )


def members(*sights: MainThreadState | None, out: int = -1) -> list[WatchedMember]:
    return [
        WatchedMember(WorkerId(f"n{rank}/1"), rank != out, one) for rank, one in enumerate(sights)
    ]


WAITS, STANDS, MOVES = sight(waits=40), sight(stands=40), sight()


# ---------------------------------------------------------------- groups within the group


PARTS = (("shard", (0, 1)), ("shard", (2, 3)), ("replica", (0, 2)), ("replica", (1, 3)))
"""Of two replicas of a model in two shards: rank 0 and 1 have one of them, 2 and 3 the other."""


def in_parts(one: MainThreadState, rank: int, **counts: int) -> MainThreadState:
    """What a rank says, and how many collectives it has begun in its groups."""
    begun = [CollectiveCount(name, ranks, counts[name]) for name, ranks in PARTS if rank in ranks]
    return replace(one, begun=tuple(begun))


def accused(*sights: MainThreadState) -> list[str]:
    return list(hang.judge(GENERATION, members(*sights), NOW_NS, TIMEOUT_NS).value.culprits)


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

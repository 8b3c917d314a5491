"""Ranks: a permutation, node-contiguous, survivors first and where they were."""

from __future__ import annotations

import pytest

from elastic.core.facts import NodeId, WorkerId
from elastic.core.policy.ranks import RankPlace, assign_ranks
from elastic.errors import InvariantViolation


def ranks(members: str, previous: str = "") -> str:
    """Rank workers named "node/serial"; return them by rank."""
    return " ".join(p.worker_id for p in places(members, previous))


def places(members: str, previous: str = "") -> tuple[RankPlace, ...]:
    ids = [WorkerId(w) for w in members.split()]
    return assign_ranks(ids, on_nodes(members), on_nodes(previous))


def on_nodes(workers: str) -> dict[WorkerId, NodeId]:
    return {WorkerId(w): NodeId(w.partition("/")[0]) for w in workers.split()}


def test_a_worker_that_is_a_member_twice_is_a_bug_of_ours() -> None:
    with pytest.raises(InvariantViolation, match=r"a worker is a member twice: .*a/1"):
        ranks("a/1 a/1")


@pytest.mark.parametrize(
    ("previous", "members", "expected"),
    [
        ("a/1 a/2 b/1 b/2 c/1 c/2", "b/1 b/2 c/1 c/2", "c/1 c/2 b/1 b/2"),
        ("a/1 b/1 c/1 d/1", "a/1 c/1 d/1 e/2", "a/1 d/1 c/1 e/2"),
        ("a/1 b/1 c/1 d/1 e/1", "a/1 c/1", "a/1 c/1"),
        ("a/1 a/2 b/1 b/2 c/1", "b/1 b/2 c/1", "b/1 b/2 c/1"),
        ("a/1 a/2 b/1 b/2 c/1", "a/1 c/1", "a/1 c/1"),
        ("a/1 b/1 c/1", "a/2 b/1 c/1", "c/1 b/1 a/2"),
    ],
    ids=[
        "the last one takes the place of the first",
        "a new one comes last",
        "none is left behind the gap",
        "none has its size: the others close up",
        "a part of a node keeps its place",
        "all of its workers are new: as another node",
    ],
)
def test_the_last_node_of_its_size_takes_the_place_of_a_lost_one(
    previous: str, members: str, expected: str
) -> None:
    assert ranks(members, previous) == expected

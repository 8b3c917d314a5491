"""Ranks: a permutation, node-contiguous, survivors first and in their old order."""

from __future__ import annotations

import pytest

from elastic.core.policy.ranks import Place, assign_ranks
from elastic.core.world import NodeId, WorkerId
from elastic.errors import InvariantViolation


def ranks(members: str, previous: str = "") -> str:
    """Rank workers named "node/serial"; return them by rank."""
    return " ".join(p.worker_id for p in places(members, previous))


def places(members: str, previous: str = "") -> tuple[Place, ...]:
    ids = [WorkerId(w) for w in members.split()]
    node_of = {w: NodeId(w.partition("/")[0]) for w in ids}
    return assign_ranks(ids, node_of, [WorkerId(w) for w in previous.split()])


@pytest.mark.parametrize(
    ("members", "previous", "by_rank"),
    [
        ("", "", ""),
        ("a/1", "", "a/1"),
        # A first group: nodes by id, workers by id.
        ("b/1 a/2 a/1", "", "a/1 a/2 b/1"),
        # Contiguous nodes even if ids interleave.
        ("a/1 b/1 a/2 b/2", "", "a/1 a/2 b/1 b/2"),
        # Nobody moves when nobody goes.
        ("a/1 b/1 c/1", "c/1 a/1 b/1", "c/1 a/1 b/1"),
        # The ranks behind a lost one close up.
        ("a/1 c/1", "a/1 b/1 c/1", "a/1 c/1"),
        # Rank 0 is lost: the next survivor leads.
        ("b/1 c/1", "a/1 b/1 c/1", "b/1 c/1"),
        # Whoever is new comes last, also if its name comes first.
        ("a/1 b/1 c/1", "b/1 c/1", "b/1 c/1 a/1"),
        # A replacement on a survivor's node stays with it.
        ("a/1 a/3 b/1", "a/1 a/2 b/1", "a/1 a/3 b/1"),
        # A replacement on a node without survivors goes to the end.
        ("a/9 b/1 c/1", "a/1 b/1 c/1", "b/1 c/1 a/9"),
        # On a node survivors come before the new one, whatever its id.
        ("a/0 a/5", "a/5", "a/5 a/0"),
        # All are new after all were lost.
        ("b/2 a/2", "a/1 b/1", "a/2 b/2"),
        # Those who were in the group and are not members now take no rank.
        ("b/1", "z/1 b/1 y/1", "b/1"),
    ],
)
def test_survivors_come_first_in_their_order_and_nodes_stay_together(
    members: str, previous: str, by_rank: str
) -> None:
    assert ranks(members, previous) == by_rank


def test_each_place_says_where_the_worker_is_in_its_node_and_in_the_group() -> None:
    assert places("a/1 a/2 b/1") == (
        Place(WorkerId("a/1"), NodeId("a"), 0, 0, 2, 0),
        Place(WorkerId("a/2"), NodeId("a"), 1, 1, 2, 0),
        Place(WorkerId("b/1"), NodeId("b"), 2, 0, 1, 1),
    )


def test_ten_workers_of_a_node_are_ordered_by_id_as_text() -> None:
    """Any total order will do, as long as all sides have the same one."""
    assert ranks("a/10 a/9 a/1") == "a/1 a/10 a/9"


def test_a_worker_that_is_a_member_twice_is_a_bug_of_ours() -> None:
    with pytest.raises(InvariantViolation, match=r"a worker is a member twice: .*a/1"):
        ranks("a/1 a/1")

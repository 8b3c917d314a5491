"""Ranks: a permutation, node-contiguous, survivors first and in their old order."""

from __future__ import annotations

import pytest

from elastic.core.policy.ranks import RankPlace, assign_ranks
from elastic.core.world import NodeId, WorkerId
from elastic.errors import InvariantViolation


def ranks(members: str, previous: str = "") -> str:
    """Rank workers named "node/serial"; return them by rank."""
    return " ".join(p.worker_id for p in places(members, previous))


def places(members: str, previous: str = "") -> tuple[RankPlace, ...]:
    ids = [WorkerId(w) for w in members.split()]
    node_of = {w: NodeId(w.partition("/")[0]) for w in ids}
    return assign_ranks(ids, node_of, [WorkerId(w) for w in previous.split()])


def test_a_worker_that_is_a_member_twice_is_a_bug_of_ours() -> None:
    with pytest.raises(InvariantViolation, match=r"a worker is a member twice: .*a/1"):
        ranks("a/1 a/1")

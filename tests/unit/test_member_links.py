"""Members meet in a store, and send each other bytes of any length, and a state, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import RunPosition, plan_transfers
from elastic.worker.engine.outcome import is_group_broken
from elastic.worker.group import connections, member_links
from elastic.worker.group.member_links import MemberEntry, connect, links_of, share_bytes
from elastic.worker.group.peer_sockets import PeerAddress, PeerEndpoint
from elastic.worker.state.transfer import transfer
from tests.patience import DEADLINE_S
from tests.unit.groups_under_test import Group, at_once

STATE = {
    "weights": torch.arange(3_000_000.0),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "empty": torch.empty(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "steps": 7,
}


def connected(nodes: str) -> list[Group]:
    """Return the groups of members on these nodes that have met."""
    store, groups = dist.HashStore(), [Group(rank, len(nodes)) for rank in range(len(nodes))]
    reach = [PeerAddress("127.0.0.1", DEADLINE_S, node) for node in nodes]
    at_once(
        [functools.partial(connect, one, store, r) for one, r in zip(groups, reach, strict=True)]
    )
    return groups


def by_all(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    return at_once([functools.partial(call, one) for one in groups])


@pytest.mark.parametrize("few", [1, 16])
@pytest.mark.parametrize("nodes", ["a", "ab", "aab", "abcde", "aaabbcdd"])
def test_everyone_gets_what_everyone_gives(
    nodes: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_links, "FEW", few)
    groups = connected(nodes)
    for round_ in range(3):
        given = [b"%d %d " % (round_, rank) * 50 * rank for rank in range(len(nodes))]
        received = by_all(groups, lambda one, given=given: share_bytes(one, given[one.rank()]))
        assert received == [tuple(given)] * len(nodes)


@pytest.mark.parametrize("few", [1, 16])
@pytest.mark.parametrize(
    "having", [(True, False), (False, False, False), (False, True, False, True, False)]
)
def test_whoever_lacks_the_state_receives_it_in_a_group_of_any_size(
    having: tuple[bool, ...], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_links, "FEW", few)
    groups = connected("abcdefgh"[: len(having)])
    plan = plan_transfers([RunPosition(one, Cursor(0, 3)) for one in having]).value
    results = by_all(groups, lambda one: transfer(one, plan, lambda: STATE))
    for rank, (state, num_bytes) in enumerate(results):
        assert (state is not None) == (plan.sender_to(rank) is not None)
        assert (num_bytes > 12_000_000) == any(rank in pair for pair in plan.pairs)
        if state is not None:
            assert state["steps"] == 7
            assert all(torch.equal(state[name], STATE[name]) for name in STATE if name != "steps")


@pytest.mark.parametrize("few", [1, 16])
def test_a_cut_ends_a_transfer_on_both_sides(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_links, "FEW", few)
    groups = connected("ab")
    plan = plan_transfers([RunPosition(True), RunPosition(False)]).value

    def state() -> Any:
        connections.cut_all()
        return STATE

    def broken(one: Group) -> BaseException:
        with pytest.raises(RuntimeError) as raised:
            transfer(one, plan, state)
        return raised.value

    assert all(map(is_group_broken, by_all(groups, broken)))


def test_an_entry_arrives_as_it_was() -> None:
    entry = MemberEntry(PeerEndpoint("fe80::1", 65_535, bytes(range(16))), "boot/n1", 3, 4, 5)
    assert MemberEntry.of(entry.to_bytes()) == entry


def test_members_of_a_node_read_each_others_memory() -> None:
    groups = connected("aab")
    assert [sorted(links_of(one).memory) for one in groups] == [[1], [0], []]

"""Votes on reports: nobody waits who need not, and all who wait see the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch.distributed as dist

from elastic.errors import GroupError, InvariantViolation
from elastic.storage.marker import StoredFile
from elastic.worker.agreement import Agreement, Outcome, Part, Tally, Vote

T = TypeVar("T")
DEADLINE_S = 60.0


def members(world_size: int) -> list[Agreement]:
    store = dist.HashStore()
    return [Agreement(store, rank, world_size=world_size) for rank in range(world_size)]


def together(calls: list[Callable[[], T]]) -> list[T]:
    """Run each call in a thread of its own and return what they returned, in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(DEADLINE_S) for future in futures]


def test_four_counts_travel_in_one_integer() -> None:
    tally = Tally(32_767, 3, 32_767, 1)
    assert Tally.of(tally.number()) == tally


def test_a_member_that_does_not_wait_goes_on_alone() -> None:
    first, second = members(2)
    for index in range(100):
        first.vote(index, Vote())
    second.vote(0, Vote(waits=True))
    assert second.wait_closed(0) == Tally(2, 1, 0, 0)


@pytest.mark.parametrize(
    ("votes", "leaves"),
    [
        ([Vote(True, True, True), Vote(True, True, True)], True),
        ([Vote(True, False, True), Vote(True, True, True)], True),
        ([Vote(True, True, True), Vote(True, True, False)], True),
        ([Vote(True, True, True), Vote(False, False, False)], False),
        ([Vote(True, False, True), Vote(True, False, True)], False),
        ([Vote(True, True, False), Vote(True, True, False)], False),
    ],
)
def test_members_leave_when_one_wishes_all_wait_and_there_is_a_checkpoint(
    votes: list[Vote], leaves: bool
) -> None:
    def report(agreement: Agreement, vote: Vote) -> Tally:
        agreement.vote(0, vote)
        return agreement.wait_closed(0) if vote.waits else Tally()

    both = members(2)
    tallies = together([lambda a=a, v=v: report(a, v) for a, v in zip(both, votes, strict=True)])
    seen = {tally for tally, vote in zip(tallies, votes, strict=True) if vote.waits}
    assert [tally.leaves() for tally in seen] == [leaves]


def test_a_member_may_stop_waiting_for_one_that_never_comes() -> None:
    first, second = members(2)
    first.vote(0, Vote(waits=True, wishes=True))
    assert first.wait_closed(0, patience_s=0.01) == Tally()
    second.vote(0, Vote(waits=True, wishes=True, has_checkpoint=True))
    tally = second.wait_closed(0)
    assert tally == Tally(votes=2, waiting=1, wishing=2, with_checkpoint=1)
    assert not tally.leaves()


@pytest.mark.parametrize("seed", range(20))
def test_members_that_lose_patience_never_disagree_with_those_that_wait(seed: int) -> None:
    """The moments of the last vote and of the withdrawal are drawn close to each other."""
    draws = random.Random(seed)
    patience = [draws.uniform(0.0, 0.004) for _ in range(3)]

    def report(agreement: Agreement, patience_s: float | None) -> bool:
        leaves = []
        for index in range(10):
            agreement.vote(index, Vote(True, True, patience_s is None))
            tally = agreement.wait_closed(index, patience_s=patience_s)
            leaves.append(tally.leaves())
        return leaves

    first, *others = members(4)
    calls = [lambda: report(first, None)]
    calls += [lambda a=a, p=p: report(a, p) for a, p in zip(others, patience, strict=True)]
    committed, *rest = together(calls)
    for index, all_leave in enumerate(committed):
        assert {left[index] for left in rest} == {True} if all_leave else True
        assert all_leave or not any(left[index] for left in rest)


def test_a_file_that_several_members_have_is_written_by_one() -> None:
    both = members(2)
    assert [a.claim(0, "model.pt") for a in both] == [True, False]
    assert [a.claim(1, "model.pt") for a in reversed(both)] == [True, False]


def test_parts_and_outcome_reach_every_member() -> None:
    both = members(2)
    both[1].add_part(0, Part(1, "c", (StoredFile("b.pt", 2, 7), StoredFile("ü.pt", 3))))
    both[0].add_part(0, Part(0, "c", error="disk full"))
    for agreement in both:
        agreement.vote(0, Vote(True, False, True))
    both[0].tell_outcome(0, Outcome(error="no"), ("b.pt",))
    assert both[1].parts(0) == (
        Part(0, "c", error="disk full"),
        Part(1, "c", (StoredFile("b.pt", 2, 7), StoredFile("ü.pt", 3))),
    )
    assert both[1].wait_outcome(0) == Outcome(error="no")


def test_the_store_does_not_grow_with_the_number_of_reports() -> None:
    store = dist.HashStore()
    agreement = Agreement(store, 0, world_size=1)
    for index in range(50):
        agreement.add_part(index, Part(0, "c"))
        agreement.vote(index, Vote(True, False, True))
        agreement.wait_closed(index)
        agreement.tell_outcome(index, Outcome(), ())
    assert store.num_keys() <= 4


def test_who_waits_is_freed_by_what_the_watch_raises() -> None:
    def watch() -> None:
        raise GroupError("a peer hung up")

    store = dist.HashStore()
    agreement = Agreement(store, 0, world_size=2, watch=watch)
    agreement.vote(0, Vote(waits=True))
    with pytest.raises(GroupError):
        agreement.wait_closed(0)


def test_an_outcome_that_came_before_the_peers_hung_up_counts() -> None:
    store = dist.HashStore()
    lead = Agreement(store, 0, world_size=2)

    def tell_and_hang_up() -> None:
        lead.tell_outcome(0, Outcome(path="c", leaves=True), ())
        raise GroupError("a peer hung up")

    other = Agreement(store, 1, world_size=2, watch=tell_and_hang_up)
    assert other.wait_outcome(0) == Outcome(path="c", leaves=True)


def test_a_place_outside_the_group_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="rank 2 of 2"):
        Agreement(dist.HashStore(), 2, world_size=2)

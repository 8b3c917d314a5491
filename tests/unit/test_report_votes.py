"""Votes on reports: nobody waits who need not, and all who wait see the same."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from elastic.errors import GroupError, InvariantViolation
from elastic.worker.checkpoint.report_votes import ReportOutcome, ReportVote, ReportVotes, VoteCount


def members(world_size: int) -> list[ReportVotes]:
    store = dist.HashStore()
    return [ReportVotes(store, rank, world_size=world_size) for rank in range(world_size)]


def test_a_member_may_stop_waiting_for_one_that_never_comes() -> None:
    first, second = members(2)
    first.vote(0, ReportVote(waits=True, requests=True))
    assert first.wait_closed(0, patience_s=0.01) == VoteCount()
    second.vote(0, ReportVote(waits=True, requests=True, has_checkpoint=True))
    tally = second.wait_closed(0)
    assert tally == VoteCount(votes=2, waiting=1, requesting=2, with_checkpoint=1)
    assert not tally.leaves()


def test_an_outcome_that_came_before_the_peers_hung_up_counts() -> None:
    store = dist.HashStore()
    lead = ReportVotes(store, 0, world_size=2)

    def report_and_hang_up() -> None:
        lead.report_outcome(0, ReportOutcome(path="c", leaves=True), ())
        raise GroupError("a peer hung up")

    other = ReportVotes(store, 1, world_size=2, watch=report_and_hang_up)
    assert other.wait_outcome(0) == ReportOutcome(path="c", leaves=True)


def test_a_place_outside_the_group_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="rank 2 of 2"):
        ReportVotes(dist.HashStore(), 2, world_size=2)

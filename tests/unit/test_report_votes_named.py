"""Reports that are named by their place in the run leave nothing in the group's store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from elastic.worker.checkpoint.report_votes import (
    ReportOutcome,
    ReportPart,
    ReportVote,
    ReportVotes,
)
from tests.patience import DEADLINE_S

WORLD_SIZE = 3


def test_the_store_does_not_grow_with_reports_in_a_loop() -> None:
    store = dist.HashStore()
    members = [ReportVotes(store, rank, world_size=WORLD_SIZE) for rank in range(WORLD_SIZE)]
    before = store.num_keys()

    def report(votes: ReportVotes, rank: int) -> None:
        for step in range(40):
            where = f"e0-s{step}"
            # Every fourth has a checkpoint, of which two of the members bring a part.
            brings = step % 4 == 0 and rank < 2
            if brings:
                votes.claim(where, "shared")
                votes.add_part(where, ReportPart(rank, "c"))
            votes.vote(where, ReportVote(brings, False, brings), voters=WORLD_SIZE)
            if not brings:
                continue
            tally = votes.wait_closed(where)
            assert [part.rank for part in votes.parts(where)] == [0, 1]
            if rank == 0:
                votes.report_outcome(where, ReportOutcome(path=where), ("shared",))
            else:
                assert votes.wait_outcome(where).path == where
            votes.forget(where, tally.with_checkpoint)

    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        calls = [threads.submit(report, member, rank) for rank, member in enumerate(members)]
        for call in calls:
            call.result(DEADLINE_S)
    assert store.num_keys() == before + WORLD_SIZE  # The newest report of each.

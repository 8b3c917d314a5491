"""A journal under test: its store in memory, which can fail, and records to write."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import anyio

from elastic.coord.journal import Journal
from elastic.coord.leadership import LeaderKey, Leadership
from elastic.core.config import JobSpec
from elastic.core.facts import CheckpointRecord, Entry, EntryKind, JobId, JobPhase
from elastic.core.records import JobRecord
from elastic.errors import StoreUnavailable
from elastic.runtime.clock import SystemClock
from elastic.store.interface import CommitResult, Compare, Store, Write
from elastic.store.memory import MemoryStore
from tests.patience import DEADLINE_S

PREFIX = "test"
TTL_S = 0.3


class Weak(MemoryStore):
    """A store in memory that can fail: before a commit takes effect, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_before = 0
        self.fail_after = 0
        self.commits: list[tuple[Write, ...]] = []

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        if self.fail_before:
            self.fail_before -= 1
            raise StoreUnavailable("no answer")
        result = await super().commit(compares, writes)
        self.commits.append(tuple(writes))
        if self.fail_after:
            self.fail_after -= 1
            raise StoreUnavailable("the answer was lost")
        return result


def holder(name: str) -> LeaderKey:
    return LeaderKey(name, f"{name}:7070", 1, name)


async def leading_journal(store: Store, name: str = "a") -> Journal:
    """A journal whose coordinator leads."""
    leadership = Leadership(store, PREFIX, holder(name), SystemClock())
    with anyio.fail_after(DEADLINE_S):
        await leadership.acquire(lambda _: None)
    return Journal(store, PREFIX, leadership)


def record(job_id: str = "j-1", payload: bytes = b"", **changes: object) -> JobRecord:
    entry = Entry(EntryKind.FUNCTION, "train", payload=payload)
    spec = JobSpec(job_id=JobId(job_id), name=job_id, entry=entry, min_workers=1, max_workers=2)
    return replace(JobRecord(spec, JobPhase.PENDING), **changes)  # type: ignore[arg-type]


def checkpoints(number: int) -> tuple[CheckpointRecord, ...]:
    # Of text that does not compress away, and no record is like another.
    return tuple(
        CheckpointRecord(
            f"/runs/{index}", 1, index, hashlib.sha256(str(index).encode()).hexdigest()
        )
        for index in range(number)
    )

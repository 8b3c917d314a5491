"""A store inside this process: a blocking engine behind the asyncio interface of all stores.

Rule: the engine is called by one thread, one call at a time. Code common to memory and file is
here: leases, watches, and notifying watches. There are no background tasks: every call first ends
the leases that have expired.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from elastic.store.interface import Change, CommitResult, Compare, Lease, StoreSnapshot, Write
from elastic.store.rules import (
    check_commit,
    check_compaction,
    check_from_revision,
    check_lease_id,
    check_ttl,
    closed,
    encode_prefix,
)

SHORTEST_WAIT_S = 0.005
"""Minimum wait of a watch for a lease's end: clocks and timers do not agree exactly."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class HistoryPage:
    """A part of the history: complete up to `next_revision` (exclusive)."""

    changes: tuple[Change, ...]
    next_revision: int


class StorageEngine(Protocol):
    """Interface of an engine, which stores the entries.

    All methods may block; the caller has validated the arguments.

    Attributes:
        revision: of the last change; read by other threads.
    """

    revision: int

    def read(self, prefix: str) -> StoreSnapshot:
        """Return the entries under a prefix."""
        ...

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult: ...

    def history(self, prefix: str, from_revision: int) -> HistoryPage:
        """Return changes since a revision; raises Compacted."""
        ...

    def compact(self, revision: int) -> None:
        """Drop changes older than a revision."""
        ...

    def grant_lease(self, ttl_s: float) -> int:
        """Create a lease and return its id, never used before."""
        ...

    def leases(self) -> tuple[Lease, ...]: ...

    def end_lease(self, lease_id: int) -> None:
        """End a lease, unless it has ended, and delete its keys at one revision."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class ChangeSignal:
    """Wakes watches that wait for a new revision, or for the close."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self._woken = asyncio.Event()

    def advance(self, revision: int) -> None:
        """Wake all if the revision has increased."""
        if revision > self.revision:
            self.revision = revision
            self.wake()

    def wake(self) -> None:
        """Wake all present waiters."""
        self._woken.set()
        self._woken = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for a wake-up, at most this long; None for no limit."""
        try:
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        except asyncio.TimeoutError:
            return


class LocalStore:
    """A `Store` on an engine of this process."""

    def __init__(
        self,
        engine: StorageEngine,
        *,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take ownership of an engine; leases stored in it start with their full time again.

        Args:
            engine: closed with this store.
            executor: its one thread calls the engine, and has created it; None for an engine that
                never blocks.
            clock: monotonic seconds, for leases only.
        """
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._closed = False
        self._adopted = False
        self._signal = ChangeSignal(engine.revision)
        # When each lease ends unless it is renewed, by `clock`; and its time in seconds.
        self._deadlines: dict[int, float] = {}
        self._ttls: dict[int, float] = {}

    async def read(self, prefix: str) -> StoreSnapshot:
        """Return all entries whose key starts with `prefix`."""
        encode_prefix(prefix)
        await self.expire_leases()
        return await self._run(partial(self._engine.read, prefix))

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Apply all writes if all comparisons hold."""
        check_commit(compares, writes)
        await self.expire_leases()
        return await self._run(partial(self._engine.commit, tuple(compares), tuple(writes)))

    async def grant_lease(self, ttl_s: float) -> Lease:
        check_ttl(ttl_s)
        lease_id = await self._run(partial(self._engine.grant_lease, ttl_s))
        self._begin(Lease(lease_id, ttl_s))
        return Lease(lease_id, ttl_s)

    async def renew_lease(self, lease_id: int) -> bool:
        """Renew the lease; False if it has ended already."""
        check_lease_id(lease_id)
        await self.expire_leases()
        if lease_id not in self._deadlines:
            return False
        self._begin(Lease(lease_id, self._ttls[lease_id]))
        return True

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease now and delete its keys."""
        check_lease_id(lease_id)
        await self._run(partial(self._engine.end_lease, lease_id))
        self._deadlines.pop(lease_id, None)
        self._ttls.pop(lease_id, None)

    async def expire_leases(self) -> None:
        """End every expired lease; the other methods call this first."""
        if self._closed:
            raise closed()
        await self._adopt_leases()
        now = self._clock()
        due = sorted(lease_id for lease_id, until in self._deadlines.items() if until <= now)
        for lease_id in due:
            await self.revoke_lease(lease_id)

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        """Yield every change under `prefix` since `from_revision`.

        A watch holds one page of history; one that is slower than compaction raises Compacted.
        """
        check_from_revision(from_revision)
        encode_prefix(prefix)
        next_revision = from_revision
        while True:
            await self.expire_leases()
            page = await self._run(partial(self._engine.history, prefix, next_revision))
            for change in page.changes:
                yield change
            next_revision = page.next_revision
            while self._signal.revision < next_revision:
                if self._closed:
                    raise closed()
                await self._signal.wait(self._until_next_deadline_s())
                await self.expire_leases()

    async def compact(self, revision: int) -> None:
        """Drop history older than `revision`."""
        await self.expire_leases()
        check_compaction(revision, self._engine.revision)
        await self._run(partial(self._engine.compact, revision))

    async def close(self) -> None:
        """Close the engine, after queued calls; watches end with an error."""
        if self._closed:
            return
        self._closed = True
        self._signal.wake()
        await self._perform(self._engine.close)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _adopt_leases(self) -> None:
        """Start the time of leases that the engine has stored for an earlier process."""
        if self._adopted:
            return
        for lease in await self._run(self._engine.leases):
            if lease.lease_id not in self._deadlines:
                self._begin(lease)
        self._adopted = True

    def _begin(self, lease: Lease) -> None:
        self._ttls[lease.lease_id] = lease.ttl_s
        self._deadlines[lease.lease_id] = self._clock() + lease.ttl_s

    def _until_next_deadline_s(self) -> float | None:
        if not self._deadlines:
            return None
        return max(min(self._deadlines.values()) - self._clock(), SHORTEST_WAIT_S)

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        if self._closed:
            raise closed()
        return await self._perform(call)

    async def _perform(self, call: Callable[[], Answer]) -> Answer:
        """Call the engine, then wake watches, even if the caller was cancelled meanwhile."""
        if self._executor is None:
            answer = call()
            self._signal.advance(self._engine.revision)
            return answer
        running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        running.add_done_callback(self._performed)
        # Shielded: a running commit cannot be stopped, only its caller cancelled.
        return await asyncio.shield(running)

    def _performed(self, running: asyncio.Future[Answer]) -> None:
        if not running.cancelled():
            # Retrieve the exception, for cancelled callers; waiting callers get it as well.
            running.exception()
        self._signal.advance(self._engine.revision)

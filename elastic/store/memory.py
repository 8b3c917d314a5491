"""The store in memory: for `memory:`, whose state ends with the process, and for tests.

Rule: it differs from the other stores in durability only; the same contract tests run on all.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence

from elastic.errors import Compacted
from elastic.store.interface import (
    Change,
    ChangeKind,
    CommitResult,
    Compare,
    Entry,
    Lease,
    StoreSnapshot,
    Write,
)
from elastic.store.local import HistoryPage, LocalStore
from elastic.store.rules import deletion, plan_commit


def memory_store(clock: Callable[[], float] = time.monotonic) -> LocalStore:
    """Return an empty store that lives as long as the object.

    Args:
        clock: monotonic seconds, for leases.
    """
    return LocalStore(MemoryEngine(), clock=clock)


class MemoryEngine:
    """Entries and their history in plain containers."""

    def __init__(self) -> None:
        """Start empty, at revision 1, as etcd does."""
        self.revision = 1
        self._entries: dict[str, Entry] = {}
        # Oldest first; a change's revision is the mod_revision of its entry.
        self._history: list[Change] = []
        self._oldest = 1
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0

    def read(self, prefix: str) -> StoreSnapshot:
        """Return the entries under a prefix, by a scan of all keys, which are few."""
        found = (self._entries[key] for key in sorted(self._entries) if key.startswith(prefix))
        return StoreSnapshot(tuple(found), self.revision)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        plan = plan_commit(
            compares,
            writes,
            lookup=self._entries.get,
            lease_exists=self._leases.__contains__,
            revision=self.revision,
        )
        if isinstance(plan, CommitResult):
            return plan
        self._apply(plan)
        return CommitResult(True, self.revision)

    def history(self, prefix: str, from_revision: int) -> HistoryPage:
        """Return all changes since a revision."""
        if from_revision < self._oldest:
            raise Compacted(from_revision, self._oldest)
        start = bisect.bisect_left(self._history, from_revision, key=_revision)
        found = (change for change in self._history[start:] if change.entry.key.startswith(prefix))
        return HistoryPage(tuple(found), max(from_revision, self.revision + 1))

    def compact(self, revision: int) -> None:
        """Drop changes older than a revision."""
        self._oldest = max(self._oldest, revision)
        del self._history[: bisect.bisect_left(self._history, revision, key=_revision)]

    def grant_lease(self, ttl_s: float) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = Lease(self._last_lease, ttl_s)
        return self._last_lease

    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def end_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys."""
        if self._leases.pop(lease_id, None) is None:
            return
        keys = sorted(key for key, entry in self._entries.items() if entry.lease == lease_id)
        if keys:
            self._apply(tuple(deletion(key, self.revision + 1) for key in keys))

    def close(self) -> None:
        """Do nothing: there is no file."""

    def _apply(self, changes: tuple[Change, ...]) -> None:
        self.revision += 1
        for change in changes:
            if change.kind is ChangeKind.PUT:
                self._entries[change.entry.key] = change.entry
            else:
                del self._entries[change.entry.key]
        self._history.extend(changes)


def _revision(change: Change) -> int:
    return change.entry.mod_revision

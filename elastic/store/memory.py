"""The store in memory: for `memory:`, whose state ends with the process, and for tests.

Rule: it differs from the other stores in durability only; the same contract tests run on all.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.store.interface import CommitResult, Compare, Delete, Entry, StoreSnapshot, Write
from elastic.store.rules import check_commit, closed, encode_prefix, refusal


class MemoryStore:
    """A `Store` in a dict; it begins empty, at revision 1, as etcd does."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = 1
        self._is_closed = False

    async def read(self, prefix: str) -> StoreSnapshot:
        """Return the entries under a prefix, by a scan of all keys, which are few."""
        self._check_open()
        encode_prefix(prefix)
        found = (self._entries[key] for key in sorted(self._entries) if key.startswith(prefix))
        return StoreSnapshot(tuple(found), self._revision)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        self._check_open()
        check_commit(compares, writes)
        if refused := refusal(compares, self._entries.get, self._revision):
            return refused
        self._revision += 1
        for write in writes:
            if isinstance(write, Delete):
                self._entries.pop(write.key, None)
            else:
                self._entries[write.key] = Entry(write.key, write.value, self._revision)
        return CommitResult(True, self._revision)

    async def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()

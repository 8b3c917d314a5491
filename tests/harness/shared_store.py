"""A store in memory that several coordinators of a test share, as they do an etcd."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from elastic.store.interface import CommitResult, Compare, Lease, Put, StoreSnapshot, Write
from elastic.store.memory import MemoryStore
from elastic.store.rules import lease_ended


class SharedMemoryStore(MemoryStore):
    """Leases beside the entries; one that is due ends at the next call."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._ends_s: dict[int, tuple[float, float]] = {}
        self.lease_of: dict[str, int] = {}

    async def read(self, prefix: str) -> StoreSnapshot:
        await self._end_due()
        return await super().read(prefix)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        await self._end_due()
        leases = {w.key: w.lease for w in writes if isinstance(w, Put) and w.lease}
        if ended := [lease for lease in leases.values() if lease not in self._ends_s]:
            raise lease_ended(ended)
        result = await super().commit(compares, writes)
        if result.committed:
            self.lease_of.update(leases)
        return result

    async def grant_lease(self, ttl_s: float) -> Lease:
        lease = Lease(next(self._numbers), ttl_s)
        self._ends_s[lease.lease_id] = ttl_s, time.monotonic() + ttl_s
        return lease

    async def renew_lease(self, lease_id: int) -> bool:
        await self._end_due()
        if lease_id not in self._ends_s:
            return False
        ttl_s, _ = self._ends_s[lease_id]
        self._ends_s[lease_id] = ttl_s, time.monotonic() + ttl_s
        return True

    async def revoke_lease(self, lease_id: int) -> None:
        self._ends_s.pop(lease_id, None)
        for key in [key for key, lease in self.lease_of.items() if lease == lease_id]:
            del self.lease_of[key]
            self._entries.pop(key, None)
            self._revision += 1

    async def _end_due(self) -> None:
        now_s = time.monotonic()
        for lease_id in [one for one, (_, end_s) in self._ends_s.items() if end_s <= now_s]:
            await self.revoke_lease(lease_id)

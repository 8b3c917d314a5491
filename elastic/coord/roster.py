"""The addresses of all coordinators of one store, as entries in that store.

Rule: an entry is a hint for clients that have lost the leader; only the leader key decides who
leads. An entry expires some time after its coordinator ends. While the store does not answer, the
result of the last read is used.

Keys, under the journal's prefix:

    coordinators/LIFE    address of the coordinator with this random id, under its own lease
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from elastic.coord.leadership import LeaderKey
from elastic.errors import ElasticError
from elastic.runtime.rpc import ADDRESSES_MAX, plain_addresses
from elastic.store.interface import Compare, Entry, Lease, Put, SharedStore

log = logging.getLogger(__name__)

ENTRY_TTL_S = 15.0
"""Longer than a restart takes, so that a restart does not change the addresses twice."""
POLL_S = 3.0


class Roster:
    """Maintains one coordinator's entry, and reads those of the others."""

    def __init__(
        self,
        store: SharedStore,
        prefix: str,
        holder: LeaderKey,
        on_read: Callable[[tuple[str, ...]], None],
    ) -> None:
        """Write no entry yet.

        Args:
            store: shared by the coordinators.
            prefix: of all keys.
            holder: this coordinator.
            on_read: called after each read with all addresses, including this one's.
        """
        self._store = store
        self._prefix = f"{prefix}/coordinators/"
        self._holder = holder
        self._on_read = on_read
        self._lease: Lease | None = None
        self._is_entered = False

    async def keep(self) -> None:
        """Renew the entry and read those of the others; never returns."""
        while True:
            try:
                await self._enter()
                entries = (await self._store.read(self._prefix)).entries
                self._on_read(addresses_of(entries, self._holder.address))
            except ElasticError as error:
                log.debug("roster_not_read error=%r", str(error))
            await anyio.sleep(POLL_S)

    async def _enter(self) -> None:
        """Renew the entry's lease; if it has expired, write the entry under a new one."""
        if self._lease is not None and not await self._store.renew_lease(self._lease.lease_id):
            self._lease, self._is_entered = None, False
        if self._lease is None:
            self._lease = await self._store.grant_lease(ENTRY_TTL_S)
        if not self._is_entered:
            put = Put(
                self._prefix + self._holder.nonce, self._holder.encode(), self._lease.lease_id
            )
            # If it exists, an earlier attempt succeeded and its reply was lost.
            await self._store.commit([Compare(put.key, 0)], [put])
            self._is_entered = True


def addresses_of(entries: tuple[Entry, ...], own: str) -> tuple[str, ...]:
    """Return the sorted addresses, without those that are not valid in a header.

    Args:
        entries: of the roster.
        own: this coordinator's address, which is kept if there are too many.
    """
    known: dict[str, None] = {}
    for address in (own, *sorted(LeaderKey.decode(entry.value).address for entry in entries)):
        if good := plain_addresses(address):
            known[good[0]] = None
    return tuple(sorted(list(known)[:ADDRESSES_MAX]))

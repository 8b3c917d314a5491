"""The store on an etcd cluster: for several coordinators, and for state that outlives a machine.

Rule: reads and lease requests are idempotent and retried; commits are not, and `etcd_commit`
handles them. No state is kept here that the cluster does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import grpc

from elastic.errors import ConfigError, StoreError
from elastic.store.etcd_commit import EtcdCommitter, is_granted_already, new_lease_id
from elastic.store.etcd_link import TOTAL_S, EtcdAccess, EtcdLink, EtcdRefusal
from elastic.store.etcd_read import read_range
from elastic.store.etcd_wire import DEFAULT_ROOT, GRANT, KEEP_ALIVE, REVOKE, KeySpace
from elastic.store.interface import CommitResult, Compare, Lease, StoreSnapshot, Write
from elastic.store.rules import check_commit
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

RENEW_TRY_S = 0.5
"""Timeout of one renewal: leases last seconds, and a frozen member must not use them up."""


class EtcdStore:
    """A `SharedStore` on etcd 3.4 or newer.

    etcd 3.5.0 to 3.5.2 may lose consistency when a member crashes; use 3.4.22, 3.5.6 or newer.

    Attributes:
        root: first part of all its keys.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        root: str = DEFAULT_ROOT,
        access: EtcdAccess | Callable[[], EtcdAccess] | None = None,
        total_s: float = TOTAL_S,
    ) -> None:
        """Open no connection yet: each call waits for a cluster that is unavailable.

        Args:
            endpoints: "host:port" of the members' client addresses.
            root: first part of all keys; two stores with the same root are the same store.
            access: user and certificates, if the servers require them; or a function that returns
                the present ones, a new object when they were renewed.
            total_s: seconds until a call without a reply raises StoreUnavailable.

        Raises:
            ConfigError: no endpoint was given.
        """
        if not endpoints:
            raise ConfigError("an etcd store has no endpoints; expected host:port of its members")
        self.root = root
        given = access or EtcdAccess()
        current = (lambda: given) if isinstance(given, EtcdAccess) else given
        self._link = EtcdLink(endpoints, current, total_s=total_s)
        self._keys = KeySpace(root)
        self._committer = EtcdCommitter(self._link, self._keys)

    async def read(self, prefix: str) -> StoreSnapshot:
        """Return all entries whose key starts with `prefix`; a linearizable read.

        Any amount: it is read in pages, each with its own timeout.
        """
        try:
            kvs, revision = await read_range(self._link, *self._keys.range(prefix))
        except EtcdRefusal as refusal:
            raise _unexpected("read", refusal) from None
        return StoreSnapshot(tuple(self._keys.entry(kv) for kv in kvs), revision)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        check_commit(compares, writes)
        return await self._committer.commit(tuple(compares), tuple(writes))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Create a lease of whole seconds; etcd may grant more, depending on its election time."""
        request = pb.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=new_lease_id())
        try:
            answer = await self._link.repeat(GRANT, request, "lease grant")
        except EtcdRefusal as refusal:
            if is_granted_already(refusal):
                return Lease(request.ID, float(request.TTL))
            raise _unexpected("lease grant", refusal) from None
        return Lease(answer.ID, float(answer.TTL))

    async def renew_lease(self, lease_id: int) -> bool:
        request = pb.LeaseKeepAliveRequest(ID=lease_id)
        try:
            # A stream of etcd's, which answers each message: one message is a call like others.
            answer = await self._link.repeat(
                KEEP_ALIVE, request, "lease renewal", try_s=RENEW_TRY_S
            )
        except EtcdRefusal as refusal:
            raise _unexpected("lease renewal", refusal) from None
        return answer.TTL > 0

    async def revoke_lease(self, lease_id: int) -> None:
        try:
            await self._link.repeat(REVOKE, pb.LeaseRevokeRequest(ID=lease_id), "lease revocation")
        except EtcdRefusal as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise _unexpected("lease revocation", refusal) from None

    async def close(self) -> None:
        """Remove this client's marker and close all connections."""
        await self._committer.close()
        await self._link.close()


def _unexpected(what: str, refusal: EtcdRefusal) -> StoreError:
    return StoreError(f"etcd refuses a {what}: {refusal}; compare its version and its limits")

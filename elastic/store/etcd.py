"""The store on an etcd cluster: for several coordinators, and for state that outlives a machine.

Rule: reads and lease requests are idempotent and retried; commits are not, and `etcd_commit`
handles them. No state is kept here that the cluster does not have.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc
import grpc.aio

from elastic.errors import ConfigError, StoreError, UsageError
from elastic.store.etcd_commit import EtcdCommitter, is_granted_already, new_lease_id
from elastic.store.etcd_link import TOTAL_S, EtcdAccess, EtcdLink, EtcdRefusal, RequestUnanswered
from elastic.store.etcd_read import read_range
from elastic.store.etcd_watch import watch_prefix
from elastic.store.etcd_wire import (
    COMPACT,
    DEFAULT_ROOT,
    GRANT,
    KEEP_ALIVE,
    REVOKE,
    KeySpace,
)
from elastic.store.interface import Change, CommitResult, Compare, Lease, StoreSnapshot, Write
from elastic.store.rules import (
    check_commit,
    check_from_revision,
    check_lease_id,
    check_ttl,
    encode_prefix,
)
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

RENEW_TRY_S = 0.5
"""Timeout of one renewal: leases last seconds, and a frozen member must not use them up."""


class EtcdStore:
    """A `Store` on etcd 3.4 or newer.

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
        """Apply all writes if all comparisons hold; at most once."""
        check_commit(compares, writes)
        return await self._committer.commit(tuple(compares), tuple(writes))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Create a lease of whole seconds; etcd may grant more, depending on its election time."""
        check_ttl(ttl_s)
        request = pb.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=new_lease_id())
        try:
            answer = await self._link.repeat(GRANT, request, "lease grant")
        except EtcdRefusal as refusal:
            if is_granted_already(refusal):
                return Lease(request.ID, float(request.TTL))
            raise _unexpected("lease grant", refusal) from None
        return Lease(answer.ID, float(answer.TTL))

    async def renew_lease(self, lease_id: int) -> bool:
        """Renew the lease; False if it has ended already."""
        check_lease_id(lease_id)
        patience = self._link.patience("lease renewal")
        while True:
            try:
                return await self._renew_once(lease_id, min(RENEW_TRY_S, patience.try_s()))
            except RequestUnanswered as error:
                await patience.pause(error)
            except EtcdRefusal as refusal:
                raise _unexpected("lease renewal", refusal) from None

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease now and delete its keys."""
        check_lease_id(lease_id)
        try:
            await self._link.repeat(REVOKE, pb.LeaseRevokeRequest(ID=lease_id), "lease revocation")
        except EtcdRefusal as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise _unexpected("lease revocation", refusal) from None

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        """Yield every change under `prefix` since `from_revision`."""
        check_from_revision(from_revision)
        encode_prefix(prefix)
        return watch_prefix(self._link, self._keys, prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Drop history older than `revision`, of the whole cluster, including other users' keys."""
        if revision <= 2:
            # An empty etcd is at revision 1: there is no older history.
            return
        # etcd's compaction at r drops the changes of r too; ours keeps those of `revision`.
        request = pb.CompactionRequest(revision=revision - 1)
        try:
            await self._link.repeat(COMPACT, request, "compaction")
        except EtcdRefusal as refusal:
            if refusal.code is not grpc.StatusCode.OUT_OF_RANGE:
                raise _unexpected("compaction", refusal) from None
            if "future" in refusal.details:
                raise UsageError(
                    f"history before revision {revision} cannot be forgotten: {refusal.details}"
                ) from None

    async def close(self) -> None:
        """Remove this client's marker and close all connections."""
        await self._committer.close()
        await self._link.close()

    async def _renew_once(self, lease_id: int, timeout_s: float) -> bool:
        """Renew on a new stream, so that there is no stream to restore after a failure."""
        async with self._link.stream(KEEP_ALIVE, timeout_s) as (call, index):
            try:
                await call.write(pb.LeaseKeepAliveRequest(ID=lease_id))
                answer = await call.read()
            except grpc.aio.AioRpcError as error:
                raise self._link.judged(error, index) from None
            except asyncio.InvalidStateError as error:
                raise self._link.unanswered(index, repr(error)) from None
            finally:
                call.cancel()
        if not isinstance(answer, pb.LeaseKeepAliveResponse):
            raise self._link.unanswered(index, "the server ended the stream")
        return answer.TTL > 0


def _unexpected(what: str, refusal: EtcdRefusal) -> StoreError:
    return StoreError(f"etcd refuses a {what}: {refusal}; compare its version and its limits")

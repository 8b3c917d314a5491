"""Commits on etcd that take effect at most once, even if replies are lost.

Rule: each client has a marker, a key of its own, and every transaction compares and rewrites it
beside the caller's writes. After a lost reply, reading the marker shows the outcome:

- it holds the name of that try: the try took effect, at the revision of the marker;
- it does not: the try has not taken effect yet. Rewriting the marker (a fence, itself a
  comparison) ensures that it never will, even if a frozen server still holds the request.

    try n:   if marker == m and the caller's comparisons hold: write, marker := "try n"
    fence n: if marker == m: marker := "fence n", else return its value

The marker has a lease, and is replaced by a new one long before that ends; a transaction that
compares a deleted marker has no effect.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from elastic.errors import ElasticError, StoreError, StoreUnavailable
from elastic.store.etcd_link import EtcdLink, EtcdRefusal, RequestUnanswered, RetryBudget
from elastic.store.etcd_wire import GRANT, REVOKE, TXN, KeySpace, put, read, unchanged
from elastic.store.interface import CommitResult, Compare, Put, Write
from elastic.store.rules import lease_ended
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

MARKER_TTL_S = 3600
MARKER_AGE_MAX_S = 1800.0
"""Half of its lease: the marker never expires during a commit, which takes seconds at most."""


@dataclass
class ClientMarker:
    """This client's key on the server.

    Attributes:
        key: on the server.
        lease: id of its lease.
        created_s: monotonic seconds, taken before the lease was granted.
        mod_revision: last known.
    """

    key: bytes
    lease: int
    created_s: float
    mod_revision: int


class EtcdCommitter:
    """Executes one commit at a time; others wait for their turn."""

    def __init__(self, link: EtcdLink, keys: KeySpace) -> None:
        """Write nothing yet; the first commit creates the marker."""
        self._link = link
        self._keys = keys
        self._turn = asyncio.Lock()
        self._marker: ClientMarker | None = None
        # Name of the try whose outcome is unknown, of this commit or of an earlier failed one.
        self._unsettled: bytes | None = None
        self._count = 0

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Apply all writes if all comparisons hold; see `Store.commit`."""
        patience = self._link.patience("commit")
        async with self._turn:
            tried: bytes | None = None
            while True:
                marker, revision = await self._ready_marker(patience, tried)
                if revision is not None:
                    return CommitResult(True, revision)
                tried = self._unsettled = self._name("try")
                request = self._request(marker, tried, compares, writes)
                try:
                    answer = await self._link.once(TXN, request, patience.try_s())
                except RequestUnanswered as error:
                    await patience.pause(error)
                    continue
                except EtcdRefusal as refusal:
                    self._unsettled = None
                    raise _explained(refusal, writes) from None
                self._unsettled = None
                if answer.succeeded:
                    marker.mod_revision = answer.header.revision
                    return CommitResult(True, answer.header.revision)
                at = _mod_revision(answer.responses[0])
                if at == marker.mod_revision:
                    current = self._keys.found(answer.responses[1:])
                    return CommitResult(False, answer.header.revision, current)
                # Another program deleted or changed our marker: retry with a new one.
                self._marker = None

    async def close(self) -> None:
        """Delete the marker; if that fails, its lease deletes it later."""
        marker, self._marker = self._marker, None
        if marker is None:
            return
        try:
            await self._link.once(REVOKE, pb.LeaseRevokeRequest(ID=marker.lease), 1.0)
        except (RequestUnanswered, EtcdRefusal, ElasticError):
            return

    async def _ready_marker(
        self, patience: RetryBudget, tried: bytes | None
    ) -> tuple[ClientMarker, int | None]:
        """Return a marker that no lost try can still match.

        Also returns the revision at which the lost try took effect, if it did and is `tried`, this
        commit's own.
        """
        marker = self._marker
        if marker is not None and self._unsettled is not None:
            lost = self._unsettled
            revision = await self._settle(marker, lost, patience)
            if revision is not None and lost == tried:
                return marker, revision
            if self._marker is None and lost == tried:
                raise StoreUnavailable(
                    f"the answer to a commit was lost, and then {marker.key!r}, the key that "
                    f"would show its outcome; somebody removed it; read the keys anew"
                )
        old = marker is not None and time.monotonic() - marker.created_s > MARKER_AGE_MAX_S
        if self._marker is None or old:
            self._marker = await self._make_marker(patience)
        return self._marker, None

    async def _settle(self, marker: ClientMarker, lost: bytes, patience: RetryBudget) -> int | None:
        """Determine the outcome of a lost try, and prevent it from taking effect later.

        Returns the revision at which it took effect; None if it never will, or if the marker was
        deleted (then it is forgotten here) and the outcome cannot be known.
        """
        fence = self._name("fence")
        request = pb.TxnRequest(
            compare=[unchanged(marker.key, marker.mod_revision)],
            success=[put(marker.key, fence, marker.lease)],
            failure=[read(marker.key)],
        )
        answer = await self._repeat_txn(request, patience)
        self._unsettled = None
        if answer.succeeded:
            marker.mod_revision = answer.header.revision
            return None
        if not answer.responses[0].response_range.kvs:
            self._marker = None
            return None
        found = answer.responses[0].response_range.kvs[0]
        marker.mod_revision = found.mod_revision
        return found.mod_revision if found.value == lost else None

    async def _make_marker(self, patience: RetryBudget) -> ClientMarker:
        """Create a marker with a new unique name; idempotent requests, which are retried."""
        self._unsettled = None
        created_s = time.monotonic()
        lease = new_lease_id()
        grant = pb.LeaseGrantRequest(TTL=MARKER_TTL_S, ID=lease)
        while True:
            try:
                await self._link.once(GRANT, grant, patience.try_s())
                break
            except RequestUnanswered as error:
                await patience.pause(error)
            except EtcdRefusal as refusal:
                if not is_granted_already(refusal):
                    raise _explained(refusal, ()) from None
                break
        key = self._keys.marker(secrets.token_hex(8))
        request = pb.TxnRequest(
            compare=[unchanged(key, 0)],
            success=[put(key, b"new", lease)],
            failure=[read(key)],
        )
        answer = await self._repeat_txn(request, patience)
        # An earlier try of this request may have created it.
        at = answer.header.revision if answer.succeeded else _mod_revision(answer.responses[0])
        return ClientMarker(key, lease, created_s, at)

    async def _repeat_txn(self, request: pb.TxnRequest, patience: RetryBudget) -> pb.TxnResponse:
        """Execute an idempotent transaction on the marker alone, with retries."""
        while True:
            try:
                return await self._link.once(TXN, request, patience.try_s())
            except RequestUnanswered as error:
                await patience.pause(error)
            except EtcdRefusal as refusal:
                raise _explained(refusal, ()) from None

    def _request(
        self,
        marker: ClientMarker,
        name: bytes,
        compares: Sequence[Compare],
        writes: Sequence[Write],
    ) -> pb.TxnRequest:
        mine = unchanged(marker.key, marker.mod_revision)
        return pb.TxnRequest(
            compare=[mine, *self._keys.compares(compares)],
            success=[*self._keys.writes(writes), put(marker.key, name, marker.lease)],
            failure=[read(marker.key), *self._keys.reads(compares)],
        )

    def _name(self, kind: str) -> bytes:
        self._count += 1
        return f"{kind} {self._count}".encode()


def new_lease_id() -> int:
    """Return a random lease id; chosen by the client, so that a grant can be retried."""
    return secrets.randbelow(2**63 - 1) + 1


def is_granted_already(refusal: EtcdRefusal) -> bool:
    """Return whether a grant was refused because an earlier try of it took effect."""
    return refusal.code is grpc.StatusCode.FAILED_PRECONDITION and "exists" in refusal.details


def _mod_revision(response: pb.ResponseOp) -> int:
    """Return the mod_revision of the one key that was read, 0 if it does not exist."""
    kvs = response.response_range.kvs
    return int(kvs[0].mod_revision) if kvs else 0


def _explained(refusal: EtcdRefusal, writes: Sequence[Write]) -> Exception:
    """Return the error to raise when etcd refuses a transaction."""
    if refusal.code is grpc.StatusCode.NOT_FOUND and "lease" in refusal.details:
        return lease_ended([w.lease for w in writes if isinstance(w, Put) and w.lease])
    return StoreError(f"etcd refuses a commit: {refusal}; compare its version and its limits")

"""The membership store: the interface of every backend, and its data types.

Rule: a state change is a `commit` with at least one comparison. There is no blind put, because a
put that timed out on a frozen server may take effect later and overwrite newer state. Revisions
order the commits of the whole store, start at 1 and never repeat; a commit gives one revision to
all keys that it changes, and every successful commit increases the revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Entry:
    """One key at a revision.

    Attributes:
        key: UTF-8 path such as "elastic/jobs/j1/group".
        value: opaque bytes.
        mod_revision: revision of the commit that changed it last.
    """

    key: str
    value: bytes
    mod_revision: int


@dataclass(frozen=True)
class StoreSnapshot:
    """Result of a read: entries sorted by key, and the store's revision at that moment."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Compare:
    """Require that the key's mod_revision is `mod_revision`; 0: that it does not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Put:
    """Write `value`; with `lease`, in a `SharedStore`, the key is deleted when that lease ends."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete the key; deleting a missing key changes nothing."""

    key: str


Write = Put | Delete


@dataclass(frozen=True)
class CommitResult:
    """Whether every comparison held and the writes are durable, and the revision afterwards.

    When `committed` is False, `current` holds the present entries of the compared keys (those that
    exist, in the order compared), so that the caller sees which other commit won.
    """

    committed: bool
    revision: int
    current: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Lease:
    """A lease, which ends `ttl_s` seconds after its last renewal.

    `ttl_s` is the granted time: never less than requested; on etcd in whole seconds.
    """

    lease_id: int
    ttl_s: float


class Store(Protocol):
    """A small transactional key-value store.

    All methods raise StoreUnavailable when the backend does not reply within the store's own
    timeout. A store belongs to one event loop.
    """

    async def read(self, prefix: str) -> StoreSnapshot:
        """Return all entries whose key starts with `prefix` (an exact key is its own prefix)."""
        ...

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Apply all writes atomically if all comparisons hold; durable before it returns.

        Idempotency: after an ambiguous failure the backend itself determines whether the commit
        took effect (by re-reading) or raises StoreUnavailable; it never applies a commit twice. A
        commit that raised StoreUnavailable may take effect later, but not after a later commit of
        the same store object has returned.

        Raises:
            UsageError: no comparison was given, a key is written twice, or the commit exceeds the
                limits of some backend (see elastic/store/rules.py).
            Fenced: a put names a lease that has ended; nothing was written.
        """
        ...

    async def close(self) -> None:
        """Release connections and files; the store must not be used afterwards."""
        ...


@runtime_checkable
class SharedStore(Store, Protocol):
    """A store that several processes use at once, which see by leases who is alive."""

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Create a lease; its keys are deleted when it is not renewed for its `ttl_s` seconds.

        They are deleted not before that, and soon after. A store that was restarted, or has a new
        leader, restarts the time of every lease.
        """
        ...

    async def renew_lease(self, lease_id: int) -> bool:
        """Renew the lease; False if it has ended already."""
        ...

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease now and delete its keys; ending an ended lease is no error."""
        ...

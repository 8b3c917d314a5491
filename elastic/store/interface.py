"""The membership store: what every backend answers, and the facts it answers with.

Rule: a state change is a `commit` that compares something. There is no blind put, because a
put that timed out on a frozen server may take effect later and overwrite newer state.
Revisions order the commits of the whole store, begin at 1 and never repeat; a commit that changes
several keys gives them all one revision, and every commit that succeeds raises the revision.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One key as it stood at a revision.

    Attributes:
        key: UTF-8 path such as "elastic/jobs/j1/group".
        value: opaque bytes.
        create_revision: revision of the commit that created the key.
        mod_revision: revision of the commit that changed it last.
        lease: id of the lease that the key dies with, 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class StoreSnapshot:
    """What a read saw: entries sorted by key, and the store's revision at that moment."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Compare:
    """Hold the key's mod_revision against `mod_revision`; 0 means the key must not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Put:
    """Write `value`; with `lease` the key is deleted when that lease ends."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Remove the key; removing a key that is not there changes nothing."""

    key: str


Write = Put | Delete


@dataclass(frozen=True)
class CommitResult:
    """Whether every comparison held and the writes are durable, and the revision afterwards.

    When `committed` is False, `current` holds the compared keys as they really are (those that
    exist, in the order compared), so that the caller can tell who was faster.
    """

    committed: bool
    revision: int
    current: tuple[Entry, ...] = ()


class ChangeKind(Enum):
    """What a watch saw happen to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True)
class Change:
    """One key changed.

    A deletion carries an entry with the key and the deletion's mod_revision; its value is empty,
    its create_revision and lease are 0.
    """

    kind: ChangeKind
    entry: Entry


@dataclass(frozen=True)
class Lease:
    """The right to be counted alive for `ttl_s` seconds after the last renewal.

    `ttl_s` is what the store granted: never less than what was asked, on etcd whole seconds.
    """

    lease_id: int
    ttl_s: float


class Store(Protocol):
    """A small transactional, watchable key-value store.

    All methods raise StoreUnavailable when the backend does not answer within the store's own
    deadline. A store belongs to one event loop.
    """

    async def read(self, prefix: str) -> StoreSnapshot:
        """Return all entries whose key starts with `prefix` (an exact key is its own prefix)."""
        ...

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Apply all writes atomically if all comparisons hold; durable before it returns.

        Idempotency: after an ambiguous failure the backend itself finds out whether the commit
        took place (by re-reading) or raises StoreUnavailable; it never applies twice. A commit
        that ended in StoreUnavailable may take effect later, but not after a later commit of
        the same store object was answered.

        Raises:
            UsageError: no comparison was given, a key is written twice, or the commit is larger
                than every backend takes (elastic/store/rules.py has the limits).
            Fenced: a put names a lease that has ended; nothing was written.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Create a lease; its keys vanish when it was not renewed for its `ttl_s` seconds.

        They vanish not before that, and soon after. A store that was restarted, or has a new
        leader, counts the time of every lease anew.

        Raises:
            UsageError: `ttl_s` is not a positive number.
        """
        ...

    async def renew_lease(self, lease_id: int) -> bool:
        """Renew; False when the lease has ended already."""
        ...

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease now and delete its keys; ending an ended lease is no error."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        """Yield every change under `prefix` with mod revision >= `from_revision`, in order, once.

        Survives reconnects without loss or repetition, and waits for as long as the backend is
        away. Changes of one revision come in the order of its writes. To follow what was read,
        watch from the snapshot's revision + 1. Close it (`contextlib.aclosing`) when done.

        Raises:
            Compacted: history since `from_revision`, or since the last change yielded before a
                reconnect, is not kept any more: read anew.
            UsageError: `from_revision` is below 1.
            StoreUnavailable: this store was closed.
        """
        ...

    async def compact(self, revision: int) -> None:
        """Forget history older than `revision`; current entries stay. Repeating it is no error.

        Raises:
            UsageError: `revision` lies more than one past the present one.
        """
        ...

    async def close(self) -> None:
        """Release connections and files; the store must not be used afterwards."""
        ...

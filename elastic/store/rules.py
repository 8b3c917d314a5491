"""What all stores share: which requests are refused, and what a commit changes.

Rule: pure functions of facts. The limits are those of an etcd server with default options, and
hold for every store, so that what works on one machine works on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from elastic.errors import Fenced, StoreUnavailable, UsageError
from elastic.store.interface import (
    Change,
    ChangeKind,
    CommitResult,
    Compare,
    Delete,
    Entry,
    Put,
    Write,
)

OPERATIONS_MAX = 120
"""Comparisons, and writes, of one commit. etcd allows 128; the client needs some itself."""
COMMIT_BYTES_MAX = 1024 * 1024
"""Keys and values of one commit. etcd refuses requests above 1.5 MiB."""
LEASE_TTL_MAX_S = 9_000_000_000.0
"""etcd's own limit."""
NUMBER_MAX = 2**63 - 1
"""Revisions and leases are 64-bit integers with sign, in files and on the wire."""


def encode_key(key: str) -> bytes:
    """Return the key as stores hold it.

    Raises:
        UsageError: the key is empty, or is no valid Unicode.
    """
    if not key:
        raise UsageError("a key is empty; expected a path such as 'elastic/jobs/j1'")
    return encode_prefix(key)


def encode_prefix(prefix: str) -> bytes:
    """Return a prefix of keys in their encoding; the empty one stands for all keys.

    Raises:
        UsageError: the prefix is no valid Unicode.
    """
    try:
        return prefix.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"key {prefix!r} cannot be encoded as UTF-8: {error.reason}") from None


def end_of_prefix(prefix: bytes) -> bytes | None:
    """Return the first key after all that start with `prefix`, None if there is no such key."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def check_commit(compares: Sequence[Compare], writes: Sequence[Write]) -> None:
    """Refuse a commit that some store could not do, or that would be a blind write.

    Raises:
        UsageError: says what is wrong and what is expected.
    """
    if not compares:
        raise UsageError(
            "a commit without a comparison may overwrite newer state when it is delayed; compare "
            "the mod_revision of a key, 0 if it must not exist"
        )
    for name, number in (("comparisons", len(compares)), ("writes", len(writes))):
        if number > OPERATIONS_MAX:
            raise UsageError(f"a commit has {number} {name}, at most {OPERATIONS_MAX} are possible")
    for compare in compares:
        encode_key(compare.key)
        if not 0 <= compare.mod_revision <= NUMBER_MAX:
            raise UsageError(
                f"key {compare.key!r} is compared with revision {compare.mod_revision}; expected "
                f"its mod_revision, or 0 if it must not exist"
            )
    written: dict[str, None] = {}
    size = 0
    for write in writes:
        size += len(encode_key(write.key))
        if write.key in written:
            raise UsageError(f"key {write.key!r} is written twice in one commit; write it once")
        written[write.key] = None
        if isinstance(write, Put):
            size += len(write.value)
            if write.lease:
                check_lease_id(write.lease)
    if size > COMMIT_BYTES_MAX:
        raise UsageError(
            f"a commit has {size} bytes of keys and values, at most {COMMIT_BYTES_MAX} are "
            f"possible; split what need not change at once"
        )


def check_ttl(ttl_s: float) -> None:
    """Refuse a lease time that is no time.

    Raises:
        UsageError: not a finite number of seconds above 0 and within etcd's limit.
    """
    if not math.isfinite(ttl_s) or not 0 < ttl_s <= LEASE_TTL_MAX_S:
        raise UsageError(f"a lease of {ttl_s} s is not possible; expected more than 0 seconds")


def check_lease_id(lease_id: int) -> None:
    """Refuse what no store has ever given out as a lease.

    Raises:
        UsageError: outside 1 to 2**63 - 1.
    """
    if not 1 <= lease_id <= NUMBER_MAX:
        raise UsageError(f"{lease_id} is no lease; expected the lease_id that a grant returned")


def check_from_revision(from_revision: int) -> None:
    """Refuse a watch from before the first revision.

    Raises:
        UsageError: below 1, or above what a revision can be.
    """
    if not 1 <= from_revision <= NUMBER_MAX:
        raise UsageError(
            f"a watch from revision {from_revision} is not possible; revisions begin at 1, to "
            f"follow a snapshot watch from its revision + 1"
        )


def check_compaction(revision: int, present: int) -> None:
    """Refuse to forget what has not happened yet.

    Raises:
        UsageError: `revision` lies more than one past the present one.
    """
    if revision > present + 1:
        raise UsageError(
            f"history before revision {revision} cannot be forgotten, the store is at {present}"
        )


def lease_ended(lease_ids: Sequence[int]) -> Fenced:
    """Return what a commit raises that names a lease which is over."""
    named = ", ".join(str(lease_id) for lease_id in lease_ids)
    return Fenced(
        f"a commit names lease {named}, which has ended or never was; nothing was written; its "
        f"holder counts as gone and must begin anew with a new lease"
    )


def closed() -> StoreUnavailable:
    """Return what every call raises after `close`."""
    return StoreUnavailable("this store was closed by its own process; open it anew")


def plan_commit(
    compares: Sequence[Compare],
    writes: Sequence[Write],
    *,
    lookup: Callable[[str], Entry | None],
    lease_exists: Callable[[int], bool],
    revision: int,
) -> CommitResult | tuple[Change, ...]:
    """Work out what a commit does to a store that is at `revision`.

    Args:
        compares: what must hold.
        writes: what then changes.
        lookup: a key's present entry.
        lease_exists: whether a lease is still on.
        revision: the store's present one; changes get the next.

    Returns:
        The refusal if a comparison does not hold, else the changes to be made, in order.

    Raises:
        Fenced: a put names a lease that has ended.
    """
    found = [(compare, lookup(compare.key)) for compare in compares]
    if any(
        compare.mod_revision != (entry.mod_revision if entry else 0) for compare, entry in found
    ):
        return CommitResult(False, revision, tuple(entry for _, entry in found if entry))
    ended = [
        w.lease for w in writes if isinstance(w, Put) and w.lease and not lease_exists(w.lease)
    ]
    if ended:
        raise lease_ended(ended)
    changes = []
    for write in writes:
        old = lookup(write.key)
        if isinstance(write, Delete):
            if old is not None:
                changes.append(deletion(write.key, revision + 1))
            continue
        created = old.create_revision if old is not None else revision + 1
        entry = Entry(write.key, write.value, created, revision + 1, write.lease)
        changes.append(Change(ChangeKind.PUT, entry))
    return tuple(changes)


def deletion(key: str, revision: int) -> Change:
    """Return the change that removes a key at a revision."""
    return Change(ChangeKind.DELETE, Entry(key, b"", 0, revision))

"""Common rules of all stores: which requests are refused, and what a commit changes.

Rule: pure functions. The limits are those of an etcd server with default options, and apply to
every store, so that code which works on one machine works on a cluster.
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
"""Comparisons, and writes, in one commit. etcd allows 128; the client itself needs some."""
COMMIT_BYTES_MAX = 1024 * 1024
"""Keys and values of one commit. etcd refuses requests above 1.5 MiB."""
LEASE_TTL_MAX_S = 9_000_000_000.0
"""etcd's own limit."""
NUMBER_MAX = 2**63 - 1
"""Revisions and leases are signed 64-bit integers, in files and on the wire."""


def encode_key(key: str) -> bytes:
    """Return the key in UTF-8, as stores hold it.

    Raises:
        UsageError: the key is empty, or not valid Unicode.
    """
    if not key:
        raise UsageError("a key is empty; expected a path such as 'elastic/jobs/j1'")
    return encode_prefix(key)


def encode_prefix(prefix: str) -> bytes:
    """Return a prefix of keys in UTF-8; the empty one matches all keys.

    Raises:
        UsageError: the prefix is not valid Unicode.
    """
    try:
        return prefix.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"key {prefix!r} cannot be encoded as UTF-8: {error.reason}") from None


def end_of_prefix(prefix: bytes) -> bytes | None:
    """Return the exclusive end of the range of keys with `prefix`, None if it is unbounded."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def check_commit(compares: Sequence[Compare], writes: Sequence[Write]) -> None:
    """Refuse a commit that exceeds the limits of some store, or would be a blind write.

    Raises:
        UsageError: with the problem and what is expected.
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
    """Refuse an invalid lease time.

    Raises:
        UsageError: not a finite number of seconds above 0 and within etcd's limit.
    """
    if not math.isfinite(ttl_s) or not 0 < ttl_s <= LEASE_TTL_MAX_S:
        raise UsageError(f"a lease of {ttl_s} s is not possible; expected more than 0 seconds")


def check_lease_id(lease_id: int) -> None:
    """Refuse a number that no store grants as a lease id.

    Raises:
        UsageError: outside 1 to 2**63 - 1.
    """
    if not 1 <= lease_id <= NUMBER_MAX:
        raise UsageError(f"{lease_id} is no lease; expected the lease_id that a grant returned")


def check_from_revision(from_revision: int) -> None:
    """Refuse a watch from before the first revision.

    Raises:
        UsageError: below 1, or above 2**63 - 1.
    """
    if not 1 <= from_revision <= NUMBER_MAX:
        raise UsageError(
            f"a watch from revision {from_revision} is not possible; revisions begin at 1, to "
            f"follow a snapshot watch from its revision + 1"
        )


def check_compaction(revision: int, present: int) -> None:
    """Refuse a compaction at a future revision.

    Raises:
        UsageError: `revision` is more than one past the present one.
    """
    if revision > present + 1:
        raise UsageError(
            f"history before revision {revision} cannot be forgotten, the store is at {present}"
        )


def lease_ended(lease_ids: Sequence[int]) -> Fenced:
    """Return the error of a commit that names an ended lease."""
    named = ", ".join(str(lease_id) for lease_id in lease_ids)
    return Fenced(
        f"a commit names lease {named}, which has ended or never was; nothing was written; its "
        f"holder counts as gone and must begin anew with a new lease"
    )


def closed() -> StoreUnavailable:
    """Return the error of every call after `close`."""
    return StoreUnavailable("this store was closed by its own process; open it anew")


def plan_commit(
    compares: Sequence[Compare],
    writes: Sequence[Write],
    *,
    lookup: Callable[[str], Entry | None],
    lease_exists: Callable[[int], bool],
    revision: int,
) -> CommitResult | tuple[Change, ...]:
    """Compute the changes of a commit to a store that is at `revision`.

    Args:
        compares: comparisons that must hold.
        writes: applied if all of them hold.
        lookup: returns a key's present entry.
        lease_exists: whether a lease has not ended.
        revision: the store's present one; changes get the next.

    Returns:
        The refusal if a comparison does not hold, otherwise the changes to make, in order.

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
    return Change(ChangeKind.DELETE, Entry(key, b"", 0, revision))

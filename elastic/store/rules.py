"""Common rules of all stores: which requests are refused.

Rule: pure functions. The limits are those of an etcd server with default options, and apply to
every store, so that code which works on one machine works on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.errors import Fenced, StoreUnavailable, UsageError
from elastic.store.interface import CommitResult, Compare, Entry, Put, Write

OPERATIONS_MAX = 120
"""Comparisons, and writes, in one commit. etcd allows 128; the client itself needs some."""
COMMIT_BYTES_MAX = 1024 * 1024
"""Keys and values of one commit. etcd refuses requests above 1.5 MiB."""


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
    written: dict[str, None] = {}
    size = 0
    for write in writes:
        size += len(encode_key(write.key))
        if write.key in written:
            raise UsageError(f"key {write.key!r} is written twice in one commit; write it once")
        written[write.key] = None
        if isinstance(write, Put):
            size += len(write.value)
    if size > COMMIT_BYTES_MAX:
        raise UsageError(
            f"a commit has {size} bytes of keys and values, at most {COMMIT_BYTES_MAX} are "
            f"possible; split what need not change at once"
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


def refusal(
    compares: Sequence[Compare], lookup: Callable[[str], Entry | None], revision: int
) -> CommitResult | None:
    """Return the result of a commit of which a comparison does not hold, None if all do."""
    found = [(compare, lookup(compare.key)) for compare in compares]
    if all(
        compare.mod_revision == (entry.mod_revision if entry else 0) for compare, entry in found
    ):
        return None
    return CommitResult(False, revision, tuple(entry for _, entry in found if entry))

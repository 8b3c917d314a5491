"""What every store does, whichever it is: the same tests in memory, in a file, and on etcd."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from elastic.errors import Fenced, StoreUnavailable, UsageError
from elastic.store.etcd import EtcdStore
from elastic.store.interface import (
    CommitResult,
    Compare,
    Delete,
    Entry,
    Put,
    SharedStore,
    Store,
    Write,
)
from elastic.store.open import open_store
from elastic.store.rules import COMMIT_BYTES_MAX, OPERATIONS_MAX
from tests.etcd_server import EtcdServer
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio

NEVER = 1 << 40
"""A revision that no test reaches."""

roots = (f"contract{number}" for number in itertools.count())


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    url = {"memory": "memory:", "sqlite": f"sqlite:{tmp_path / 'coord.db'}"}.get(request.param, "")
    if request.param == "etcd":
        url = request.getfixturevalue("etcd").url(next(roots))
    opened = await open_store(url)
    yield opened
    await opened.close()


async def create(store: Store, *writes: Put) -> int:
    """Write new keys; returns the revision."""
    result = await store.commit([Compare(write.key, 0) for write in writes], writes)
    assert result.committed
    return result.revision


async def change(store: Store, revision: int, write: Write) -> int:
    """Change one key that is at `revision`; returns the new one."""
    result = await store.commit([Compare(write.key, revision)], [write])
    assert result.committed
    return result.revision


async def wait_gone(store: Store, key: str) -> None:
    """Wait until a key is not there any more."""
    with anyio.fail_after(DEADLINE_S):
        while (await store.read(key)).entries:  # noqa: ASYNC110 (a read is what ends it)
            await anyio.sleep(0.02)


# ------------------------------------------------------------------------------------------- read


async def test_an_empty_store_has_a_revision_and_no_entries(store: Store) -> None:
    snapshot = await store.read("")
    assert snapshot.entries == ()
    assert snapshot.revision >= 1


async def test_a_new_key_is_read_back_with_the_revision_of_its_commit(store: Store) -> None:
    revision = await create(store, Put("jobs/j1", b"\x00\xff"))
    snapshot = await store.read("jobs/j1")
    assert snapshot.entries == (Entry("jobs/j1", b"\x00\xff", revision),)
    assert snapshot.revision >= revision


async def test_a_prefix_finds_what_starts_with_it_sorted_by_key(store: Store) -> None:
    names = ["a", "a/", "a/b", "a/\U0010ffff", "a/é", "a0", "b", "\U0010ffff", "\U0010ffffx", "A"]
    await create(store, *(Put(name, b"") for name in names))

    async def found(prefix: str) -> list[str]:
        return [entry.key for entry in (await store.read(prefix)).entries]

    assert await found("") == sorted(names)
    assert await found("a") == ["a", "a/", "a/b", "a/é", "a/\U0010ffff", "a0"]
    assert await found("a/") == ["a/", "a/b", "a/é", "a/\U0010ffff"]
    assert await found("\U0010ffff") == ["\U0010ffff", "\U0010ffffx"]
    assert await found("c") == []


@pytest.mark.parametrize("size", [0, 1, 512 * 1024])
async def test_values_of_any_size_come_back_as_they_were(store: Store, size: int) -> None:
    value = bytes(index % 251 for index in range(size))
    await create(store, Put("k", value))
    assert (await store.read("k")).entries[0].value == value


# ----------------------------------------------------------------------------------------- commit


async def test_a_key_that_must_not_exist_is_created_once(store: Store) -> None:
    revision = await create(store, Put("k", b"first"))
    result = await store.commit([Compare("k", 0)], [Put("k", b"second")])
    assert result == CommitResult(False, revision, (Entry("k", b"first", revision),))
    assert (await store.read("k")).entries[0].value == b"first"


async def test_of_many_comparisons_one_that_fails_stops_all_writes(store: Store) -> None:
    first = await create(store, Put("b", b"1"))
    second = await create(store, Put("a", b"2"))
    result = await store.commit(
        [Compare("b", first), Compare("gone", 0), Compare("a", first)],
        [Put("b", b"x"), Put("new", b"x"), Delete("a")],
    )
    assert not result.committed
    # What was compared and exists, in the order compared.
    assert result.current == (Entry("b", b"1", first), Entry("a", b"2", second))
    assert [(e.key, e.value) for e in (await store.read("")).entries] == [("a", b"2"), ("b", b"1")]


async def test_keys_written_together_share_one_revision(store: Store) -> None:
    revision = await create(store, Put("a", b"1"), Put("b", b"2"))
    entries = (await store.read("")).entries
    assert [entry.mod_revision for entry in entries] == [revision, revision]


async def test_a_key_is_changed_deleted_and_created_again(store: Store) -> None:
    created = await create(store, Put("k", b"1"))
    changed = await change(store, created, Put("k", b"2"))
    assert (await store.read("k")).entries == (Entry("k", b"2", changed),)
    gone = await change(store, changed, Delete("k"))
    assert (await store.read("k")).entries == ()
    again = await change(store, 0, Put("k", b"3"))
    assert (await store.read("k")).entries == (Entry("k", b"3", again),)
    assert created < changed < gone < again


async def test_every_commit_that_succeeds_raises_the_revision(store: Store) -> None:
    revision = (await store.read("")).revision
    for writes in ([Put("k", b"1")], [Delete("nothing")], []):
        result = await store.commit([Compare("other", 0)], writes)
        assert result.committed
        assert result.revision > revision
        assert (await store.read("")).revision >= result.revision
        revision = result.revision


async def test_one_commit_may_compare_and_write_as_much_as_the_limit_says(store: Store) -> None:
    keys = [f"k{number:03}" for number in range(OPERATIONS_MAX)]
    await create(store, *(Put(key, b"v" * 1000) for key in keys))
    assert [entry.key for entry in (await store.read("k")).entries] == keys


MANY = [f"k{number}" for number in range(OPERATIONS_MAX + 1)]
ILLEGAL: list[tuple[str, list[Compare], list[Write], str]] = [
    ("nothing compared", [], [Put("k", b"")], "without a comparison"),
    ("a key put twice", [Compare("k", 0)], [Put("k", b"1"), Put("k", b"2")], "written twice"),
    ("a key put and deleted", [Compare("k", 0)], [Put("k", b""), Delete("k")], "written twice"),
    ("an empty key compared", [Compare("", 0)], [], "key is empty"),
    ("an empty key written", [Compare("k", 0)], [Put("", b"")], "key is empty"),
    ("an empty key deleted", [Compare("k", 0)], [Delete("")], "key is empty"),
    ("half a character", [Compare("\ud800", 0)], [], "UTF-8"),
    ("too many comparisons", [Compare(key, 0) for key in MANY], [], "121 comparisons"),
    ("too many writes", [Compare("k", 0)], [Delete(key) for key in MANY], "121 writes"),
    ("too large", [Compare("k", 0)], [Put("k", bytes(COMMIT_BYTES_MAX))], "split"),
]


@pytest.mark.parametrize(
    ("compares", "writes", "words"), [row[1:] for row in ILLEGAL], ids=[row[0] for row in ILLEGAL]
)
async def test_an_illegal_commit_is_refused_and_writes_nothing(
    store: Store, compares: list[Compare], writes: list[Write], words: str
) -> None:
    before = await store.read("")
    with pytest.raises(UsageError, match=words):
        await store.commit(compares, writes)
    assert await store.read("") == before


async def test_concurrent_writers_count_exactly_as_often_as_they_were_told(store: Store) -> None:
    revision = await create(store, Put("n", b"0"))

    async def add(times: int) -> None:
        entry = Entry("n", b"0", revision)
        while times:
            value = str(int(entry.value) + 1).encode()
            result = await store.commit([Compare("n", entry.mod_revision)], [Put("n", value)])
            if result.committed:
                times -= 1
                entry = Entry("n", value, result.revision)
            else:
                (entry,) = result.current

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(add, 5)
    assert (await store.read("n")).entries[0].value == b"40"


async def test_a_commit_whose_caller_gave_up_leaves_the_store_in_order(store: Store) -> None:
    await create(store, Put("k", b"0"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.commit([Compare("k", NEVER)], [Put("k", b"1")])
    async with anyio.create_task_group() as group:
        group.start_soon(store.commit, [Compare("a", 0)], [Put("a", b"1")])
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    # Whether it took place or not, the next one knows.
    result = await store.commit([Compare("a", 0)], [Put("a", b"2")])
    value = (await store.read("a")).entries[0].value
    assert value == (b"2" if result.committed else b"1")


# ----------------------------------------------------------------------------------------- leases


@pytest.fixture
async def shared(etcd: EtcdServer) -> AsyncIterator[SharedStore]:
    """The one kind of store that has leases."""
    opened = EtcdStore([etcd.endpoint], root=next(roots))
    yield opened
    await opened.close()


@pytest.mark.etcd
async def test_keys_of_a_lease_that_is_not_renewed_vanish(shared: SharedStore) -> None:
    lease = await shared.grant_lease(0.3)
    assert lease.ttl_s >= 0.3
    await create(shared, Put("a", b"", lease.lease_id), Put("b", b"", lease.lease_id))
    await create(shared, Put("c", b""))
    await wait_gone(shared, "a")
    assert [entry.key for entry in (await shared.read("")).entries] == ["c"]
    assert not await shared.renew_lease(lease.lease_id)


@pytest.mark.etcd
async def test_a_lease_that_is_renewed_lives_on(shared: SharedStore) -> None:
    """Beside one that is not: it is there as long as the other one, and goes when renewals end."""
    renewed, other = await shared.grant_lease(2.0), await shared.grant_lease(2.0)
    await create(shared, Put("k", b"", renewed.lease_id), Put("other", b"", other.lease_id))
    while (await shared.read("other")).entries:
        assert await shared.renew_lease(renewed.lease_id)
    assert (await shared.read("k")).entries
    await wait_gone(shared, "k")


@pytest.mark.etcd
async def test_a_revoked_lease_takes_its_keys_along_at_once(shared: SharedStore) -> None:
    lease = await shared.grant_lease(60.0)
    await create(shared, Put("k", b"", lease.lease_id))
    revision = await create(shared, Put("again", b"1", lease.lease_id))
    await change(shared, revision, Put("again", b"2"))
    await shared.revoke_lease(lease.lease_id)
    # A key that was written again has left the lease.
    assert [entry.key for entry in (await shared.read("")).entries] == ["again"]
    # Ending what has ended is no error.
    await shared.revoke_lease(lease.lease_id)
    assert not await shared.renew_lease(lease.lease_id)


@pytest.mark.etcd
async def test_a_put_on_a_lease_that_has_ended_is_fenced_and_writes_nothing(
    shared: SharedStore,
) -> None:
    lease = await shared.grant_lease(60.0)
    revision = await create(shared, Put("taken", b""))
    await shared.revoke_lease(lease.lease_id)
    writes = [Put("a", b""), Put("b", b"", lease.lease_id)]
    with pytest.raises(Fenced, match=f"lease {lease.lease_id}"):
        await shared.commit([Compare("a", 0)], writes)
    assert [entry.key for entry in (await shared.read("")).entries] == ["taken"]
    # A comparison that fails says more, and comes first.
    result = await shared.commit([Compare("taken", revision + 1)], writes)
    assert not result.committed
    # And the store is as good as before.
    await create(shared, Put("a", b""))


# ------------------------------------------------------------------------------------------ close


async def test_a_closed_store_says_so(store: Store) -> None:
    await create(store, Put("k", b""))
    for _ in range(2):
        await store.close()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.read(""),
        lambda: store.commit([Compare("a", 0)], []),
    ]
    if isinstance(store, SharedStore):
        calls += [lambda: store.grant_lease(1.0), lambda: store.renew_lease(1)]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed"):
            await call()

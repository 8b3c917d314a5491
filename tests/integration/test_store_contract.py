"""What every store does, whichever it is: the same tests in memory, in a file, and on etcd."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from elastic.errors import Compacted, Fenced, StoreUnavailable, UsageError
from elastic.store.interface import (
    Change,
    ChangeKind,
    CommitResult,
    Compare,
    Delete,
    Entry,
    Put,
    Store,
    Write,
)
from elastic.store.open import open_store
from elastic.store.rules import COMMIT_BYTES_MAX, OPERATIONS_MAX
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


async def take(watch: AsyncGenerator[Change, None], number: int) -> list[Change]:
    """The next changes of a watch, which is closed."""
    with anyio.fail_after(DEADLINE_S):
        async with aclosing(watch):
            return [await anext(watch) for _ in range(number)]


async def wait_gone(store: Store, key: str) -> None:
    """Wait until a key is not there any more."""
    with anyio.fail_after(DEADLINE_S):
        while (await store.read(key)).entries:  # noqa: ASYNC110 (a read is what ends it)
            await anyio.sleep(0.02)


def put(key: str, value: bytes, created: int, changed: int | None = None) -> Change:
    return Change(ChangeKind.PUT, Entry(key, value, created, changed or created))


def deleted(key: str, revision: int) -> Change:
    return Change(ChangeKind.DELETE, Entry(key, b"", 0, revision))


# ------------------------------------------------------------------------------------------- read


async def test_an_empty_store_has_a_revision_and_no_entries(store: Store) -> None:
    snapshot = await store.read("")
    assert snapshot.entries == ()
    assert snapshot.revision >= 1


async def test_a_new_key_is_read_back_with_the_revision_of_its_commit(store: Store) -> None:
    revision = await create(store, Put("jobs/j1", b"\x00\xff"))
    snapshot = await store.read("jobs/j1")
    assert snapshot.entries == (Entry("jobs/j1", b"\x00\xff", revision, revision),)
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
    assert result == CommitResult(False, revision, (Entry("k", b"first", revision, revision),))
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
    assert result.current == (Entry("b", b"1", first, first), Entry("a", b"2", second, second))
    assert [(e.key, e.value) for e in (await store.read("")).entries] == [("a", b"2"), ("b", b"1")]


async def test_keys_written_together_share_one_revision(store: Store) -> None:
    revision = await create(store, Put("a", b"1"), Put("b", b"2"))
    entries = (await store.read("")).entries
    assert [entry.mod_revision for entry in entries] == [revision, revision]


async def test_a_change_keeps_the_creation_and_a_deletion_forgets_it(store: Store) -> None:
    created = await create(store, Put("k", b"1"))
    changed = await change(store, created, Put("k", b"2"))
    assert (await store.read("k")).entries == (Entry("k", b"2", created, changed),)
    gone = await change(store, changed, Delete("k"))
    assert (await store.read("k")).entries == ()
    again = await change(store, 0, Put("k", b"3"))
    assert (await store.read("k")).entries == (Entry("k", b"3", again, again),)
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
    ("revision below 0", [Compare("k", -1)], [], "revision -1"),
    ("revision above 64 bits", [Compare("k", 1 << 63)], [], "mod_revision"),
    ("lease below 0", [Compare("k", 0)], [Put("k", b"", -1)], "no lease"),
    ("lease above 64 bits", [Compare("k", 0)], [Put("k", b"", 1 << 63)], "no lease"),
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
        entry = Entry("n", b"0", revision, revision)
        while times:
            value = str(int(entry.value) + 1).encode()
            result = await store.commit([Compare("n", entry.mod_revision)], [Put("n", value)])
            if result.committed:
                times -= 1
                entry = Entry("n", value, revision, result.revision)
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


async def test_keys_of_a_lease_that_is_not_renewed_vanish_and_a_watch_sees_it(
    store: Store,
) -> None:
    lease = await store.grant_lease(0.3)
    assert lease.ttl_s >= 0.3
    revision = await create(store, Put("a", b"", lease.lease_id), Put("b", b"", lease.lease_id))
    await create(store, Put("c", b""))
    assert (await store.read("a")).entries[0].lease == lease.lease_id
    changes = await take(store.watch("", revision + 2), 2)
    gone = changes[0].entry.mod_revision
    assert changes == [deleted("a", gone), deleted("b", gone)]
    assert [entry.key for entry in (await store.read("")).entries] == ["c"]
    assert not await store.renew_lease(lease.lease_id)


async def test_a_lease_ends_also_when_nobody_watches(store: Store) -> None:
    lease = await store.grant_lease(0.3)
    await create(store, Put("k", b"", lease.lease_id))
    await wait_gone(store, "k")


async def test_a_lease_that_is_renewed_lives_on(store: Store) -> None:
    """Beside one that is not: it is there as long as the other one, and goes when renewals end."""
    renewed, other = await store.grant_lease(2.0), await store.grant_lease(2.0)
    await create(store, Put("k", b"", renewed.lease_id), Put("other", b"", other.lease_id))
    while (await store.read("other")).entries:
        assert await store.renew_lease(renewed.lease_id)
    assert (await store.read("k")).entries
    await wait_gone(store, "k")


async def test_a_revoked_lease_takes_its_keys_along_at_once(store: Store) -> None:
    lease = await store.grant_lease(60.0)
    revision = await create(store, Put("k", b"", lease.lease_id))
    await store.revoke_lease(lease.lease_id)
    assert (await store.read("k")).entries == ()
    assert await take(store.watch("", revision), 2) == [
        Change(ChangeKind.PUT, Entry("k", b"", revision, revision, lease.lease_id)),
        deleted("k", revision + 1),
    ]
    # Ending what has ended is no error.
    await store.revoke_lease(lease.lease_id)
    assert not await store.renew_lease(lease.lease_id)


async def test_a_key_written_again_leaves_its_lease(store: Store) -> None:
    lease = await store.grant_lease(60.0)
    revision = await create(store, Put("k", b"1", lease.lease_id))
    await change(store, revision, Put("k", b"2"))
    await store.revoke_lease(lease.lease_id)
    assert (await store.read("k")).entries[0].value == b"2"


async def test_a_put_on_a_lease_that_has_ended_is_fenced_and_writes_nothing(store: Store) -> None:
    lease = await store.grant_lease(60.0)
    revision = await create(store, Put("taken", b""))
    await store.revoke_lease(lease.lease_id)
    writes = [Put("a", b""), Put("b", b"", lease.lease_id)]
    with pytest.raises(Fenced, match=f"lease {lease.lease_id}"):
        await store.commit([Compare("a", 0)], writes)
    assert [entry.key for entry in (await store.read("")).entries] == ["taken"]
    # A comparison that fails says more, and comes first.
    result = await store.commit([Compare("taken", revision + 1)], writes)
    assert not result.committed
    # And the store is as good as before.
    await create(store, Put("a", b""))


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e12])
async def test_a_lease_of_no_time_is_refused(store: Store, ttl_s: float) -> None:
    with pytest.raises(UsageError, match="lease of"):
        await store.grant_lease(ttl_s)


@pytest.mark.parametrize("lease_id", [0, -1, 1 << 63])
async def test_what_is_no_lease_is_refused(store: Store, lease_id: int) -> None:
    with pytest.raises(UsageError, match="no lease"):
        await store.renew_lease(lease_id)
    with pytest.raises(UsageError, match="no lease"):
        await store.revoke_lease(lease_id)


# ---------------------------------------------------------------------------------------- watches


async def test_a_watch_tells_the_past_and_then_what_happens(store: Store) -> None:
    before = await create(store, Put("j/0", b"before"))
    first = await create(store, Put("j/1", b"1"), Put("other", b""), Put("j/0/x", b"2"))
    second = await change(store, first, Put("j/1", b"3"))
    watch = store.watch("j/", before + 1)
    async with aclosing(watch):
        with anyio.fail_after(DEADLINE_S):
            past = [await anext(watch) for _ in range(3)]
            assert past == [
                put("j/1", b"1", first),
                put("j/0/x", b"2", first),
                put("j/1", b"3", first, second),
            ]
            await create(store, Put("unrelated", b""))
            third = await change(store, second, Delete("j/1"))
            assert await anext(watch) == deleted("j/1", third)
            fourth = await create(store, Put("j/1", b"4"))
            assert await anext(watch) == put("j/1", b"4", fourth)


async def test_a_watch_that_waits_is_woken_by_a_change(store: Store) -> None:
    revision = (await store.read("")).revision
    seen: list[Change] = []

    async def follow() -> None:
        seen.extend(await take(store.watch("k", revision + 1), 1))

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        created = await create(store, Put("k", b"1"))
    assert seen == [put("k", b"1", created)]


async def test_all_watches_see_the_same_in_the_same_order(store: Store) -> None:
    start = (await store.read("")).revision + 1
    seen: list[list[Change]] = []

    async def follow() -> None:
        seen.append(await take(store.watch("", start), 40))

    async def write(name: str) -> None:
        for number in range(10):
            await create(store, Put(f"{name}/{number}", b""))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(follow)
        for name in "abcd":
            group.start_soon(write, name)
    assert seen[0] == seen[1] == seen[2]
    revisions = [change.entry.mod_revision for change in seen[0]]
    assert revisions == sorted(set(revisions))


async def test_a_watch_that_is_read_late_has_missed_nothing(store: Store) -> None:
    start = (await store.read("")).revision + 1
    watch = store.watch("", start)
    revision = await create(store, Put("k", b"0"))
    async with aclosing(watch):
        assert (await anext(watch)).entry.value == b"0"
        for number in range(1, 1201):
            # Few bytes, many changes: more than any page or buffer on the way.
            revision = await change(store, revision, Put("k", str(number).encode()))
        with anyio.fail_after(DEADLINE_S):
            values = [int((await anext(watch)).entry.value) for _ in range(1200)]
    assert values == list(range(1, 1201))


async def test_a_watch_from_the_future_begins_there(store: Store) -> None:
    revision = await create(store, Put("k", b"0"))
    watch = store.watch("k", revision + 2)
    revision = await change(store, revision, Put("k", b"1"))
    last = await change(store, revision, Put("k", b"2"))
    assert await take(watch, 1) == [put("k", b"2", revision - 1, last)]


@pytest.mark.parametrize("revision", [0, -1, 1 << 63])
async def test_a_watch_from_what_is_no_revision_is_refused(store: Store, revision: int) -> None:
    with pytest.raises(UsageError, match=f"revision {revision}"):
        await take(store.watch("", revision), 1)


# ------------------------------------------------------------------------------------- compaction


async def test_compaction_forgets_history_and_keeps_entries(store: Store) -> None:
    first = await create(store, Put("a", b"1"), Put("b", b"1"))
    second = await change(store, first, Put("a", b"2"))
    gone = await change(store, second, Delete("a"))
    last = await change(store, first, Put("b", b"2"))
    await store.compact(gone)
    assert (await store.read("")).entries == (Entry("b", b"2", first, last),)
    for revision in (first, second):
        with pytest.raises(Compacted) as refused:
            await take(store.watch("", revision), 1)
        assert (refused.value.requested, refused.value.oldest) == (revision, gone)
    # History from the compacted revision on is whole, that of a deletion as well.
    expected = [deleted("a", gone), put("b", b"2", first, last)]
    assert await take(store.watch("", gone), 2) == expected
    # Once more, or less far, is no error and brings nothing back.
    await store.compact(gone)
    await store.compact(second)
    with pytest.raises(Compacted):
        await take(store.watch("", second), 1)
    assert await take(store.watch("", gone), 2) == expected


async def test_compaction_does_not_disturb_a_watch_that_is_up_to_date(store: Store) -> None:
    revision = await create(store, Put("k", b"0"))
    watch = store.watch("k", revision)
    async with aclosing(watch):
        with anyio.fail_after(DEADLINE_S):
            await anext(watch)
            await store.compact(revision + 1)
            last = await change(store, revision, Put("k", b"1"))
            assert await anext(watch) == put("k", b"1", revision, last)


async def test_the_future_cannot_be_forgotten(store: Store) -> None:
    revision = await create(store, Put("k", b""))
    with pytest.raises(UsageError, match="cannot be forgotten"):
        await store.compact(revision + 2)
    await store.compact(revision + 1)


# ------------------------------------------------------------------------------------------ close


async def test_a_closed_store_says_so(store: Store) -> None:
    revision = await create(store, Put("k", b""))
    lease = await store.grant_lease(60.0)
    ended: list[str] = []

    async def follow() -> None:
        with pytest.raises(StoreUnavailable) as raised:
            await take(store.watch("k", revision + 1), 1)
        ended.append(str(raised.value))

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await anyio.wait_all_tasks_blocked()
            await store.close()
        await store.close()
    assert "closed" in ended[0]
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.read(""),
        lambda: store.commit([Compare("a", 0)], []),
        lambda: store.grant_lease(1.0),
        lambda: store.renew_lease(lease.lease_id),
        lambda: store.revoke_lease(lease.lease_id),
        lambda: store.compact(revision),
        lambda: take(store.watch("", 1), 1),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed"):
            await call()

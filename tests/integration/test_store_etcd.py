"""The etcd store beside an independent client, and when answers, members and markers get lost."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import etcd3
import etcd3.etcdrpc
import grpc.aio
import pytest

from elastic.errors import StoreError, StoreUnavailable
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Compare, Delete, Entry, Put, Store
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb
from tests.etcd_server import EtcdServer
from tests.patience import DEADLINE_S
from tests.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

roots = (f"alone{number}" for number in itertools.count())


@asynccontextmanager
async def opened(*endpoints: str, root: str, total_s: float = 10.0) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(endpoints, root=root, total_s=total_s)
    try:
        with anyio.fail_after(3 * DEADLINE_S):
            yield store
    finally:
        await store.close()


@pytest.fixture
def root() -> str:
    return next(roots)


@pytest.fixture
def other(etcd: EtcdServer) -> Iterator[etcd3.Etcd3Client]:
    """The independent client."""
    host, _, port = etcd.endpoint.rpartition(":")
    client = etcd3.client(host=host, port=int(port), timeout=DEADLINE_S)
    yield client
    client.close()


async def value_of(store: Store, key: str) -> bytes | None:
    entries = (await store.read(key)).entries
    return entries[0].value if entries else None


async def wait_value(store: Store, key: str, value: bytes) -> int:
    """Wait until a key has this value; returns its revision."""
    with anyio.fail_after(DEADLINE_S):
        while True:
            entries = (await store.read(key)).entries
            if entries and entries[0].value == value:
                return entries[0].mod_revision
            await anyio.sleep(0.01)


def times_written(other: etcd3.Etcd3Client, root: str, key: str) -> int:
    """How often a key was written since it is there."""
    return int(other.get(f"{root}/data/{key}")[1].version)


# -------------------------------------------------------------------------- an independent client


async def test_what_ours_writes_the_other_client_reads(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with opened(etcd.endpoint, root=root) as store:
        lease = await store.grant_lease(60.0)
        writes = [Put("a", b"\x00\xff", lease.lease_id), Put("é/b", b"")]
        made = await store.commit([Compare("a", 0)], writes)
        value, meta = other.get(f"{root}/data/a")
        assert (value, meta.create_revision, meta.mod_revision) == (
            b"\x00\xff",
            *[made.revision] * 2,
        )
        assert meta.lease_id == lease.lease_id
        assert other.get_lease_info(lease.lease_id).keys == [f"{root}/data/a".encode()]
        pairs = [(value, meta.key.decode()) for value, meta in other.get_prefix(f"{root}/data/")]
        assert sorted(pairs, key=lambda pair: pair[1]) == [
            (b"\x00\xff", f"{root}/data/a"),
            (b"", f"{root}/data/é/b"),
        ]
        removed = await store.commit([Compare("a", made.revision)], [Delete("a")])
        assert other.get(f"{root}/data/a") == (None, None)
        events, cancel = other.watch_prefix(f"{root}/data/", start_revision=made.revision)
        seen = [next(events) for _ in range(3)]
        cancel()
        assert [(type(e).__name__, e.key.decode(), e.mod_revision) for e in seen] == [
            ("PutEvent", f"{root}/data/a", made.revision),
            ("PutEvent", f"{root}/data/é/b", made.revision),
            ("DeleteEvent", f"{root}/data/a", removed.revision),
        ]


async def test_what_the_other_client_writes_ours_reads(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with opened(etcd.endpoint, root=root) as store:
        start = (await store.read("")).revision + 1
        lease = other.lease(60)
        other.put(f"{root}/data/a", b"1", lease=lease)
        done, _ = other.transaction(
            compare=[other.transactions.version(f"{root}/data/a") == 1],
            success=[
                other.transactions.put(f"{root}/data/b", b"2"),
                other.transactions.delete(f"{root}/data/a"),
            ],
            failure=[],
        )
        assert done
        assert (await store.read("")).entries == (Entry("b", b"2", start + 1),)
        assert await store.renew_lease(lease.id)
        await store.revoke_lease(lease.id)
        assert other.get_lease_info(lease.id).TTL == -1
        other.put(f"{root}/data/b", b"3")
        # A blind put of somebody else is a change like any other for our comparisons.
        result = await store.commit([Compare("b", start + 1)], [Put("b", b"4")])
        assert not result.committed
        assert result.current[0].value == b"3"


async def test_two_roots_on_one_server_do_not_see_each_other(etcd: EtcdServer, root: str) -> None:
    async with (
        opened(etcd.endpoint, root=root) as one,
        opened(etcd.endpoint, root=root + "x") as two,
    ):
        for store in (one, two):
            assert (await store.commit([Compare("k", 0)], [Put("k", b"")])).committed
            assert len((await store.read("")).entries) == 1


async def test_clients_that_have_left_leave_no_marker(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with opened(etcd.endpoint, root=root) as store:
        await store.commit([Compare("k", 0)], [Put("k", b"")])
        assert len(list(other.get_prefix(f"{root}/writers/"))) == 1
    assert list(other.get_prefix(f"{root}/writers/")) == []


def test_our_messages_have_the_numbers_and_types_of_etcd() -> None:
    theirs = {
        **etcd3.etcdrpc.rpc_pb2.DESCRIPTOR.message_types_by_name,
        **etcd3.etcdrpc.kv_pb2.DESCRIPTOR.message_types_by_name,
    }
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        for field in message.fields:
            original = theirs[name].fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (
                original.number,
                original.type,
                original.is_repeated,
            ), f"{name}.{field.name}"
        for enum in message.enum_types:
            values = theirs[name].enum_types_by_name[enum.name].values_by_name
            assert {v.name: v.number for v in enum.values} == {
                name: value.number for name, value in values.items()
            }


# -------------------------------------------------------------------------------- what gets lost


async def test_a_commit_whose_answer_is_lost_took_place_once(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with (
        TcpProxy(etcd.endpoint) as proxy,
        opened(proxy.endpoint, root=root) as store,
        opened(etcd.endpoint, root=root) as witness,
    ):
        first = await store.commit([Compare("k", 0)], [Put("k", b"0")])
        proxy.drop_answers = True
        results = []

        async def commit() -> None:
            # The comparison says nothing about what is written: doing it twice would succeed.
            results.append(await store.commit([Compare("k", first.revision)], [Put("log", b"1")]))

        async with anyio.create_task_group() as group:
            group.start_soon(commit)
            applied = await wait_value(witness, "log", b"1")
            proxy.drop_answers = False
            proxy.cut()
        assert results[0].committed
        assert results[0].revision == applied
        assert times_written(other, root, "log") == 1


async def test_a_commit_that_never_arrived_is_sent_again(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with (
        TcpProxy(etcd.endpoint) as proxy,
        opened(proxy.endpoint, root=root) as store,
    ):
        first = await store.commit([Compare("k", 0)], [Put("k", b"0")])
        proxy.hold_requests = True
        async with anyio.create_task_group() as group:
            group.start_soon(store.commit, [Compare("k", first.revision)], [Put("log", b"once")])
            await proxy.wait_held(b"once")
            proxy.hold_requests = False
            proxy.cut()
        assert await value_of(store, "log") == b"once"
        assert times_written(other, root, "log") == 1


async def test_a_request_that_was_overtaken_takes_no_effect_when_it_arrives(
    etcd: EtcdServer, root: str
) -> None:
    async with (
        TcpProxy(etcd.endpoint) as frozen,
        opened(frozen.endpoint, etcd.endpoint, root=root) as store,
        opened(etcd.endpoint, root=root) as witness,
    ):
        first = await store.commit([Compare("k", 0)], [Put("k", b"0")])
        frozen.hold_requests = True
        async with anyio.create_task_group() as group:
            # "k" is compared and not written: the late request would find its comparison true.
            group.start_soon(store.commit, [Compare("k", first.revision)], [Put("log", b"late")])
            await frozen.wait_held(b"late")
            frozen.cut_clients()
        (done,) = (await witness.read("log")).entries
        await witness.commit([Compare("log", done.mod_revision)], [Put("log", b"newer")])
        await frozen.release()
        assert await value_of(witness, "log") == b"newer"


async def test_a_commit_that_was_given_up_is_dead_once_a_later_one_is_answered(
    etcd: EtcdServer, root: str
) -> None:
    async with (
        TcpProxy(etcd.endpoint) as frozen,
        opened(frozen.endpoint, etcd.endpoint, root=root) as store,
    ):
        await store.commit([Compare("k", 0)], [Put("k", b"0")])
        frozen.hold_requests = True
        async with anyio.create_task_group() as group:
            group.start_soon(store.commit, [Compare("x", 0)], [Put("ghost", b"given up")])
            await frozen.wait_held(b"given up")
            group.cancel_scope.cancel()
        frozen.cut_clients()
        assert not (await store.commit([Compare("k", 0)], [])).committed
        await frozen.release()
        assert await value_of(store, "ghost") is None


async def test_a_marker_that_somebody_removed_is_made_anew(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with opened(etcd.endpoint, root=root) as store:
        for number in range(3):
            result = await store.commit([Compare(f"k{number}", 0)], [Put(f"k{number}", b"")])
            assert result.committed
            assert other.delete_prefix(f"{root}/writers/").deleted == 1


async def test_a_lost_answer_and_a_lost_marker_are_not_papered_over(
    etcd: EtcdServer, other: etcd3.Etcd3Client, root: str
) -> None:
    async with (
        TcpProxy(etcd.endpoint) as proxy,
        opened(proxy.endpoint, root=root) as store,
        opened(etcd.endpoint, root=root) as witness,
    ):
        await store.commit([Compare("k", 0)], [Put("k", b"")])
        proxy.drop_answers = True

        async def commit() -> None:
            with pytest.raises(StoreUnavailable, match="read the keys anew"):
                await store.commit([Compare("x", 0)], [Put("x", b"1")])

        async with anyio.create_task_group() as group:
            group.start_soon(commit)
            await wait_value(witness, "x", b"1")
            other.delete_prefix(f"{root}/writers/")
            proxy.drop_answers = False
            proxy.cut()
        assert (await store.commit([Compare("y", 0)], [Put("y", b"")])).committed


async def test_a_cluster_that_is_not_there_is_named_within_the_deadline() -> None:
    async with opened("127.0.0.1:9", "127.0.0.1:10", root="r", total_s=0.5) as store:
        with pytest.raises(StoreUnavailable, match=r"a read within 0.5 s .* majority"):
            await store.read("")
        with pytest.raises(StoreUnavailable, match="lease grant"):
            await store.grant_lease(1.0)
        with pytest.raises(StoreUnavailable, match="whether it took effect is not known"):
            await store.commit([Compare("k", 0)], [])
        with pytest.raises(StoreUnavailable, match="lease renewal"):
            await store.renew_lease(1)


async def test_a_server_that_is_no_etcd_is_named() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with opened(f"127.0.0.1:{port}", root="r") as store:
        with pytest.raises(StoreError, match=f"127.0.0.1:{port} does not know etcd's v3 methods"):
            await store.read("")
        with pytest.raises(StoreError, match="does not know"):
            await store.commit([Compare("k", 0)], [])
    await server.stop(None)


async def test_a_server_is_restarted_and_nothing_is_lost() -> None:
    with EtcdServer() as server:
        async with opened(server.endpoint, root="r") as store:
            revision = (await store.commit([Compare("k", 0)], [Put("k", b"0")])).revision
            lease = await store.grant_lease(30.0)
            for number in (b"1", b"2"):
                server.member.kill()
                server.member.start()
                result = await store.commit([Compare("k", revision)], [Put("k", number)])
                assert result.committed
                revision = result.revision
                assert await value_of(store, "k") == number
            assert await store.renew_lease(lease.lease_id)

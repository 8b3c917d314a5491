"""Reads from etcd of more than one answer can bring: in pages, and all of one revision."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from elastic.errors import StoreUnavailable
from elastic.store.etcd import EtcdStore
from elastic.store.etcd_link import RequestUnanswered
from elastic.store.etcd_wire import RANGE
from elastic.store.interface import Compare, Delete, Put
from tests.etcd_server import EtcdServer
from tests.patience import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

PIECE_BYTES = 512 * 1024
roots = (f"pages{number}" for number in itertools.count())


class Tap:
    """Sees the pages of a store; those larger than the wire brings within a try are lost.

    Attributes:
        pages: entries asked for, and the bytes that came.
        between: called after each page.
    """

    def __init__(self, store: EtcdStore, bytes_max: float = float("inf")) -> None:
        self._once = store._link.once
        self._bytes_max = bytes_max
        self.pages: list[tuple[int, int]] = []
        self.between: Callable[[], Awaitable[None]] | None = None
        store._link.once = self.once  # type: ignore[method-assign]

    async def once(self, method: Any, request: Any, timeout_s: float) -> Any:
        answer = await self._once(method, request, timeout_s)
        if method is not RANGE:
            return answer
        self.pages.append((request.limit, answer.ByteSize()))
        if answer.ByteSize() > self._bytes_max:
            raise RequestUnanswered(f"the wire did not bring {answer.ByteSize()} bytes in time")
        if self.between is not None:
            await self.between()
        return answer


@asynccontextmanager
async def opened(etcd: EtcdServer, root: str) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint], root=root, total_s=2.0)
    try:
        with anyio.fail_after(DEADLINE_S):
            yield store
    finally:
        await store.close()


async def fill(store: EtcdStore, keys: list[str], size: int) -> None:
    together = max(1, min(100, 1_000_000 // size))
    for start in range(0, len(keys), together):
        part = keys[start : start + together]
        await store.commit(
            [Compare(part[0], 0)], [Put(key, key.encode().ljust(size)) for key in part]
        )


def names(number: int) -> list[str]:
    return [f"k/{index:04d}" for index in range(number)]


@pytest.mark.parametrize("mib_in_time", [9, 3])
async def test_more_than_a_try_can_bring_is_read_in_pages(
    etcd: EtcdServer, mib_in_time: int
) -> None:
    async with opened(etcd, next(roots)) as store:
        keys = names(40)
        await fill(store, keys, PIECE_BYTES)
        tap = Tap(store, mib_in_time * 1024 * 1024)
        snapshot = await store.read("k/")
        assert [entry.key for entry in snapshot.entries] == keys
        assert all(
            entry.value == entry.key.encode().ljust(PIECE_BYTES) for entry in snapshot.entries
        )
        # What was too much once is not asked for again and again.
        assert len([size for _, size in tap.pages if size > mib_in_time * 1024 * 1024]) <= 2


async def test_small_records_need_few_requests_and_few_of_them_one(etcd: EtcdServer) -> None:
    async with opened(etcd, next(roots)) as store:
        await fill(store, names(1000), 100)
        tap = Tap(store)
        assert len((await store.read("k/")).entries) == 1000
        assert len(tap.pages) <= 7
        tap.pages.clear()
        assert len((await store.read("k/000")).entries) == 10
        assert not (await store.read("none")).entries
        assert len(tap.pages) == 2


async def test_pages_of_small_entries_before_large_ones_are_given_up_for_smaller_ones(
    etcd: EtcdServer,
) -> None:
    async with opened(etcd, next(roots)) as store:
        await fill(store, names(300), 10)
        await fill(store, [f"l/{index:03d}" for index in range(30)], PIECE_BYTES)
        tap = Tap(store, 9 * 1024 * 1024)
        assert len((await store.read("")).entries) == 330
        assert len(tap.pages) < 12


async def test_a_read_shows_one_revision_whatever_is_written_between_its_pages(
    etcd: EtcdServer,
) -> None:
    root = next(roots)
    async with opened(etcd, root) as store, opened(etcd, root) as writer:
        keys = names(40)
        await fill(store, keys, 10)
        before = await writer.read("k/")

        async def write() -> None:
            tap.between = None
            for key in (keys[2], keys[30]):
                (entry,) = (await writer.read(key)).entries
                await writer.commit([Compare(key, entry.mod_revision)], [Put(key, b"changed")])
            await writer.commit([Compare("k/0035a", 0)], [Put("k/0035a", b"new"), Delete(keys[39])])

        tap = Tap(store)
        tap.between = write
        assert await store.read("k/") == before
        assert len(tap.pages) > 1
        after = await store.read("k/")
        assert after == await writer.read("k/")
        assert after.revision > before.revision


async def test_a_read_whose_revision_is_forgotten_between_its_pages_begins_anew(
    etcd: EtcdServer,
) -> None:
    root = next(roots)
    async with opened(etcd, root) as store, opened(etcd, root) as writer:
        keys = names(40)
        await fill(store, keys, 10)
        numbers = itertools.count()

        async def forget() -> None:
            # etcd forgets what is older than this: the page's revision, too.
            key = f"other/{next(numbers)}"
            revision = (await writer.commit([Compare(key, 0)], [Put(key, b"")])).revision
            etcd.member.ask("/v3/kv/compaction", json.dumps({"revision": revision}).encode())

        async def forget_once() -> None:
            tap.between = None
            await forget()

        tap = Tap(store)
        tap.between = forget_once
        snapshot = await store.read("k/")
        assert [entry.key for entry in snapshot.entries] == keys
        assert snapshot.revision == (await writer.read("k/")).revision
        tap.between = forget
        with pytest.raises(StoreUnavailable, match="who compacts it so often"):
            await store.read("k/")

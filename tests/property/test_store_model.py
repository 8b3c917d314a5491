"""The stores in memory and in a file against a model that a reader checks at a glance."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import Compacted, Fenced
from elastic.store.interface import (
    Change,
    ChangeKind,
    CommitResult,
    Compare,
    Delete,
    Entry,
    Lease,
    Put,
    StoreSnapshot,
    Write,
)
from elastic.store.local import LocalStore
from elastic.store.memory import memory_store
from elastic.store.sqlite import sqlite_store
from tests.effort import examples

KEYS = ["a", "a/", "a/b", "a0", "é", "\U0010ffff"]
PREFIXES = ["", "a", "a/", "é", "z"]
LEASES = 4


@dataclass
class Model:
    """All that a store knows, with nothing clever: every question looks at everything."""

    now: float = 0.0
    revision: int = 1
    oldest: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    leases: dict[int, tuple[float, float]] = field(default_factory=dict)
    granted: int = 0

    def expire(self) -> None:
        for lease_id in sorted(self.leases):
            if self.leases[lease_id][1] <= self.now:
                self.end(lease_id)

    def end(self, lease_id: int) -> None:
        if self.leases.pop(lease_id, None):
            keys = sorted(k for k, entry in self.entries.items() if entry.lease == lease_id)
            if keys:
                self.revision += 1
            for key in keys:
                self.remove(key)

    def remove(self, key: str) -> None:
        del self.entries[key]
        self.history.append(Change(ChangeKind.DELETE, Entry(key, b"", 0, self.revision)))

    def commit(self, compares: list[Compare], writes: list[Write]) -> CommitResult | None:
        """None stands for Fenced."""
        found = [self.entries.get(compare.key) for compare in compares]
        there = [entry.mod_revision if entry else 0 for entry in found]
        if there != [compare.mod_revision for compare in compares]:
            return CommitResult(False, self.revision, tuple(e for e in found if e))
        puts = [write for write in writes if isinstance(write, Put)]
        if any(write.lease and write.lease not in self.leases for write in puts):
            return None
        self.revision += 1
        for write in writes:
            old = self.entries.get(write.key)
            if isinstance(write, Put):
                created = old.create_revision if old else self.revision
                new = Entry(write.key, write.value, created, self.revision, write.lease)
                self.entries[write.key] = new
                self.history.append(Change(ChangeKind.PUT, new))
            elif old:
                self.remove(write.key)
        return CommitResult(True, self.revision)

    def read(self, prefix: str) -> StoreSnapshot:
        keys = sorted(key for key in self.entries if key.startswith(prefix))
        return StoreSnapshot(tuple(self.entries[key] for key in keys), self.revision)

    def since(self, prefix: str, revision: int) -> list[Change] | None:
        """None stands for Compacted."""
        if revision < self.oldest:
            return None
        return [
            change
            for change in self.history
            if change.entry.mod_revision >= revision and change.entry.key.startswith(prefix)
        ]


keys = st.sampled_from(KEYS)
lease_ids = st.integers(1, LEASES)
puts = st.builds(Put, keys, st.binary(max_size=3), st.one_of(st.just(0), lease_ids))
# How far a comparison is from the truth: mostly not at all.
errors = st.sampled_from([0, 0, 0, 0, 1, -1])
commits = st.tuples(
    st.just("commit"),
    st.lists(st.tuples(keys, errors), min_size=1, max_size=3),
    st.lists(st.one_of(puts, st.builds(Delete, keys)), max_size=4, unique_by=lambda w: w.key),
)
operations = st.one_of(
    commits,
    commits,
    st.tuples(st.just("read"), st.sampled_from(PREFIXES)),
    st.tuples(st.just("watch"), st.sampled_from(PREFIXES), st.floats(0, 1)),
    st.tuples(st.just("grant"), st.sampled_from([1.0, 2.5])),
    st.tuples(st.just("renew"), lease_ids),
    st.tuples(st.just("revoke"), lease_ids),
    st.tuples(st.just("later"), st.sampled_from([0.5, 1.0, 2.0])),
    st.tuples(st.just("compact"), st.floats(0, 1)),
    st.tuples(st.just("restart")),
)


def compares_of(model: Model, wanted: list[tuple[str, int]]) -> list[Compare]:
    entries = model.entries
    truth = [(key, entries[key].mod_revision if key in entries else 0) for key, _ in wanted]
    return [
        Compare(key, max(0, revision + error))
        for (key, revision), (_, error) in zip(truth, wanted, strict=True)
    ]


class Checked:
    """The model and one store, side by side."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._model = Model()
        self._store: LocalStore | None = None

    async def open(self) -> None:
        def clock() -> float:
            return self._model.now

        if self._folder is not None:
            self._store = await sqlite_store(self._folder / "coord.db", clock)
        else:
            self._store = memory_store(clock)

    async def close(self) -> None:
        await self.store.close()

    @property
    def store(self) -> LocalStore:
        assert self._store is not None
        return self._store

    async def perform(self, operation: tuple[object, ...]) -> None:
        kind, *arguments = operation
        self._model.expire()
        await getattr(self, f"do_{kind}")(*arguments)

    async def do_commit(self, wanted: list[tuple[str, int]], writes: list[Write]) -> None:
        compares = compares_of(self._model, wanted)
        expected = self._model.commit(compares, writes)
        if expected is None:
            with pytest.raises(Fenced):
                await self.store.commit(compares, writes)
        else:
            assert await self.store.commit(compares, writes) == expected

    async def do_read(self, prefix: str) -> None:
        assert await self.store.read(prefix) == self._model.read(prefix)

    async def do_watch(self, prefix: str, where: float) -> None:
        revision = 1 + round(where * self._model.revision)
        expected = self._model.since(prefix, revision)
        async with aclosing(self.store.watch(prefix, revision)) as watch:
            if expected is None:
                with pytest.raises(Compacted) as refused:
                    await anext(watch)
                assert refused.value.oldest == self._model.oldest
            else:
                assert [await anext(watch) for _ in expected] == expected

    async def do_grant(self, ttl_s: float) -> None:
        model = self._model
        model.granted += 1
        model.leases[model.granted] = (ttl_s, model.now + ttl_s)
        assert await self.store.grant_lease(ttl_s) == Lease(model.granted, ttl_s)

    async def do_renew(self, lease_id: int) -> None:
        model = self._model
        known = lease_id in model.leases
        if known:
            ttl_s, _ = model.leases[lease_id]
            model.leases[lease_id] = (ttl_s, model.now + ttl_s)
        assert await self.store.renew_lease(lease_id) == known

    async def do_revoke(self, lease_id: int) -> None:
        self._model.end(lease_id)
        await self.store.revoke_lease(lease_id)

    async def do_later(self, seconds: float) -> None:
        # What is due before it passes has been ended by everybody: in the same order.
        await self.store.expire_leases()
        self._model.now += seconds

    async def do_compact(self, where: float) -> None:
        revision = round(where * (self._model.revision + 1))
        self._model.oldest = max(self._model.oldest, revision)
        await self.store.compact(revision)

    async def do_restart(self) -> None:
        if self._folder is None:
            return
        await self.store.expire_leases()
        await self.close()
        model = self._model
        for lease_id, (ttl_s, _) in model.leases.items():
            model.leases[lease_id] = (ttl_s, model.now + ttl_s)
        await self.open()
        # A lease's time begins anew with the first look at the store.
        await self.do_read("")


async def check(steps: list[tuple[object, ...]], folder: Path | None) -> None:
    checked = Checked(folder)
    await checked.open()
    try:
        for step in steps:
            await checked.perform(step)
        await checked.perform(("read", ""))
        await checked.perform(("watch", "", 1.0))
    finally:
        await checked.close()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(operations, max_size=40))
def test_the_store_in_memory_is_the_model(steps: list[tuple[object, ...]]) -> None:
    asyncio.run(check(steps, None))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(operations, max_size=40))
def test_the_store_in_a_file_is_the_model(steps: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(steps, Path(folder)))

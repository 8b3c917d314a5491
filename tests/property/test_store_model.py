"""The stores in memory and in a file against a model that a reader checks at a glance."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.store.interface import (
    CommitResult,
    Compare,
    Delete,
    Entry,
    Put,
    Store,
    StoreSnapshot,
    Write,
)
from elastic.store.memory import MemoryStore
from elastic.store.sqlite import sqlite_store
from tests.effort import examples

KEYS = ["a", "a/", "a/b", "a0", "é", "\U0010ffff"]
PREFIXES = ["", "a", "a/", "é", "z"]


@dataclass
class Model:
    """All that a store knows, with nothing clever."""

    revision: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)

    def commit(self, compares: list[Compare], writes: list[Write]) -> CommitResult:
        found = [self.entries.get(compare.key) for compare in compares]
        there = [entry.mod_revision if entry else 0 for entry in found]
        if there != [compare.mod_revision for compare in compares]:
            return CommitResult(False, self.revision, tuple(e for e in found if e))
        self.revision += 1
        for write in writes:
            if isinstance(write, Put):
                self.entries[write.key] = Entry(write.key, write.value, self.revision)
            else:
                self.entries.pop(write.key, None)
        return CommitResult(True, self.revision)

    def read(self, prefix: str) -> StoreSnapshot:
        keys = sorted(key for key in self.entries if key.startswith(prefix))
        return StoreSnapshot(tuple(self.entries[key] for key in keys), self.revision)


keys = st.sampled_from(KEYS)
puts = st.builds(Put, keys, st.binary(max_size=3))
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
    st.tuples(st.just("restart")),
)


class Checked:
    """The model and one store, side by side."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._model = Model()
        self.store: Store = MemoryStore()

    async def open(self) -> None:
        if self._folder is not None:
            self.store = await sqlite_store(self._folder / "coord.db")

    async def perform(self, operation: tuple[object, ...]) -> None:
        kind, *arguments = operation
        await getattr(self, f"do_{kind}")(*arguments)

    async def do_commit(self, wanted: list[tuple[str, int]], writes: list[Write]) -> None:
        entries = self._model.entries
        compares = [
            Compare(key, max(0, (entries[key].mod_revision if key in entries else 0) + error))
            for key, error in wanted
        ]
        expected = self._model.commit(compares, writes)
        assert await self.store.commit(compares, writes) == expected

    async def do_read(self, prefix: str) -> None:
        assert await self.store.read(prefix) == self._model.read(prefix)

    async def do_restart(self) -> None:
        if self._folder is not None:
            await self.store.close()
            await self.open()


async def check(steps: list[tuple[object, ...]], folder: Path | None) -> None:
    checked = Checked(folder)
    await checked.open()
    try:
        for step in [*steps, ("read", "")]:
            await checked.perform(step)
    finally:
        await checked.store.close()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(operations, max_size=40))
def test_the_store_in_memory_is_the_model(steps: list[tuple[object, ...]]) -> None:
    asyncio.run(check(steps, None))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(operations, max_size=40))
def test_the_store_in_a_file_is_the_model(steps: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(steps, Path(folder)))

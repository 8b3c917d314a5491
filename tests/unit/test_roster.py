"""Where coordinators answer: what each enters, what it tells, what an agent keeps of it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from elastic.agent.address_book import AddressBook
from elastic.coord.leadership import LeaderKey
from elastic.coord.roster import Roster, addresses_of
from elastic.store.interface import Entry
from tests.harness.shared_store import SharedMemoryStore
from tests.patience import DEADLINE_S, wait_for, wait_for_async

A, B = "10.0.0.1:7070", "10.0.0.2:7070"


def holder(address: str) -> LeaderKey:
    return LeaderKey(f"{address}/1", address, 1, f"life of {address}")


class Told:
    """What a roster told last."""

    def __init__(self) -> None:
        self.last: tuple[str, ...] = ()
        self._came = anyio.Event()

    def __call__(self, addresses: tuple[str, ...]) -> None:
        self.last = addresses
        self._came.set()
        self._came = anyio.Event()

    async def wait_for(self, *addresses: str) -> None:
        with anyio.fail_after(DEADLINE_S):
            while self.last != addresses:
                await self._came.wait()


@pytest.mark.anyio
async def test_each_coordinator_learns_of_the_others() -> None:
    store, first, second = SharedMemoryStore(), Told(), Told()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Roster(store, "coord", holder(A), first).keep)
        await first.wait_for(A)
        tasks.start_soon(Roster(store, "coord", holder(B), second).keep)
        await second.wait_for(A, B)
        await first.wait_for(A, B)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_an_entry_whose_lease_ended_is_made_anew() -> None:
    store, told = SharedMemoryStore(), Told()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Roster(store, "coord", holder(A), told).keep)
        await told.wait_for(A)
        before = (await store.read("coord/coordinators/")).entries[0]
        await store.revoke_lease(store.lease_of[before.key])
        await wait_for_async(lambda: before.key in store.lease_of)
        (again,) = (await store.read(before.key)).entries
        assert again.value == before.value
        tasks.cancel_scope.cancel()


def entry(number: int, value: bytes) -> Entry:
    return Entry(f"coord/coordinators/{number}", value, 1)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"[]", b"[" * 9999, holder("").encode(), holder("10.0.0.3").encode(),
     holder("a" * 500 + ":1").encode(), holder("höst:1").encode(), holder("x y:1").encode()],
)  # fmt: skip
def test_what_somebody_else_wrote_into_the_roster_is_told_to_nobody(value: bytes) -> None:
    assert addresses_of((entry(1, value), entry(2, holder(B).encode())), A) == (A, B)


# ---------------------------------------------------------------- the agent's file


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def written(book: AddressBook, path: Path, learned: tuple[str, ...]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(book.write_news)
        book.keep(learned)
        await anyio.to_thread.run_sync(wait_for, lambda: str(learned[0]) in text_of(path))
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_an_agent_learned_is_there_in_its_next_life(tmp_path: Path) -> None:
    path = tmp_path / "book"
    await written(AddressBook(path, [A]), path, (B,))
    assert AddressBook(path, [A]).learned == (B,)
    assert AddressBook(path, ["another:1"]).learned == (), "it was told of another cluster"


@pytest.mark.parametrize(
    "kept",
    [b"", b"{", b"[]", b'{"named": ["10.0.0.1:7070"]}', b"\xff", b"[" * 60_000,
     b'{"named": ["10.0.0.1:7070"], "learned": [1]}'],
)  # fmt: skip
def test_a_damaged_file_is_no_file(tmp_path: Path, kept: bytes) -> None:
    path = tmp_path / "book"
    path.write_bytes(kept)
    assert AddressBook(path, [A]).learned == ()


@pytest.mark.anyio
async def test_a_file_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = AddressBook(tmp_path / "none" / "book", [A])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(book.write_news)
        book.keep((B,))
        await anyio.to_thread.run_sync(wait_for, lambda: "coordinators_not_kept" in caplog.text)
        tasks.cancel_scope.cancel()
    assert book.learned == (B,)

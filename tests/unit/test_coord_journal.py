"""The journal and leadership on a store in memory: what is written is there, once and by one."""

from __future__ import annotations

import anyio
import pytest

from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.journal import Journal
from elastic.coord.leadership import Leadership
from elastic.core.facts import JobId
from elastic.errors import CorruptRecord, Fenced, InvariantViolation, StoreUnavailable
from elastic.runtime.clock import SystemClock
from elastic.store.interface import Compare, Delete, Put
from elastic.store.memory import MemoryStore
from tests.harness.shared_store import SharedMemoryStore
from tests.patience import DEADLINE_S
from tests.unit.journal_under_test import (
    PREFIX,
    TTL_S,
    Weak,
    holder,
    leading_journal,
    record,
)

pytestmark = pytest.mark.anyio


async def test_a_coordinator_whose_leadership_was_taken_over_writes_nothing_more() -> None:
    store = MemoryStore()
    old = await leading_journal(store, "old")
    await old.write([record()])
    new = await leading_journal(store, "new")
    await new.load()
    for attempt in (
        old.write([record(generation=7)]),
        old.write([record("j-2", payload=b"x")]),
        old.forget([JobId("j-1")]),
    ):
        with pytest.raises(Fenced, match="new at new:7070"):
            await attempt
    assert await new.load() == (record(),)


async def test_a_record_that_somebody_else_changed_is_not_overwritten() -> None:
    store = MemoryStore()
    journal = await leading_journal(store)
    await journal.write([record()])
    key = f"{PREFIX}/jobs/j-1"
    entry = (await store.read(key)).entries[0]
    await store.commit([Compare(key, entry.mod_revision)], [Put(key, b"other")])
    with pytest.raises(Fenced, match="changed by a process that does not lead"):
        await journal.write([record(generation=1)])


async def test_a_write_whose_answer_was_lost_can_be_repeated() -> None:
    weak = Weak()
    journal = await leading_journal(weak)
    for generation in range(1, 4):
        weak.fail_after = 1
        with pytest.raises(StoreUnavailable):
            await journal.write([record(generation=generation)])
        await journal.write([record(generation=generation)])
    assert await (await leading_journal(weak, "b")).load() == (record(generation=3),)


async def test_a_payload_with_a_missing_part_is_refused() -> None:
    store = MemoryStore()
    journal = await leading_journal(store)
    await journal.write([record(payload=b"z" * (3 * PIECE_BYTES))])
    lost = (await store.read(f"{PREFIX}/pieces/")).entries[1]
    await store.commit([Compare(lost.key, lost.mod_revision)], [Delete(lost.key)])
    with pytest.raises(CorruptRecord, match="2 of 3 pieces"):
        await journal.load()


async def test_nobody_writes_before_it_leads() -> None:
    store = MemoryStore()
    leadership = Leadership(store, PREFIX, holder("a"), SystemClock())
    with pytest.raises(InvariantViolation, match="never led"):
        await Journal(store, PREFIX, leadership).write([record()])


# ------------------------------------------------------------------------------ leadership


async def test_a_standby_leads_once_the_leader_has_resigned() -> None:
    store = SharedMemoryStore()
    first = Leadership(store, PREFIX, holder("a"), SystemClock(), ttl_s=60.0)
    second = Leadership(store, PREFIX, holder("b"), SystemClock(), ttl_s=60.0)
    await first.acquire(lambda _: None)
    polled = anyio.Event()
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.acquire, lambda _: polled.set())
            await polled.wait()
            assert not second.term
            await first.resign()
    assert second.term == 2


async def test_a_leader_that_stops_renewing_is_replaced_and_learns_of_it() -> None:
    store = SharedMemoryStore()
    clock = SystemClock()
    first = Leadership(store, PREFIX, holder("a"), clock, ttl_s=TTL_S)
    second = Leadership(store, PREFIX, holder("b"), clock, ttl_s=60.0)
    with anyio.fail_after(DEADLINE_S):
        await first.acquire(lambda _: None)
        await second.acquire(lambda _: None)
        assert not first.is_valid()
        with pytest.raises(Fenced, match="not renewed in time"):
            await first.keep()
    with pytest.raises(Fenced):
        await Journal(store, PREFIX, first).write([record()])
    await Journal(store, PREFIX, second).write([record()])


async def test_a_leader_whose_lease_was_revoked_stops_and_may_lead_again() -> None:
    store = SharedMemoryStore()
    leader = Leadership(store, PREFIX, holder("a"), SystemClock(), ttl_s=3.0)
    await leader.acquire(lambda _: None)
    await store.revoke_lease(store.lease_of[f"{PREFIX}/leader"])
    with anyio.fail_after(DEADLINE_S):
        with pytest.raises(Fenced, match="its lease has ended"):
            await leader.keep()
        with pytest.raises(Fenced):
            await Journal(store, PREFIX, leader).write([record()])
        await leader.acquire(lambda _: None)
    assert leader.term == 2
    await Journal(store, PREFIX, leader).write([record()])


class WeakShared(Weak, SharedMemoryStore):
    """Both."""


async def test_a_claim_whose_answer_was_lost_counts() -> None:
    weak = WeakShared()
    weak.fail_after = 1
    leader = Leadership(weak, PREFIX, holder("a"), SystemClock(), ttl_s=300.0)
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(lambda _: None)
    await Journal(weak, PREFIX, leader).write([record()])

"""The journal and leadership on a store in memory: what is written is there, once and by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest

from elastic.coord import leadership
from elastic.coord.journal import Journal
from elastic.coord.leadership import Holder, Leadership
from elastic.coord.pieces import PIECE_BYTES
from elastic.core.world import JobId, JobPhase
from elastic.errors import CorruptRecord, Fenced, InvariantViolation, StoreUnavailable
from elastic.runtime.clock import SystemClock
from elastic.store.interface import CommitResult, Compare, Delete, Put, Write
from elastic.store.memory import memory_store
from tests.unit.journal_under_test import (
    DEADLINE_S,
    PREFIX,
    TTL_S,
    Weak,
    checkpoints,
    holder,
    office,
    record,
)

pytestmark = pytest.mark.anyio


async def test_what_one_life_writes_the_next_one_loads_in_order_of_submission() -> None:
    store = memory_store()
    first = await office(store)
    late, early = record("j-a", sequence=2), record("j-b", sequence=1, reason="waiting: nobody")
    await first.write([late])
    await first.write([early])
    await first.write([replace(late, generation=3, phase=JobPhase.RUNNING)])
    second = await office(store, "b")
    assert await second.load() == (early, replace(late, generation=3, phase=JobPhase.RUNNING))


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_a_large_payload_comes_back_and_is_written_once(size: int) -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    payload = bytes(range(256)) * (size // 256 + 1)
    job = record(payload=payload[:size])
    await journal.write([job])
    weak.commits.clear()
    await journal.write([replace(job, generation=1)])
    written = [put for writes in weak.commits for put in writes if isinstance(put, Put)]
    assert sum(len(put.value) for put in written) < 1000
    assert await (await office(weak, "b")).load() == (replace(job, generation=1),)


async def test_a_record_too_large_for_one_transaction_is_split_and_old_parts_go() -> None:
    store = memory_store()
    journal = await office(store)
    jobs = [replace(record(), checkpoints=checkpoints(number)) for number in (9_000, 12_000, 3)]
    for job in jobs:
        await journal.write([job])
        assert await (await office(store, "b")).load() == (job,)
        journal = await office(store, "a")
        await journal.load()
    assert not (await store.read(f"{PREFIX}/pieces/")).entries


async def test_several_large_records_are_written_together() -> None:
    store = memory_store()
    journal = await office(store)
    jobs = tuple(
        replace(record(f"j-{n}"), checkpoints=checkpoints(6_000), sequence=n) for n in range(5)
    )
    await journal.write(jobs)
    assert await (await office(store, "b")).load() == jobs


async def test_a_coordinator_whose_leadership_was_taken_over_writes_nothing_more() -> None:
    store = memory_store()
    old = await office(store, "old")
    await old.write([record()])
    new = await office(store, "new")
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
    store = memory_store()
    journal = await office(store)
    await journal.write([record()])
    key = f"{PREFIX}/jobs/j-1"
    entry = (await store.read(key)).entries[0]
    await store.commit([Compare(key, entry.mod_revision)], [Put(key, b"other")])
    with pytest.raises(Fenced, match="changed by somebody who does not lead"):
        await journal.write([record(generation=1)])


async def test_a_write_whose_answer_was_lost_can_be_repeated() -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    for generation in range(1, 4):
        weak.fail_after = 1
        with pytest.raises(StoreUnavailable):
            await journal.write([record(generation=generation)])
        await journal.write([record(generation=generation)])
    assert await (await office(weak, "b")).load() == (record(generation=3),)


async def test_a_payload_whose_write_failed_half_way_can_be_repeated() -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    job = record(payload=b"z" * (2 * PIECE_BYTES))
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await journal.write([job])
    await journal.write([job])
    assert await (await office(weak, "b")).load() == (job,)


async def test_forgotten_jobs_leave_nothing_behind_even_if_the_store_was_away() -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    await journal.write([record(payload=b"z" * (2 * PIECE_BYTES)), record("j-2")])
    weak.fail_before = 1
    await journal.forget([JobId("j-1")])
    assert len((await weak.read(f"{PREFIX}/jobs/")).entries) == 2
    await journal.forget([JobId("j-2")])
    assert not (await weak.read(f"{PREFIX}/jobs/")).entries
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


async def test_parts_without_a_record_are_removed_by_the_next_life() -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    # The payload is written, the record is not: as after a kill between the two.
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await journal.write([record(payload=b"z")])
    second = await office(weak, "b")
    assert await second.load() == ()
    await second.forget()
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("jobs/j-1", b"\xff\xff", "test/jobs/j-1"),
        ("jobs/j-1", b"", "test/jobs/j-1"),
        ("jobs/j-1", b"pieces:abc", "0 of 1 pieces"),
        ("pieces/j-1", b"x", "no piece"),
    ],
)
async def test_a_record_that_cannot_be_read_is_refused_by_its_key(
    key: str, value: bytes, says: str
) -> None:
    store = memory_store()
    journal = await office(store)
    await store.commit([Compare(f"{PREFIX}/{key}", 0)], [Put(f"{PREFIX}/{key}", value)])
    with pytest.raises(CorruptRecord, match=says):
        await journal.load()


async def test_a_payload_with_a_missing_part_is_refused() -> None:
    store = memory_store()
    journal = await office(store)
    await journal.write([record(payload=b"z" * (3 * PIECE_BYTES))])
    lost = (await store.read(f"{PREFIX}/pieces/")).entries[1]
    await store.commit([Compare(lost.key, lost.mod_revision)], [Delete(lost.key)])
    with pytest.raises(CorruptRecord, match="2 of 3 pieces"):
        await journal.load()


async def test_nobody_writes_before_it_leads() -> None:
    store = memory_store()
    leadership = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=False)
    with pytest.raises(InvariantViolation, match="never led"):
        await Journal(store, PREFIX, leadership).write([record()])


# ------------------------------------------------------------------------------ leadership


async def test_a_standby_knows_who_leads_and_leads_once_that_one_resigned() -> None:
    store = memory_store()
    clock = SystemClock()
    first = Leadership(store, PREFIX, holder("a"), clock, shared=True, ttl_s=60.0)
    second = Leadership(store, PREFIX, holder("b"), clock, shared=True, ttl_s=60.0)
    await first.acquire(lambda _: None)
    seen: list[Holder | None] = []
    told = anyio.Event()

    def saw(leader: Holder | None) -> None:
        seen.append(leader)
        told.set()

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.acquire, saw)
            await told.wait()
            assert second.term == 0
            await first.resign()
    assert seen[0] == replace(holder("a"), term=1)
    assert seen[-1] is None
    assert (first.term, second.term) == (1, 2)
    assert first.history == second.history != ""


async def test_a_standby_is_told_of_a_resignation_and_does_not_wait_for_its_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "STANDBY_POLL_S", DEADLINE_S * 10)
    store = memory_store()
    clock = SystemClock()
    first = Leadership(store, PREFIX, holder("a"), clock, shared=True, ttl_s=60.0)
    second = Leadership(store, PREFIX, holder("b"), clock, shared=True, ttl_s=60.0)
    await first.acquire(lambda _: None)
    looks: list[float] = []
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.acquire, lambda _: looks.append(clock.monotonic_ns()))
            await wait_looks(looks, 1)
            await first.resign()
    assert len(looks) == 2


async def wait_looks(looks: list[float], number: int) -> None:
    while len(looks) < number:  # noqa: ASYNC110 (nothing tells of it)
        await anyio.sleep(0.005)


async def test_a_leader_that_stops_renewing_is_replaced_and_learns_of_it() -> None:
    store = memory_store()
    clock = SystemClock()
    first = Leadership(store, PREFIX, holder("a"), clock, shared=True, ttl_s=TTL_S)
    second = Leadership(store, PREFIX, holder("b"), clock, shared=True, ttl_s=60.0)
    with anyio.fail_after(DEADLINE_S):
        await first.acquire(lambda _: None)
        await second.acquire(lambda _: None)
        assert not first.is_valid()
        with pytest.raises(Fenced, match="not renewed in time"):
            await first.keep()
    with pytest.raises(Fenced):
        await Journal(store, PREFIX, first).write([record()])
    await Journal(store, PREFIX, second).write([record()])


async def test_a_leader_is_not_valid_any_more_before_its_lease_can_have_ended() -> None:
    """A renewal that hangs, as with a store that is cut off: nobody trusts what it may bring."""
    store = memory_store()
    leader = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=True, ttl_s=TTL_S)
    await leader.acquire(lambda _: None)

    async def hang(lease_id: int) -> bool:
        await anyio.sleep_forever()
        return True

    store.renew_lease = hang  # type: ignore[method-assign]
    with anyio.fail_after(DEADLINE_S), pytest.raises(Fenced, match="not renewed in time"):
        await leader.keep()
    assert (await store.read(f"{PREFIX}/leader")).entries or not leader.is_valid()


async def test_who_is_told_to_end_while_its_claim_is_unanswered_gives_it_back() -> None:
    store = memory_store()
    first = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=True, ttl_s=60.0)
    commit, claimed = store.commit, anyio.Event()

    async def answer_never(compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        await commit(compares, writes)
        claimed.set()
        await anyio.sleep_forever()
        raise AssertionError

    store.commit = answer_never  # type: ignore[method-assign]
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.acquire, lambda _: None)
            await claimed.wait()
            tasks.cancel_scope.cancel()
        assert (await store.read(f"{PREFIX}/leader")).entries
        await first.resign()
        assert not (await store.read(f"{PREFIX}/leader")).entries


async def test_a_leader_whose_lease_was_revoked_stops_and_may_lead_again() -> None:
    store = memory_store()
    leader = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=True, ttl_s=3.0)
    await leader.acquire(lambda _: None)
    lease = (await store.read(f"{PREFIX}/leader")).entries[0].lease
    await store.revoke_lease(lease)
    with anyio.fail_after(DEADLINE_S):
        with pytest.raises(Fenced, match="its lease has ended"):
            await leader.keep()
        with pytest.raises(Fenced):
            await Journal(store, PREFIX, leader).write([record()])
        await leader.acquire(lambda _: None)
    assert leader.term == 2
    await Journal(store, PREFIX, leader).write([record()])


async def test_a_coordinator_takes_the_key_of_its_own_earlier_term_at_once() -> None:
    """After the store was away, its own lease may still be there."""
    store = memory_store()
    leader = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=True, ttl_s=60.0)
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(lambda _: None)
        leader.fenced("the store was away")
        await leader.acquire(lambda _: None)
    assert leader.term == 2


async def test_a_claim_whose_answer_was_lost_counts() -> None:
    weak = Weak(memory_store())
    weak.fail_after = 1
    leader = Leadership(weak, PREFIX, holder("a"), SystemClock(), shared=True, ttl_s=300.0)  # type: ignore[arg-type]
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(lambda _: None)
    await Journal(weak, PREFIX, leader).write([record()])  # type: ignore[arg-type]

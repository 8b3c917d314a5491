"""The journal over several lives: what one left half done, the next one does not take for whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.journal import Journal
from elastic.coord.leadership import Leadership
from elastic.core.events.coordinator import Cordon, JobRecord, NodesRecord
from elastic.core.world import JobId, JobPhase
from elastic.errors import StoreUnavailable
from elastic.runtime.clock import SystemClock
from elastic.store.interface import Compare, Put
from elastic.store.memory import memory_store
from elastic.wire.generated.elastic.v1 import records_pb2
from tests.unit.journal_under_test import (
    PREFIX,
    Weak,
    checkpoints,
    holder,
    office,
    record,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_record_that_is_as_before_has_its_parts_though_removing_them_failed(
    fails: str,
) -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    large = record(checkpoints=checkpoints(9_000))
    await journal.write([large])
    remove = journal._delete

    async def fail(keys: Iterable[str]) -> None:
        if fails == "after":
            await remove(keys)
        raise StoreUnavailable("no answer")

    journal._delete = fail  # type: ignore[method-assign]
    await journal.write([record(generation=1)])
    journal._delete = remove  # type: ignore[method-assign]
    await journal.write([large])
    second = await office(weak, "b")
    assert await second.load() == (large,)
    await second.write([record(generation=2)])
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


async def test_parts_of_a_record_that_was_not_written_are_not_taken_for_whole() -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    large = record(payload=b"x", checkpoints=checkpoints(12_000))
    await journal.write([record(payload=b"x")])
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await journal.write([large])
    second = await office(weak, "b")
    assert await second.load() == (record(payload=b"x"),)
    await second.write([large])
    assert await (await office(weak, "c")).load() == (large,)


async def left_with_an_ended_job() -> tuple[Weak, JobRecord, Journal]:
    """A store in which a part of an ended job's function could not be removed; its next leader."""
    weak = Weak(memory_store())
    journal = await office(weak)
    await journal.write([record(payload=b"z" * (2 * PIECE_BYTES))])
    pieces = (await weak.read(f"{PREFIX}/pieces/")).entries
    ended = record(phase=JobPhase.FAILED)
    await journal.write([ended])
    await weak.commit([Compare(pieces[0].key, 0)], [Put(pieces[0].key, pieces[0].value)])
    return weak, ended, await office(weak, "b")


async def test_the_function_of_an_ended_job_that_was_not_removed_is_at_the_next_start() -> None:
    weak, ended, second = await left_with_an_ended_job()
    assert await second.load() == (ended,)
    await second.forget()
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


async def test_an_id_that_comes_again_before_its_parts_are_removed_is_another_job() -> None:
    """As when a leader dies within a submission, and the client repeats it to the next one."""
    weak = Weak(memory_store())
    first = await office(weak)
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await first.write([record(payload=b"z" * (3 * PIECE_BYTES))])
    second = await office(weak, "b")
    assert await second.load() == ()
    weak.fail_before = 2
    await second.forget()
    job = record(payload=b"y" * (2 * PIECE_BYTES))
    with pytest.raises(StoreUnavailable):
        await second.write([job])
    await second.write([job])
    assert await (await office(weak, "c")).load() == (job,)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_id_that_comes_again_is_not_removed_with_the_job_before(fails: str) -> None:
    weak = Weak(memory_store())
    journal = await office(weak)
    await journal.write([record(payload=b"z" * (2 * PIECE_BYTES))])
    weak.fail_before, weak.fail_after = int(fails == "before"), int(fails == "after")
    await journal.forget([JobId("j-1")])
    job = record(payload=b"y")
    await journal.write([job])
    await journal.forget([JobId("j-other")])
    assert await (await office(weak, "b")).load() == (job,)


async def test_an_embedded_store_does_not_keep_its_history_for_ever() -> None:
    store = memory_store()
    leadership = Leadership(store, PREFIX, holder("a"), SystemClock(), shared=False)
    await leadership.acquire(lambda _: None)
    journal = Journal(store, PREFIX, leadership, compacts=True)
    for generation in range(2_000):
        await journal.write([record(generation=generation)])
    engine = store._engine
    assert len(engine._history) < 1_200  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ another version


def newer(data: bytes) -> bytes:
    """A record as a newer minor version writes it: fields at each level that we do not know."""
    stored = records_pb2.StoredRecord.FromString(data)
    unknown = b"\xc2\x3e\x03new"  # Field 1000, three bytes.
    stored.job_record.spec.MergeFromString(unknown)
    stored.job_record.MergeFromString(unknown)
    stored.MergeFromString(unknown)
    return stored.SerializeToString()


def parts(data: bytes) -> list[bytes]:
    """What is unknown in a record, in its job, and in the job's specification."""
    stored = records_pb2.StoredRecord.FromString(data)
    found = []
    for message in (stored, stored.job_record, stored.job_record.spec):
        for field in message.DESCRIPTOR.fields:
            if field.name not in ("job_record", "spec"):
                message.ClearField(field.name)
        found.append(message)
    record = found[1]
    record.ClearField("spec")
    found[0].ClearField("job_record")
    return [message.SerializeToString() for message in found]


@pytest.mark.parametrize("number", [3, 9000], ids=["whole", "in pieces"])
async def test_fields_that_a_newer_version_added_outlive_an_older_leader(number: int) -> None:
    store = memory_store()
    await (await office(store)).write([record(checkpoints=checkpoints(3))])
    key = f"{PREFIX}/jobs/j-1"
    (entry,) = (await store.read(key)).entries
    await store.commit([Compare(key, entry.mod_revision)], [Put(key, newer(entry.value))])
    older = await office(store, "older")
    (job,) = await older.load()
    assert job == record(checkpoints=checkpoints(3))
    await older.write([replace(job, generation=7, reason="changed")])
    await older.write([replace(job, generation=8, checkpoints=checkpoints(number))])
    third = await office(store, "third")
    (job,) = await third.load()
    assert (job.generation, len(job.checkpoints)) == (8, number)
    await third.write([replace(job, checkpoints=())])
    (entry,) = (await store.read(key)).entries
    assert parts(entry.value) == [b"\xc2\x3e\x03new"] * 3


async def test_what_a_newer_version_keeps_of_nodes_outlives_an_older_leader() -> None:
    store = memory_store()
    cordoned, more = Cordon("n-1", "by an operator"), Cordon("n-2", "by an operator")
    await (await office(store)).write_nodes(NodesRecord((cordoned,)))
    key = f"{PREFIX}/nodes"
    (entry,) = (await store.read(key)).entries
    stored = records_pb2.StoredRecord.FromString(entry.value)
    unknown = b"\xc2\x3e\x03new"
    stored.nodes_record.MergeFromString(unknown)
    stored.MergeFromString(unknown)
    await store.commit([Compare(key, entry.mod_revision)], [Put(key, stored.SerializeToString())])
    for name, record_of in (
        ("older", NodesRecord((cordoned, more))),
        ("third", NodesRecord((more,))),
    ):
        journal = await office(store, name)
        await journal.load()
        for _ in range(2):
            await journal.write_nodes(record_of)
    (entry,) = (await store.read(key)).entries
    assert entry.value.count(unknown) == 2
    fourth = await office(store, "fourth")
    await fourth.load()
    assert fourth.nodes == NodesRecord((more,))

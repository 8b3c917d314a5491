"""The journal over several lives: what one left half done, the next one does not take for whole."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.journal import Journal
from elastic.core.facts import JobId, JobPhase
from elastic.core.records import JobRecord
from elastic.errors import StoreUnavailable
from elastic.store.interface import Compare, Put
from tests.unit.journal_under_test import (
    PREFIX,
    Weak,
    checkpoints,
    leading_journal,
    record,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_record_that_is_as_before_has_its_parts_though_removing_them_failed(
    fails: str,
) -> None:
    weak = Weak()
    journal = await leading_journal(weak)
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
    second = await leading_journal(weak, "b")
    assert await second.load() == (large,)
    await second.write([record(generation=2)])
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


async def test_parts_of_a_record_that_was_not_written_are_not_taken_for_whole() -> None:
    weak = Weak()
    journal = await leading_journal(weak)
    large = record(payload=b"x", checkpoints=checkpoints(12_000))
    await journal.write([record(payload=b"x")])
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await journal.write([large])
    second = await leading_journal(weak, "b")
    assert await second.load() == (record(payload=b"x"),)
    await second.write([large])
    assert await (await leading_journal(weak, "c")).load() == (large,)


async def left_with_an_ended_job() -> tuple[Weak, JobRecord, Journal]:
    """A store in which a part of an ended job's function could not be removed; its next leader."""
    weak = Weak()
    journal = await leading_journal(weak)
    await journal.write([record(payload=b"z" * (2 * PIECE_BYTES))])
    pieces = (await weak.read(f"{PREFIX}/pieces/")).entries
    ended = record(phase=JobPhase.FAILED)
    await journal.write([ended])
    await weak.commit([Compare(pieces[0].key, 0)], [Put(pieces[0].key, pieces[0].value)])
    return weak, ended, await leading_journal(weak, "b")


async def test_the_function_of_an_ended_job_that_was_not_removed_is_at_the_next_start() -> None:
    weak, ended, second = await left_with_an_ended_job()
    assert await second.load() == (ended,)
    await second.forget()
    assert not (await weak.read(f"{PREFIX}/pieces/")).entries


async def test_an_id_that_comes_again_before_its_parts_are_removed_is_another_job() -> None:
    """As when a leader dies within a submission, and the client repeats it to the next one."""
    weak = Weak()
    first = await leading_journal(weak)
    weak.fail_after = 1
    with pytest.raises(StoreUnavailable):
        await first.write([record(payload=b"z" * (3 * PIECE_BYTES))])
    second = await leading_journal(weak, "b")
    assert await second.load() == ()
    weak.fail_before = 2
    await second.forget()
    job = record(payload=b"y" * (2 * PIECE_BYTES))
    with pytest.raises(StoreUnavailable):
        await second.write([job])
    await second.write([job])
    assert await (await leading_journal(weak, "c")).load() == (job,)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_id_that_comes_again_is_not_removed_with_the_job_before(fails: str) -> None:
    weak = Weak()
    journal = await leading_journal(weak)
    await journal.write([record(payload=b"z" * (2 * PIECE_BYTES))])
    weak.fail_before, weak.fail_after = int(fails == "before"), int(fails == "after")
    await journal.forget([JobId("j-1")])
    job = record(payload=b"y")
    await journal.write([job])
    await journal.forget([JobId("j-other")])
    assert await (await leading_journal(weak, "b")).load() == (job,)

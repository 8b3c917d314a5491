"""Functions that are written ahead of their jobs: nobody waits for them, and none stays behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from elastic.coord import payload_upload as staging
from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.driver import Driver
from elastic.coord.payload_upload import PayloadBudget
from elastic.core.events.coordinator import (
    CoordinatorEffect,
    CoordinatorEvent,
    EventBatch,
    Persist,
    Reply,
    StopRequested,
    SubmitRequested,
)
from elastic.core.facts import JobId, JobPhase, Member
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView, JobSample, JobView
from elastic.errors import Fenced, Refused, StoreUnavailable, Unavailable
from elastic.runtime.clock import SystemClock
from elastic.store.interface import CommitResult, Compare, Put, Write
from tests.patience import DEADLINE_S
from tests.unit.journal_under_test import PREFIX, Weak, leading_journal, record

pytestmark = pytest.mark.anyio
BIG = b"z" * (3 * PIECE_BYTES)
OTHER = b"y" * (2 * PIECE_BYTES)


class Gated(Weak):
    """A store that writes no piece of a function without leave."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = anyio.Semaphore(0)
        self.asked = 0
        self.loses_answer = False
        self.news = anyio.Event()

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        if any("/pieces/" in write.key and isinstance(write, Put) for write in writes):
            self.asked += 1
            self.news.set()
            self.news = anyio.Event()
            await self.leave.acquire()
        result = await super().commit(compares, writes)
        if self.loses_answer and any("/jobs/" in write.key for write in writes):
            self.loses_answer = False
            raise StoreUnavailable("the answer was lost")
        return result

    async def wait_asked(self, number: int) -> None:
        while self.asked < number:
            await self.news.wait()

    async def keys(self, kind: str) -> list[str]:
        return [entry.key for entry in (await self.read(f"{PREFIX}/{kind}/")).entries]


class Machine:
    """Takes each job once, and refuses those named "no", or "late" if others came before."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, JobRecord] = {}

    def step(self, event: CoordinatorEvent, now_ns: int) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, EventBatch):
            return tuple(e for one in event.events for e in self.step(one, now_ns))
        if isinstance(event, StopRequested):
            self.jobs[event.job_id] = record(event.job_id)
            return (Persist((record(event.job_id),)), Reply(event.request_id, "", "stopped"))
        if not isinstance(event, SubmitRequested):
            return ()
        if event.spec.name == "no" or (event.spec.name == "late" and not event.dry_run):
            return (Reply(event.request_id, "invalid", "no"),)
        if event.dry_run:
            return (Reply(event.request_id, "", event.spec.job_id),)
        job = JobRecord(event.spec, JobPhase.PENDING)
        self.jobs[event.spec.job_id] = job
        return (Persist((job,)), Reply(event.request_id, "", event.spec.job_id))

    def next_deadline_ns(self) -> int | None:
        return None

    def view(self, now_ns: int) -> ClusterView:
        return ClusterView(now_ns, (), tuple(JobView(job, "", 0, ()) for job in self.jobs.values()))

    def samples(self) -> tuple[JobSample, ...]:
        return ()

    def first_member(self, job_id: JobId) -> Member | None:
        return None


async def driver_on(store: Weak, name: str = "a") -> Driver:
    return Driver(Machine(), await leading_journal(store, name), SystemClock())


@asynccontextmanager
async def serving(driver: Driver) -> AsyncIterator[TaskGroup]:
    """Let a driver run beside what is tried, which has an end."""
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.run)
            await driver.wait_recovered()
            yield tasks
            tasks.cancel_scope.cancel()


# ------------------------------------------------------------------------------ the driver


@pytest.mark.parametrize("how", ["refused", "given up"])
async def test_a_function_for_which_no_job_came_is_removed(how: str) -> None:
    gated = Gated()
    driver = await driver_on(gated)
    spec = replace(record(payload=BIG).spec, name="late")
    async with serving(driver) as tasks:
        if how == "refused":
            for _ in range(3):
                gated.leave.release()
            assert (await driver.submit(spec, "me")).error == "invalid"
        else:
            with anyio.CancelScope() as patience:
                tasks.start_soon(cancel_when_asked, gated, patience, 2)
                gated.leave.release()
                await driver.submit(spec, "me")
            gated.leave.release()
        while await gated.keys("pieces"):
            await anyio.lowlevel.checkpoint()
        # And the next one under this id has all of its own.
        for _ in range(2):
            gated.leave.release()
        job = record(payload=OTHER)
        assert not (await driver.submit(job.spec, "me")).error
    assert await (await leading_journal(gated, "b")).load() == (job,)


async def test_of_a_job_that_is_refused_no_function_is_written() -> None:
    gated = Gated()
    driver = await driver_on(gated)
    spec = replace(record(payload=BIG).spec, name="no")
    async with serving(driver):
        assert (await driver.submit(spec, "me")).error == "invalid"
    assert not gated.asked


async def test_a_submission_that_was_given_up_leaves_what_its_repeat_has_written() -> None:
    gated = Gated()
    driver = await driver_on(gated)
    spec = record(payload=BIG).spec
    for _ in range(100):
        gated.leave.release()
    async with serving(driver):
        staging = driver._staging
        with staging.held(spec.job_id):
            await staging.stage(spec.job_id, BIG)
            staging.drop(spec.job_id)  # Of the first try, whose caller has gone.
            await staging.stage(JobId("j-behind"), BIG)
            assert [key for key in await gated.keys("pieces") if spec.job_id in key]
        staging.drop(spec.job_id)
        while [key for key in await gated.keys("pieces") if spec.job_id in key]:
            await anyio.lowlevel.checkpoint()


async def cancel_when_asked(gated: Gated, scope: anyio.CancelScope, number: int) -> None:
    await gated.wait_asked(number)
    scope.cancel()


async def test_the_end_of_a_term_ends_those_who_submit() -> None:
    gated = Gated()
    driver = await driver_on(gated)
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks, anyio.create_task_group() as term:
            term.start_soon(driver.run)
            await driver.wait_recovered()

            async def submit(job_id: str) -> None:
                with pytest.raises(Unavailable, match="nothing was submitted"):
                    await driver.submit(record(job_id, payload=BIG).spec, "me")

            tasks.start_soon(submit, "j-1")
            tasks.start_soon(submit, "j-2")
            await gated.wait_asked(1)
            term.cancel_scope.cancel()
        with pytest.raises(Unavailable, match="nothing was submitted"):
            await driver.submit(record("j-3", payload=BIG).spec, "me")


async def test_who_is_replaced_while_a_function_is_written_leads_no_more() -> None:
    gated = Gated()
    driver = await driver_on(gated)
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:

            async def submit() -> None:
                with pytest.raises(Unavailable):
                    await driver.submit(record(payload=BIG).spec, "me")

            async def replace_it() -> None:
                await gated.wait_asked(1)
                await leading_journal(gated, "b")
                gated.leave.release()

            tasks.start_soon(submit)
            tasks.start_soon(replace_it)
            with pytest.raises(Fenced, match="b at b:7070"):
                await driver.run()


# ------------------------------------------------------------------------------ the journal


@pytest.mark.parametrize("payload", [b"", b"x", OTHER, BIG])
async def test_a_job_has_its_own_function_whatever_was_written_ahead_under_its_id(
    payload: bytes,
) -> None:
    weak = Weak()
    journal = await leading_journal(weak)
    await journal.stage(JobId("j-1"), BIG)
    await journal.stage(JobId("j-1"), OTHER)
    job = record(payload=payload)
    await journal.write([job])
    await journal.stage(JobId("j-1"), OTHER)
    await journal.unstage(JobId("j-1"))
    assert await (await leading_journal(weak, "b")).load() == (job,)


# ------------------------------------------------------------------------------ room


def view_of(*records: JobRecord) -> ClusterView:
    return ClusterView(0, (), tuple(JobView(job, "", 0, ()) for job in records))


def test_functions_that_are_being_submitted_count_until_their_answer_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "OPEN_JOBS_BYTES_MAX", 100)
    room, nobody = PayloadBudget(), view_of()
    jobs = [record(f"j-{number}", payload=bytes(40)) for number in range(3)]
    with room.taken(nobody, jobs[0].spec), room.taken(nobody, jobs[1].spec):
        with (
            pytest.raises(Refused, match="2 that are being submitted, hold 80 bytes"),
            room.taken(nobody, jobs[2].spec),
        ):
            pass
        with (
            pytest.raises(Refused, match="of 1 jobs that have not ended, and of 1 that"),
            room.taken(view_of(jobs[0]), jobs[2].spec),
        ):
            pass
    with room.taken(view_of(jobs[0]), jobs[2].spec):
        pass
    ended = replace(jobs[1], phase=JobPhase.STOPPED)
    with room.taken(view_of(jobs[0], ended), jobs[2].spec):
        pass

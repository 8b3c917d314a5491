"""Writes the pickled functions of jobs to the store before the jobs' records.

Rule: one task writes them, one at a time and piece by piece; between two pieces the driver can
write records. A function of 16 MiB takes 32 writes, and recovery from a loss must not wait for
them. Correctness does not depend on this: a function not written here is written with the job's
record. One without a job is removed, by this task or the next leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic.coord.journal import Journal
from elastic.coord.leadership import retry_until_available
from elastic.core.config import JobSpec
from elastic.core.facts import ENDED, JobId
from elastic.core.view import ClusterView
from elastic.errors import Refused, Unavailable
from elastic.runtime.clock import Clock

log = logging.getLogger(__name__)

OPEN_JOBS_BYTES_MAX = 1024 * 1024 * 1024
"""Total size of the pickled functions of jobs that have not ended or are being submitted."""
OVER = "the term of this coordinator is over; nothing was submitted"


class PayloadBudget:
    """Counts the bytes of functions in memory: of jobs, and of pending submissions."""

    def __init__(self) -> None:
        self._coming: dict[object, tuple[JobId, int]] = {}

    @contextmanager
    def taken(self, view: ClusterView, spec: JobSpec) -> Iterator[None]:
        """Reserve memory for a job's function during a `with` block.

        Args:
            view: the existing jobs.
            spec: of the new job.

        Raises:
            Refused: with it, the functions would exceed `OPEN_JOBS_BYTES_MAX`.
        """
        size, mark = len(spec.entry.payload), object()
        self._check(view, spec.job_id, size)
        self._coming[mark] = spec.job_id, size
        try:
            yield
        finally:
            del self._coming[mark]

    def _check(self, view: ClusterView, job_id: JobId, size: int) -> None:
        records = [job.record for job in view.jobs if job.record.phase not in ENDED]
        there = {r.spec.job_id: len(r.spec.entry.payload) for r in records}
        # A job exists before its submission is answered; it counts once.
        coming = [number for of, number in self._coming.values() if of not in there]
        there.pop(job_id, None)
        held = sum(there.values()) + sum(coming)
        if held + size > OPEN_JOBS_BYTES_MAX:
            raise Refused(
                f"the functions of {len(there)} jobs that have not ended, and of {len(coming)} "
                f"that are being submitted, hold {held} bytes, at most {OPEN_JOBS_BYTES_MAX} are "
                f"kept; wait until some have ended, or load large data inside the function"
            )


@dataclass(eq=False)
class PayloadWrite:
    """A function that waits to be written.

    Attributes:
        payload: b"" once no caller waits for it.
        written: done when it is in the store.
    """

    job_id: JobId
    payload: bytes
    written: asyncio.Future[None] = field(repr=False)


class PayloadUploads:
    """Writes functions before their jobs' records, and removes those that got no job."""

    def __init__(self, journal: Journal, clock: Clock, is_known: Callable[[JobId], bool]) -> None:
        """Write nothing before `run`.

        Args:
            journal: writes them.
            clock: for the age of a wait.
            is_known: whether the machine has a job of this id, whose function must be kept.
        """
        self._journal = journal
        self._clock = clock
        self._is_known = is_known
        self._queue: asyncio.Queue[PayloadWrite | JobId] = asyncio.Queue()
        self._waiting: set[PayloadWrite] = set()
        self._held: Counter[JobId] = Counter()
        self._is_over = False

    def check_open(self) -> None:
        """Check that functions are still written.

        Raises:
            Unavailable: the term is over.
        """
        if self._is_over:
            raise Unavailable(OVER)

    async def stage(self, job_id: JobId, payload: bytes) -> None:
        """Return when a function is in the store.

        If this is cancelled, or the job is refused afterwards, the caller must call `drop`.

        Raises:
            Unavailable: the term ended before.
        """
        self.check_open()
        load = PayloadWrite(job_id, payload, asyncio.get_running_loop().create_future())
        self._waiting.add(load)
        self._queue.put_nowait(load)
        try:
            await load.written
        finally:
            self._waiting.discard(load)
            load.payload = b""

    @contextmanager
    def held(self, job_id: JobId) -> Iterator[None]:
        """During a `with` block, keep a function even if another submission drops it.

        A client that gave up may repeat its submission under the same id.
        """
        self._held[job_id] += 1
        try:
            yield
        finally:
            self._held[job_id] -= 1
            if not self._held[job_id]:
                del self._held[job_id]

    def drop(self, job_id: JobId) -> None:
        """Queue the removal of a function, unless a job or another submission needs it."""
        self._queue.put_nowait(job_id)

    async def run(self) -> None:
        """Write and remove queued functions; never returns.

        Raises:
            Fenced: another coordinator leads.
        """
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, PayloadWrite):
                    await self._write(item)
                elif not self._held[item] and not self._is_known(item):
                    await self._journal.unstage(item)
        finally:
            self._is_over = True
            for load in self._waiting:
                if not load.written.done():
                    load.written.set_exception(Unavailable(OVER))

    async def _write(self, load: PayloadWrite) -> None:
        async def attempt() -> None:
            if not load.written.done():
                await self._journal.stage(load.job_id, load.payload, load.written.done)

        await retry_until_available("a function", attempt, self._clock)
        if not load.written.done():
            load.written.set_result(None)

"""Functions on their way to the store: written before their jobs are, beside the owner task.

Rule: one task writes them, one at a time and piece by piece; between two pieces the owner task
writes what it has to. A function of 16 MiB takes 32 writes, and a loss must not wait for them.

Nothing depends on this: what was not written here is written with the job's record, and what was
and belongs to no job is removed, by this task or by the next leader's.
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
from elastic.core.view import ClusterView
from elastic.core.world import ENDED, JobId
from elastic.errors import Refused, Unavailable
from elastic.runtime.clock import Clock

log = logging.getLogger(__name__)

OPEN_JOBS_BYTES_MAX = 1024 * 1024 * 1024
"""Of the pickled functions of jobs that have not ended, and of those that are being submitted."""
OVER = "the term of this coordinator is over; nothing was submitted"


class PayloadBudget:
    """Counts the bytes of functions in memory: of jobs, and of submissions without an answer."""

    def __init__(self) -> None:
        """Begin empty."""
        self._coming: dict[object, tuple[JobId, int]] = {}

    @contextmanager
    def taken(self, view: ClusterView, spec: JobSpec) -> Iterator[None]:
        """Hold room for a job's function for the length of a `with` block.

        Args:
            view: the jobs that are there.
            spec: of the job to be.

        Raises:
            Refused: the functions of jobs fill `OPEN_JOBS_BYTES_MAX`, with those that come.
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
        # A job is there before its submission is answered, and counts once.
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
        payload: b"" once nobody waits for it.
        written: is done when it is in the store.
    """

    job_id: JobId
    payload: bytes
    written: asyncio.Future[None] = field(repr=False)


class PayloadUploads:
    """Writes functions ahead of their jobs' records, and removes those that no job came for."""

    def __init__(self, journal: Journal, clock: Clock, is_known: Callable[[JobId], bool]) -> None:
        """Write nothing before `run`.

        Args:
            journal: writes them.
            clock: for the age of a wait.
            is_known: whether the machine has a job of this id, whose function is to stay.
        """
        self._journal = journal
        self._clock = clock
        self._is_known = is_known
        self._queue: asyncio.Queue[PayloadWrite | JobId] = asyncio.Queue()
        self._waiting: set[PayloadWrite] = set()
        self._held: Counter[JobId] = Counter()
        self._is_over = False

    def check_open(self) -> None:
        """Refuse what would be written for nobody.

        Raises:
            Unavailable: the term is over.
        """
        if self._is_over:
            raise Unavailable(OVER)

    async def stage(self, job_id: JobId, payload: bytes) -> None:
        """Return when a function is in the store.

        Whoever is cancelled here, or gets no job for it afterwards, calls `drop`.

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
        """For the length of a `with` block, have a function stay that another submission drops.

        A client that gave up repeats its submission under the same id.
        """
        self._held[job_id] += 1
        try:
            yield
        finally:
            self._held[job_id] -= 1
            if not self._held[job_id]:
                del self._held[job_id]

    def drop(self, job_id: JobId) -> None:
        """Have a function removed, unless a job needs it, or a submission holds it. Never waits."""
        self._queue.put_nowait(job_id)

    async def run(self) -> None:
        """Write and remove for ever.

        Raises:
            Fenced: another coordinator leads.
        """
        try:
            while True:
                wish = await self._queue.get()
                if isinstance(wish, PayloadWrite):
                    await self._write(wish)
                elif not self._held[wish] and not self._is_known(wish):
                    await self._journal.unstage(wish)
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

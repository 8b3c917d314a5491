"""Copies of other nodes' snapshots, in this agent's memory: two slots for each job.

Rule: a copy that comes never touches the newest that is whole; it takes its place when its last
byte was checked. Memory that somebody reads, or writes, is not given to anybody else.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic.core.world import HeldCopy, JobId
from elastic.errors import Refused
from elastic.runtime.snapshot_memory import Mark, check_room

log = logging.getLogger(__name__)

JOBS_MAX = 64
"""Jobs that a node holds copies for; the coordinator spreads them."""
SHARE = 0.5
"""Of the memory that is available: this node's own jobs come first."""
SLOTS = 2


@dataclass
class Slot:
    """Memory for one copy.

    Attributes:
        memory: anonymous, shared with nobody; None before the first copy.
        mark, crc: of the copy that is whole in it; None for none.
        users: that read or write it now.
    """

    memory: mmap.mmap | None = None
    mark: Mark | None = None
    crc: int = 0
    users: int = 0

    def view(self, mark: Mark) -> memoryview:
        """Return the place for a copy's bytes; OSError if there is not that much memory."""
        size = max(1, mark.num_bytes)
        if self.memory is None or len(self.memory) < size:
            check_room(size - (len(self.memory) if self.memory else 0), "a copy", SHARE)
            self.memory = _find(size)
        return memoryview(self.memory)[: mark.num_bytes]


@dataclass
class Holding:
    """What is held for one job.

    Attributes:
        key: who has it may bring and take copies.
        newest: slot of the newest copy.
        stop: ends the push that is under way, None while there is none.
        coming: generation of that push.
    """

    key: str
    slots: tuple[Slot, ...] = field(default_factory=lambda: tuple(Slot() for _ in range(SLOTS)))
    newest: int = 0
    stop: Callable[[], None] | None = None
    coming: int = 0

    def mark(self) -> Mark | None:
        """Return the mark of the newest copy."""
        return self.slots[self.newest].mark


class CopyStore:
    """All copies on this node; every method may be called by any thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Hold none; `on_change` is called, by any thread, when that changes."""
        self._on_change = on_change
        self._holdings: dict[JobId, Holding] = {}
        self._lock = threading.Lock()

    def grant(self, job_id: JobId, key: str) -> None:
        """Hold copies for a job, for whoever has the key."""
        with self._lock:
            known = self._holdings.get(job_id)
            if known is not None:
                known.key = key
            elif len(self._holdings) < JOBS_MAX:
                self._holdings[job_id] = Holding(key)
            else:
                log.warning("copy_refused job=%s: copies of %d jobs are held", job_id, JOBS_MAX)

    def drop(self, job_id: JobId) -> bool:
        """Free what is held for a job; returns whether anything was."""
        with self._lock:
            holding = self._holdings.pop(job_id, None)
            if holding is not None and holding.stop is not None:
                holding.stop()
        if holding is None or holding.mark() is None:
            return False
        self._on_change()
        return True

    def close(self) -> None:
        """Free everything, and end what comes."""
        with self._lock:
            holdings, self._holdings = self._holdings, {}
        for holding in holdings.values():
            if holding.stop is not None:
                holding.stop()

    def key_of(self, job_id: str) -> str:
        """Return the key of a job, "" if nothing is held for it."""
        with self._lock:
            holding = self._holdings.get(JobId(job_id))
            return holding.key if holding is not None else ""

    def held(self) -> tuple[HeldCopy, ...]:
        """Return all copies."""
        with self._lock:
            marks = [(job_id, holding.mark()) for job_id, holding in self._holdings.items()]
        return tuple(HeldCopy(j, m.generation, m.steps) for j, m in marks if m is not None)

    def mark_of(self, job_id: str) -> Mark:
        """Return the mark of the newest copy of a job; Refused if there is none."""
        with self._lock:
            return _marked(self._holding(job_id))

    @contextmanager
    def reading(self, job_id: str, mark: Mark | None) -> Iterator[tuple[memoryview, int]]:
        """Give a copy's bytes and their CRC-32, which stay what they are within the block.

        Raises:
            Refused: it is not there any more.
        """
        with self._lock:
            holding = self._holding(job_id)
            if _marked(holding) != mark or mark is None:
                raise Refused("a newer copy has come: ask again")
            slot = holding.slots[holding.newest]
            slot.users += 1
        try:
            yield slot.view(mark), slot.crc
        finally:
            with self._lock:
                slot.users -= 1

    @contextmanager
    def writing(
        self, job_id: str, mark: Mark, stop: Callable[[], None]
    ) -> Iterator[tuple[memoryview, Callable[[int], None]]]:
        """Give room for a copy, and what makes it count, to be called with its CRC-32.

        Args:
            job_id: whose.
            mark: of the copy.
            stop: ends the push, from another thread.

        Raises:
            Refused: a copy of a later group is here, another one is on its way, or is being read.
            OSError: there is not that much memory.
        """
        with self._lock:
            holding = self._holding(job_id)
            known = holding.mark()
            if known is not None and known.generation > mark.generation:
                raise Refused(
                    f"a copy of generation {known.generation} is here, this one is of "
                    f"{mark.generation}: its group is over"
                )
            if holding.stop is not None:
                if holding.coming < mark.generation:
                    holding.stop()  # What its group was is over; this one tries again at once.
                raise Refused("another copy of this job is on its way here")
            number = (holding.newest + 1) % SLOTS
            slot = holding.slots[number]
            if slot.users:
                raise Refused("the copy before is being read")
            slot.users, slot.mark = 1, None
            holding.stop, holding.coming = stop, mark.generation

        def commit(crc: int) -> None:
            with self._lock:
                slot.mark, slot.crc = mark, crc
                holding.newest = number
            self._on_change()

        try:
            yield slot.view(mark), commit
        finally:
            with self._lock:
                slot.users -= 1
                holding.stop = None

    def _holding(self, job_id: str) -> Holding:
        holding = self._holdings.get(JobId(job_id))
        if holding is None:
            raise Refused("nothing is held here for this job")
        return holding


def _marked(holding: Holding) -> Mark:
    mark = holding.mark()
    if mark is None:
        raise Refused("no copy of this job has come here yet")
    return mark


def _find(size: int) -> mmap.mmap:
    """Return so much memory, all of its pages found: a later lack would be a signal, not an error.

    Raises:
        OSError: there is not that much.
    """
    descriptor = os.memfd_create("elastic-copy", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)  # The mapping keeps it.

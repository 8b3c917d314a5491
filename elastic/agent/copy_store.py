"""Copies of other nodes' snapshots, in this agent's memory: two slots for each source of a job.

State that all members of a job share has one source. Of a sharded model every node is a source, and
its copies take the slots by the rule for snapshots on that node: so the copy that a group continues
from stays until two newer ones have come, as there.

Rule: an incoming copy never overwrites the newest complete one before it; it replaces that one
after its last byte was checked. A slot that is being read or written is not reused.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic.core.copy_messages import DropCopy
from elastic.core.facts import HeldCopy, JobId, NodeId
from elastic.errors import Refused
from elastic.runtime.snapshot_memory import SnapshotMark, check_room, slot_after

log = logging.getLogger(__name__)

JOBS_MAX = 64
"""Jobs that a node holds copies for; the coordinator distributes jobs over nodes."""
SOURCES_MAX = 64
"""Nodes whose rows of one job a node holds."""
SHARE = 0.5
"""Fraction of the available memory that copies may use: this node's own jobs have priority."""
SLOTS = 2


@dataclass
class CopySlot:
    """Memory for one copy.

    Attributes:
        memory: anonymous, used by this agent only; None before the first copy.
        mark, crc: of the complete copy in it; mark is None for none.
        users: number of present readers and writers.
    """

    memory: mmap.mmap | None = None
    mark: SnapshotMark | None = None
    crc: int = 0
    users: int = 0

    def view(self, mark: SnapshotMark) -> memoryview:
        """Return memory for a copy's bytes, allocated if needed; OSError if there is too little."""
        size = max(1, mark.num_bytes)
        if self.memory is None or len(self.memory) < size:
            check_room(size - (len(self.memory) if self.memory else 0), "a copy", SHARE)
            self.memory = _find(size)
        return memoryview(self.memory)[: mark.num_bytes]


@dataclass
class SourceCopies:
    """Copies of one source.

    Attributes:
        stop: ends the push in progress, None while there is none.
        coming: generation of that push.
    """

    slots: tuple[CopySlot, ...] = field(
        default_factory=lambda: tuple(CopySlot() for _ in range(SLOTS))
    )
    stop: Callable[[], None] | None = None
    coming: int = 0

    def mark(self) -> SnapshotMark | None:
        """Return the mark of the newest copy, None for none."""
        newest = self.newest()
        return self.slots[newest].mark if newest is not None else None

    def newest(self) -> int | None:
        """Return the slot number of the newest copy, None for none."""
        marks = [(s.mark.generation, s.mark.number, n) for n, s in enumerate(self.slots) if s.mark]
        return max(marks)[2] if marks else None

    def slot_for(self, mark: SnapshotMark, *, are_rows: bool) -> CopySlot:
        """Return where a copy goes; see `slot_after`.

        Args:
            mark: of the copy.
            are_rows: of a sharded model. Rows of greater numbers were left then because rows of
                other nodes were missing.
        """
        marks = [slot.mark for slot in self.slots]
        return self.slots[slot_after(marks, mark.number, later_count=not are_rows)]

    def end(self) -> None:
        """End the push in progress, if any."""
        if self.stop is not None:
            self.stop()


@dataclass
class JobCopies:
    """Copies of one job.

    Attributes:
        key: secret that authorizes peers to push and fetch copies.
        by_source: copies by the node whose rows they hold; "" for state that all members share.
    """

    key: str
    by_source: dict[str, SourceCopies] = field(default_factory=dict)


class CopyStore:
    """All copies on this node; every method may be called by any thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Start empty; `on_change` is called, by any thread, when the held copies change."""
        self._on_change = on_change
        self._jobs: dict[JobId, JobCopies] = {}
        self._lock = threading.Lock()

    def grant(self, job_id: JobId, key: str) -> None:
        """Hold copies for a job; peers authenticate with the key."""
        with self._lock:
            known = self._jobs.get(job_id)
            if known is not None:
                known.key = key
                return
            if len(self._jobs) >= JOBS_MAX:
                # The end of a job may have been missed while we were disconnected.
                idle = [name for name, one in self._jobs.items() if not one.by_source]
                for name in idle[:1]:
                    del self._jobs[name]
            if len(self._jobs) < JOBS_MAX:
                self._jobs[job_id] = JobCopies(key)
            else:
                log.warning("copy_refused job=%s: copies of %d jobs are held", job_id, JOBS_MAX)

    def drop(self, order: DropCopy) -> bool:
        """Free the copies of a job, or of one of its sources; returns whether any was freed."""
        job_id, source = order.job_id, order.source
        with self._lock:
            known = self._jobs.get(job_id)
            if known is None:
                return False
            named = {source} & known.by_source.keys() if source else known.by_source.keys()
            marks = [mark for one in named if (mark := known.by_source[one].mark()) is not None]
            if any(order.spares(mark.generation, mark.steps) for mark in marks):
                return False
            freed = [known.by_source.pop(one) for one in list(named)]
            if not source:
                del self._jobs[job_id]
            for holding in freed:
                holding.end()
        if all(holding.mark() is None for holding in freed):
            return False
        self._on_change()
        return True

    def close(self) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            for holding in job.by_source.values():
                holding.end()

    def key_of(self, job_id: str) -> str:
        """Return the key of a job, "" if nothing is held for it."""
        with self._lock:
            job = self._jobs.get(JobId(job_id))
            return job.key if job is not None else ""

    def held(self) -> tuple[HeldCopy, ...]:
        """Return the newest copy of every source of every job."""
        with self._lock:
            marks = [
                (job_id, source, holding.mark())
                for job_id, job in self._jobs.items()
                for source, holding in job.by_source.items()
            ]
        return tuple(
            HeldCopy(job_id, mark.generation, mark.steps, NodeId(source))
            for job_id, source, mark in marks
            if mark is not None
        )

    def list(self, job_id: str) -> tuple[tuple[str, SnapshotMark], ...]:
        """Return source and mark of every complete copy of a job."""
        with self._lock:
            job = self._jobs.get(JobId(job_id))
            sources = sorted(job.by_source.items()) if job is not None else []
            slots = [(source, slot.mark) for source, one in sources for slot in one.slots]
        return tuple((source, mark) for source, mark in slots if mark is not None)

    def has(self, job_id: str, source: str, mark: SnapshotMark) -> bool:
        """Return whether this copy is held already."""
        return (source, mark) in self.list(job_id)

    @contextmanager
    def reading(
        self, job_id: str, mark: SnapshotMark | None, source: str = ""
    ) -> Iterator[tuple[memoryview, int]]:
        """Yield a copy's bytes and their CRC-32; the bytes do not change within the block.

        Raises:
            Refused: it is not held, or was replaced.
        """
        with self._lock:
            holding = self._holding(job_id, source)
            slot = next((one for one in holding.slots if one.mark == mark), None)
            if slot is None or mark is None:
                raise Refused("a newer copy has come: ask again")
            slot.users += 1
        try:
            yield slot.view(mark), slot.crc
        finally:
            with self._lock:
                slot.users -= 1

    @contextmanager
    def writing(
        self, job_id: str, mark: SnapshotMark, stop: Callable[[], None], source: str = ""
    ) -> Iterator[tuple[memoryview, Callable[[int], None]]]:
        """Yield memory for a copy, and a `commit` function, to be called with its CRC-32.

        Raises:
            Refused: a copy of a later group is held, another one is being pushed, or the slot is
                being read.
            OSError: there is too little memory.
        """
        with self._lock:
            holding = self._holding(job_id, source, is_new=True)
            known = holding.mark()
            if known is not None and known.generation > mark.generation:
                raise Refused(
                    f"a copy of generation {known.generation} is here, this one is of "
                    f"{mark.generation}: its group is over"
                )
            if holding.stop is not None:
                if holding.coming < mark.generation:
                    holding.end()  # That push is of an ended group; this one is retried soon.
                raise Refused("another copy of this job is on its way here")
            slot = holding.slot_for(mark, are_rows=bool(source))
            if slot.users:
                raise Refused("the copy before is being read")
            slot.users, slot.mark = 1, None
            holding.stop, holding.coming = stop, mark.generation

        def commit(crc: int) -> None:
            with self._lock:
                slot.mark, slot.crc = mark, crc
            self._on_change()

        try:
            yield slot.view(mark), commit
        finally:
            with self._lock:
                slot.users -= 1
                holding.stop = None

    def _holding(self, job_id: str, source: str, *, is_new: bool = False) -> SourceCopies:
        job = self._jobs.get(JobId(job_id))
        if job is None:
            raise Refused("nothing is held here for this job")
        holding = job.by_source.get(source)
        if holding is None:
            if not is_new:
                raise Refused("no copy of this job has come here yet")
            if len(job.by_source) >= SOURCES_MAX:
                raise Refused(f"the rows of {SOURCES_MAX} nodes are held here for this job already")
            holding = job.by_source[source] = SourceCopies()
        return holding


def _find(size: int) -> mmap.mmap:
    """Return memory with all pages allocated: a later shortage would be SIGBUS, not an error.

    Raises:
        OSError: there is too little.
    """
    descriptor = os.memfd_create("elastic-copy", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)  # The mapping keeps it.

"""Memory for snapshots of training state: owned by the agent, so that it outlives the workers.

The workers of a job on this node open it under `/proc/AGENT/fd/N`, write the newest state of the
run there, and find it again after all of them have died. It is anonymous (memfd): when the agent
and the last worker are gone, the kernel frees it.

Rule: memory of a job without workers is freed: at once if its last worker exited with code 0,
otherwise `kept_s` later, because the workers may be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from elastic.core.facts import SNAPSHOT_SLOTS, ExitCause, ExitKind, JobId
from elastic.core.policy.replication import KEPT_S

log = logging.getLogger(__name__)


@dataclass
class Arena:
    """The memory of one job.

    Attributes:
        descriptors: of its slots.
        processes: numbers of the processes that may use it.
        timer: frees it; None while it is in use.
    """

    descriptors: tuple[int, ...]
    processes: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class Arenas:
    """The memory of all jobs on this node; used on the agent's event loop, except `opened`."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        """Start without memory; `kept_s` is how long memory outlives dead workers."""
        self._kept_s = kept_s
        self._arenas: dict[JobId, Arena] = {}
        # Held while descriptors are closed or duplicated: the kernel reuses closed numbers.
        self._closing = threading.Lock()

    def give(self, job_id: JobId, process_id: int) -> tuple[str, ...]:
        """Return the paths of the memory of a worker's job; empty if it could not be made."""
        arena = self._arenas.get(job_id)
        if arena is None:
            # A failure is kept too: either all workers of a job here share the memory, or none.
            arena = self._arenas[job_id] = Arena(_make_slots(job_id))
        if arena.timer is not None:
            arena.timer.cancel()
            arena.timer = None
        arena.processes.add(process_id)
        return tuple(f"/proc/{os.getpid()}/fd/{number}" for number in arena.descriptors)

    def descriptors(self, job_id: JobId) -> tuple[int, ...]:
        """Return the slots of a job's memory; empty if it has none here."""
        arena = self._arenas.get(job_id)
        return arena.descriptors if arena is not None else ()

    @contextmanager
    def opened(self, job_id: JobId) -> Iterator[tuple[int, ...]]:
        """Yield slots of a job's memory that stay open within the block; for any thread.

        Raises:
            OSError: too many files are open.
        """
        with ExitStack() as stack:
            with self._closing:
                mine = [_doubled(number, stack) for number in self.descriptors(job_id)]
            yield tuple(mine)

    def exited(self, process_id: int, cause: ExitCause) -> None:
        """Remove a process from its job; free the memory, or start its timer, after the last."""
        for job_id, arena in list(self._arenas.items()):
            if process_id not in arena.processes:
                continue
            arena.processes.remove(process_id)
            if arena.processes:
                return
            ended = cause.kind is ExitKind.CODE and cause.code == 0
            if ended:
                self._drop(job_id)
            else:
                loop = asyncio.get_running_loop()
                arena.timer = loop.call_later(self._kept_s, self._drop, job_id)

    def close(self) -> None:
        for job_id in list(self._arenas):
            self._drop(job_id)

    def _drop(self, job_id: JobId) -> None:
        with self._closing:
            arena = self._arenas.pop(job_id)
            for number in arena.descriptors:
                os.close(number)
        if arena.timer is not None:
            arena.timer.cancel()


def _doubled(number: int, stack: ExitStack) -> int:
    """Return a duplicate descriptor, which is closed with the stack."""
    own = os.dup(number)
    stack.callback(os.close, own)
    return own


def _make_slots(job_id: JobId) -> tuple[int, ...]:
    """Return descriptors of new memory, none if it cannot be made."""
    made: list[int] = []
    try:
        while len(made) < SNAPSHOT_SLOTS:
            made.append(os.memfd_create(f"elastic-{job_id}", os.MFD_CLOEXEC))
    except OSError as error:
        log.warning("no_snapshot_memory job=%s error=%r", job_id, str(error))
        for number in made:
            os.close(number)
        return ()
    return tuple(made)

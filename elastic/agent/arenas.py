"""Memory for snapshots of training state: the agent's, so that it outlives the workers.

The workers of a job on this node open it under `/proc/AGENT/fd/N`, write the newest state of the
run there, and find it again when all of them have died. It is anonymous: when the agent and the
last worker are gone, the kernel has it back.

Rule: memory of a job that nobody works on any more is given back, at once if its workers ended by
themselves or by order, a while later if they died, because then they may come back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from elastic.core.policy.replication import KEPT_S
from elastic.core.world import SNAPSHOT_SLOTS, ExitCause, ExitKind, JobId

log = logging.getLogger(__name__)


@dataclass
class Arena:
    """The memory of one job.

    Attributes:
        descriptors: of its slots.
        processes: numbers of the processes that may use it.
        timer: gives it back.
    """

    descriptors: tuple[int, ...]
    processes: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class Arenas:
    """The memory of all jobs on this node; lives on the agent's event loop, but for `opened`."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        """Have none yet."""
        self._kept_s = kept_s
        self._arenas: dict[JobId, Arena] = {}
        # Held while descriptors are closed or doubled: their numbers go to whatever is opened next.
        self._closing = threading.Lock()

    def give(self, job_id: JobId, process_id: int) -> tuple[str, ...]:
        """Return where a worker finds the memory of its job; empty if there is none to be had."""
        arena = self._arenas.get(job_id)
        if arena is None:
            # One that has no memory stays without: the workers of a node share it, or none has it.
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
        """Give slots of a job's memory that stay open within the block; for any thread.

        Raises:
            OSError: too many files are open.
        """
        with ExitStack() as stack:
            with self._closing:
                mine = [_doubled(number, stack) for number in self.descriptors(job_id)]
            yield tuple(mine)

    def exited(self, process_id: int, cause: ExitCause) -> None:
        """Take note of a process that is gone."""
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
        """Give everything back."""
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
    """Return another descriptor of the same memory, which is closed with the stack."""
    own = os.dup(number)
    stack.callback(os.close, own)
    return own


def _make_slots(job_id: JobId) -> tuple[int, ...]:
    """Return descriptors of new memory, none if it cannot be had."""
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

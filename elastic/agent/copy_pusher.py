"""Sends snapshots of this node's jobs to other nodes, in parallel with training.

Workers are not involved. Their marks in the shared memory describe each snapshot, and the agent's
marks name the snapshot that is being sent, so that the next but one is delayed rather than
overwriting it. For a sharded model workers also see which snapshots have arrived, because rows can
be used only together with all others of the same snapshot.

Rule: neither training nor the agent's event loop waits: a thread of low priority sends the bytes. A
copy that fails is reported, and retried.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio

from elastic.agent.arenas import Arenas
from elastic.agent.copy_server import end
from elastic.core.copy_messages import Replicate
from elastic.core.events.agent import PushFailed
from elastic.core.facts import JobId
from elastic.core.policy.replication import CopyMode
from elastic.core.policy.saving import SavingPlan, is_due
from elastic.errors import ElasticError
from elastic.runtime.copy_wire import PUSH, CopyRequest, calling, yield_to_training
from elastic.runtime.snapshot_memory import (
    HEADER,
    SnapshotMark,
    forget_arrived,
    set_arrived,
    set_copying,
    set_sent,
    whole,
)

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Interval for polling the marks, which is cheap: they are a few pages of shared memory."""
RETRY_S = 0.5
TIMEOUT_S = 3.0
"""How long pushes to a node may fail before that is reported, and another node requested."""


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot in this node's memory.

    Attributes:
        descriptor: of its slot; owned by the arena.
        mark: identifies the snapshot.
    """

    descriptor: int
    mark: SnapshotMark

    @property
    def age(self) -> tuple[int, int]:
        """Return a sort key that is greater for a newer snapshot."""
        return self.mark.generation, self.mark.number


class CopyPusher:
    """One task for each job that has an order; runs on the agent's event loop."""

    def __init__(self, arenas: Arenas, post: Callable[[PushFailed], None]) -> None:
        """Push nothing yet; `post` receives failures."""
        self._arenas = arenas
        self._post = post
        self._tasks: dict[JobId, tuple[Replicate, asyncio.Task[None]]] = {}
        self._sockets: dict[JobId, socket.socket] = {}
        # Jobs whose newest snapshot is pushed again; a receiver that still has it keeps it.
        self._again: set[JobId] = set()

    def order(self, order: Replicate) -> None:
        """Push snapshots of a job to the order's node from here on; without an address, stop.

        A repeated order means that the receiver may have lost the copies.
        """
        # The coordinator may know that the receiver died, which no worker knows.
        for descriptor in self._arenas.descriptors(order.job_id) if order.address else ():
            forget_arrived(descriptor)
        known = self._tasks.get(order.job_id)
        if known is not None and known[0] == order and not known[1].done():
            self._again.add(order.job_id)
            return
        self._stop(order.job_id)
        self._show(order.job_id, CopyMode.ON if order.address else CopyMode.OFF)
        if order.address:
            self._tasks[order.job_id] = order, asyncio.ensure_future(self._run(order))

    def close(self) -> None:
        """Stop all pushes."""
        for job_id in list(self._tasks):
            self._stop(job_id)

    def _stop(self, job_id: JobId) -> None:
        self._again.discard(job_id)
        known = self._tasks.pop(job_id, None)
        if known is not None:
            known[1].cancel()
        sock = self._sockets.pop(job_id, None)
        if sock is not None:
            end(sock)

    def _show(self, job_id: JobId, bringing: CopyMode) -> None:
        """Show the workers whether their snapshots are copied to another node."""
        for descriptor in self._arenas.descriptors(job_id):
            set_copying(descriptor, bringing)

    async def _run(self, order: Replicate) -> None:
        """Poll for snapshots newer than the last one pushed, and push them when due."""
        last: SnapshotMark | None = None
        failing_since, is_reported = 0.0, False
        while True:
            await anyio.sleep(RETRY_S if failing_since else POLL_S)
            slots = self._arenas.descriptors(order.job_id)
            if not slots:
                return  # The job has left this node; its next group comes with a new order.
            if order.job_id in self._again:
                self._again.discard(order.job_id)
                last = None
            found = newest(slots)
            if found is None or not _is_due(order, found.mark, last):
                continue
            if found.mark.generation < order.generation:
                continue
            try:
                # The arena may close its own while a thread still reads.
                descriptor, mark = os.dup(found.descriptor), found.mark
                if await in_thread(partial(self._push, order, descriptor, mark)):
                    last = mark
                if is_reported:
                    self._show(order.job_id, CopyMode.ON)
                failing_since, is_reported = 0.0, False
            except Exception as error:
                if not isinstance(error, (ElasticError, OSError, ValueError)):
                    # A bug on this path must not end the run's replication silently.
                    log.exception("copy_failed job=%s", order.job_id)
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since >= TIMEOUT_S:
                    failing_since = now
                    self._report_failure(order, str(error), is_new=not is_reported)
                    self._show(order.job_id, CopyMode.OFF)
                    is_reported = True

    def _report_failure(self, order: Replicate, reason: str, *, is_new: bool) -> None:
        """Report a failure to the coordinator repeatedly, as reports may be lost; log it once."""
        if is_new:
            log.warning(
                "copy_failed job=%s node=%s reason=%r: tried again, unless the coordinator knows "
                "a better node",
                order.job_id, order.node_id, reason,
            )  # fmt: skip
        self._post(PushFailed(order.job_id, order.node_id, reason))

    def _push(self, order: Replicate, descriptor: int, mark: SnapshotMark) -> bool:
        """Send one snapshot; returns whether it has arrived. Runs in a thread of its own.

        False means that it was overwritten meanwhile, which is no error.

        Args:
            order: names the receiver.
            descriptor: of its memory; closed here.
            mark: identifies the snapshot.
        """
        yield_to_training()
        began, begun = time.monotonic(), partial(self._begun, order)
        try:
            set_sent(descriptor, mark.number)
            with (
                mmap.mmap(descriptor, HEADER + mark.num_bytes, prot=mmap.PROT_READ) as memory,
                memoryview(memory) as everything,
                everything[HEADER:] as body,
                calling(order.address, begun) as line,
            ):
                request = CopyRequest(PUSH, order.job_id, mark, order.source)

                def is_whole() -> bool:
                    return mark.is_with(whole(os.pread(descriptor, HEADER, 0)))

                if line.request(request, order.key).mark is None:  # Otherwise the receiver has it.
                    if not line.send_body(order.key, body, is_whole):
                        return False
                    line.read_answer(order.key)
                known = self._tasks.get(order.job_id)
                if known is not None and known[0] is order:  # A replaced order does not count.
                    set_arrived(descriptor, mark)
        finally:
            set_sent(descriptor, 0)
            os.close(descriptor)
        log.info(
            "copy_sent job=%s node=%s generation=%d steps=%d bytes=%d ms=%.0f",
            order.job_id, order.node_id, mark.generation, mark.steps, mark.num_bytes,
            (time.monotonic() - began) * 1e3,
        )  # fmt: skip
        return True

    def _begun(self, order: Replicate, sock: socket.socket) -> None:
        """Register the connection for `_stop`; end it at once if its order was replaced."""
        self._sockets[order.job_id] = sock
        known = self._tasks.get(order.job_id)
        if known is None or known[0] is not order:
            self._sockets.pop(order.job_id, None)
            end(sock)


def newest(descriptors: tuple[int, ...]) -> FoundSnapshot | None:
    """Return the newest complete snapshot in these slots, None if there is none."""
    found = []
    for descriptor in descriptors:
        mark = whole(os.pread(descriptor, HEADER, 0))
        if mark is not None:
            found.append(FoundSnapshot(descriptor, mark))
    return max(found, key=lambda one: one.age, default=None)


def _is_due(order: Replicate, mark: SnapshotMark, last: SnapshotMark | None) -> bool:
    """Return whether a snapshot is to be pushed, by the user's interval; the first always is."""
    if last is None or mark.generation != last.generation:
        return True
    if order.source:  # Of a sharded model every snapshot: the next one waits for it.
        return mark.steps != last.steps
    plan = SavingPlan(every_n_steps=max(1, order.every_n_steps))
    return is_due(plan, steps=mark.steps, last_steps=last.steps, waited_s=0.0).value


async def in_thread(work: Callable[[], bool]) -> bool:
    """Run `work` in a daemon thread, which does not delay the agent's exit; return its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()

    def settle(value: bool, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def run() -> None:
        value, error = False, None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="elastic-push", daemon=True).start()
    return await future

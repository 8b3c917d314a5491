"""What waits for the coordinator's machine: events in order, and a tick where its deadline is due.

Rule: all events that wait are taken together, because one evaluation of a group is enough for them.
"""

from __future__ import annotations

import asyncio

import anyio

from elastic.core.events.coordinator import CoordinatorEvent, EventBatch
from elastic.core.events.shared import Tick
from elastic.runtime.clock import Clock

TICK_PAUSE_S = 0.001
"""A machine whose deadline stays in the past is stepped again after this, not at once."""


class EventQueue:
    """The events of one term, for one task that takes them."""

    def __init__(self, clock: Clock, events_max: int) -> None:
        """Begin empty.

        Args:
            clock: of the machine's deadlines.
            events_max: how many may wait; the sender of one more waits for room.
        """
        self._clock = clock
        self._queue: asyncio.Queue[tuple[CoordinatorEvent, bool]] = asyncio.Queue()
        self._room = asyncio.Semaphore(events_max)
        self._just_ticked = False
        # The events that came before the due deadline have been processed.
        self._is_tick_next = False

    async def put(self, event: CoordinatorEvent) -> None:
        """Add an event once there is room for it."""
        await self._room.acquire()
        self._queue.put_nowait((event, True))

    def put_at_once(self, event: CoordinatorEvent) -> None:
        """Add an event that must not wait for room; there are few of this kind."""
        self._queue.put_nowait((event, False))

    async def next(self, deadline_ns: int | None) -> CoordinatorEvent:
        """Return all queued events, or a `Tick` when the machine's deadline comes first.

        A tick comes after all events queued when its deadline came: messages in time must count,
        or a peer would be blamed for our own slowness. But it comes before later events: a flood
        of them must not delay a deadline.
        """
        if deadline_ns is None:
            return self._taken(await self._queue.get())
        wait_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        if wait_s > 0:
            self._is_tick_next = False
        elif not self._just_ticked:
            if not self._is_tick_next and not self._queue.empty():
                self._is_tick_next = True
                return self._taken(self._queue.get_nowait())
            self._is_tick_next, self._just_ticked = False, True
            return Tick()
        if self._queue.empty():
            with anyio.move_on_after(max(wait_s, TICK_PAUSE_S)):
                self._just_ticked = False
                return self._taken(await self._queue.get())
            self._just_ticked = True
            return Tick()
        self._just_ticked = False
        return self._taken(self._queue.get_nowait())

    def _taken(self, item: tuple[CoordinatorEvent, bool]) -> CoordinatorEvent:
        """Return this event in a batch with all that are queued behind it."""
        items = [item, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        for _, is_counted in items:
            if is_counted:
                self._room.release()
        return EventBatch(tuple(event for event, _ in items)) if len(items) > 1 else item[0]

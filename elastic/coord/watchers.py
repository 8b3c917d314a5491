"""Clients that follow a job: they receive its events, and wake when its view may have changed.

Rule: sending never blocks. A client that reads too slowly loses its oldest events and receives
their number. Views are made when it reads, so that it never gets an old one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from elastic.core.events.coordinator import (
    AgentMessageReceived,
    CoordinatorEffect,
    CoordinatorEvent,
    EventBatch,
    Persist,
)
from elastic.core.events.shared import Note
from elastic.core.facts import JobId
from elastic.core.messages import Reported, WorkerUpdate
from elastic.runtime.clock import Clock
from elastic.wire.codec_jobs import TimedNote

NOTES_MAX = 1000
UNPUBLISHED = frozenset({"report"})
"""Events not kept in the history: there may be one a second, and the run directory has them."""


class Watcher:
    """One follower of one job."""

    def __init__(self, on_note: Callable[[], None]) -> None:
        """Start without notes.

        Args:
            on_note: called at each note, for a follower that also waits for something else.
        """
        self._on_note = on_note
        self._notes: deque[TimedNote] = deque()
        self._dropped = 0
        self._awake = anyio.Event()

    def put(self, note: TimedNote) -> None:
        """Queue a note; drop the oldest one if the queue is full."""
        if len(self._notes) >= NOTES_MAX:
            self._notes.popleft()
            self._dropped += 1
        self._notes.append(note)
        self._awake.set()
        self._on_note()

    def wake(self) -> None:
        """End `wait`: the job's view may have changed."""
        self._awake.set()

    def take(self) -> list[TimedNote]:
        """Return the notes since the last call, with one more if notes were dropped."""
        notes = list(self._notes)
        self._notes.clear()
        if self._dropped and notes:
            lost = Note("notes_dropped", notes[0].note.job_id, (("number", str(self._dropped)),))
            notes.insert(0, TimedNote(lost, notes[0].unix_ns))
            self._dropped = 0
        return notes

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something new, at most this long."""
        with anyio.move_on_after(timeout_s):
            await self._awake.wait()
        self._awake = anyio.Event()


class Watchers:
    """All followers, by job."""

    def __init__(self, clock: Clock) -> None:
        """Start with none; `clock` gives the timestamps of notes."""
        self._clock = clock
        self._by_job: dict[JobId, list[Watcher]] = {}
        self._listeners: list[Callable[[TimedNote], None]] = []
        self._history: dict[JobId, deque[TimedNote]] = {}
        self._last_ns: dict[JobId, int] = {}

    def listen(self, listener: Callable[[TimedNote], None]) -> None:
        """Call a function with each note of any job, permanently."""
        self._listeners.append(listener)

    @contextmanager
    def subscribe(
        self, job_id: JobId, on_note: Callable[[], None] = lambda: None
    ) -> Iterator[Watcher]:
        """Follow a job during a `with` block."""
        watcher = Watcher(on_note)
        self._by_job.setdefault(job_id, []).append(watcher)
        try:
            yield watcher
        finally:
            followers = self._by_job[job_id]
            followers.remove(watcher)
            if not followers:
                del self._by_job[job_id]

    def publish(self, note: Note) -> None:
        """Pass a note to the watchers of its job and to all listeners, and keep it."""
        job_id = JobId(note.job_id)
        if not job_id:
            timed = TimedNote(note, self._clock.unix_ns())
            for listener in self._listeners:
                listener(timed)
            return
        # Timestamps are unique within a job, so they identify its notes.
        unix_ns = max(self._clock.unix_ns(), self._last_ns.get(job_id, 0) + 1)
        timed = TimedNote(note, unix_ns)
        self._last_ns[job_id] = unix_ns
        if note.name not in UNPUBLISHED:
            self._history.setdefault(job_id, deque(maxlen=NOTES_MAX)).append(timed)
        for listener in self._listeners:
            listener(timed)
        for watcher in self._by_job.get(job_id, ()):
            watcher.put(timed)

    def history(self, job_id: JobId) -> tuple[TimedNote, ...]:
        """Return the kept notes of a job in this term, oldest first."""
        return tuple(self._history.get(job_id, ()))

    def forget(self, job_ids: Iterable[JobId]) -> None:
        """Drop the notes of jobs that ended long ago."""
        for job_id in job_ids:
            self._history.pop(job_id, None)
            self._last_ns.pop(job_id, None)

    def wake(self, job_ids: Iterable[JobId]) -> None:
        if not self._by_job:
            return
        for job_id in job_ids:
            for watcher in self._by_job.get(job_id, ()):
                watcher.wake()


def jobs_of(event: CoordinatorEvent, effects: Sequence[CoordinatorEffect]) -> Iterator[JobId]:
    """Return the jobs whose view may have changed in a step; some may come twice."""
    for one in event.events if isinstance(event, EventBatch) else (event,):
        if isinstance(one, AgentMessageReceived) and isinstance(
            one.message, (WorkerUpdate, Reported)
        ):
            yield one.message.report.job_id
    for effect in effects:
        if isinstance(effect, Persist):
            yield from (record.spec.job_id for record in effect.records)
        elif isinstance(effect, Note) and effect.job_id:
            yield JobId(effect.job_id)

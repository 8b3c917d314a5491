"""The driver: one task that owns the coordinator's state machine and performs its effects.

Rule: events enter one queue and are processed in order, all queued ones in one batch. Effects are
performed in order, and none after a `Persist` before it is durable. All other code uses the
queue, the sessions or the watchers, never the machine; only `view` reads it, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import anyio

from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.journal import Journal
from elastic.coord.leadership import SLOW_S, retry_until_available
from elastic.coord.payload_upload import PayloadUploads
from elastic.coord.run_history import RunHistory
from elastic.coord.sessions import Session, Sessions
from elastic.coord.suspend_detector import watch_suspends
from elastic.coord.watchers import Watchers, jobs_of
from elastic.core.cluster_messages import Coordinators
from elastic.core.config import JobSpec
from elastic.core.events.coordinator import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    CloseSession,
    CoordinatorEffect,
    CoordinatorEvent,
    EventBatch,
    Forget,
    Persist,
    PersistNodes,
    Recovered,
    Reply,
    SendAgent,
    SubmitRequested,
    WokeFromSuspend,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.messages import AgentMessage, Hello, Welcome
from elastic.core.view import ClusterView, JobSample
from elastic.core.world import JobId, Member
from elastic.errors import Unavailable
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import EventLog, note_text
from elastic.runtime.exposition import Histogram

log = logging.getLogger(__name__)

EVENTS_MAX = 4096
"""Messages and requests that wait for the machine. The sender of one more waits in its own
stream, where gRPC's flow control stops it."""
SECRET_BYTES = 32
TICK_PAUSE_S = 0.001
"""A machine whose deadline stays in the past is stepped again after this, not at once."""
GATHER_S_MIN, GATHER_S_MAX = 0.005, 0.05
"""After a step that took longer than the first, the driver waits as long as the step took, the
second at most."""
RETURN_GATHER, RETURN_GATHER_S_MAX = 4, 0.3
"""After a step with only connecting agents it waits so many times as long, up to the second."""
MANY_SESSIONS = 500
"""From this many on it always waits at least GATHER_S_MIN: similar messages come in thousands."""


class Machine(Protocol):
    """What the driver needs of the coordinator's state machine."""

    def step(self, event: CoordinatorEvent, now_ns: int) -> tuple[CoordinatorEffect, ...]:
        """Process one event, return the effects to perform."""
        ...

    def next_deadline_ns(self) -> int | None:
        """Return the latest time for the next step with a `Tick`, None for no deadline."""
        ...

    def view(self, now_ns: int) -> ClusterView:
        """Return all that the status shows."""
        ...

    def samples(self) -> tuple[JobSample, ...]:
        """Return what the history keeps of each job."""
        ...

    def first_member(self, job_id: JobId) -> Member | None:
        """Return rank 0 of a job's group, None while it has no group that trains."""
        ...


class Driver:
    """Runs a machine: events in, effects out.

    Attributes:
        sessions: the agents' streams.
        watchers: subscriptions to jobs.
        commits: seconds until records were durable.
    """

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        clock: Clock,
        *,
        event_log: EventLog | None = None,
        events_max: int = EVENTS_MAX,
    ) -> None:
        """Own the machine; nothing happens before `run`, nor while another process may lead."""
        self.sessions = Sessions()
        self.watchers = Watchers(clock)
        self.commits = Histogram()
        self._history = RunHistory(self.watchers, self.sessions, machine.first_member)
        self._machine = machine
        self._journal = journal
        self._clock = clock
        self._event_log = event_log
        self._queue: asyncio.Queue[tuple[CoordinatorEvent, bool]] = asyncio.Queue()
        self._room = asyncio.Semaphore(events_max)
        self._staging = PayloadUploads(journal, clock, self._knows)
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._requests = 0
        self._view: ClusterView | None = None
        self._persisting_since_ns = 0
        self._just_ticked = False
        # The events that came before the due deadline have been processed.
        self._is_tick_next = False
        # Duration of the machine's last step.
        self._took_s = 0.0
        # Whether the last step had only connecting agents.
        self._copied_agents = False
        self._recovered = anyio.Event()
        self._coordinators: Coordinators | None = None

    async def run(self) -> None:
        """Load the journal and run the machine; never returns.

        Raises:
            Fenced: another coordinator leads.
            CorruptRecord: the journal cannot be read.
            InvariantViolation: a bug; includes the recent events.
        """
        journal = self._journal
        records = await retry_until_available("the journal", journal.load, self._clock)
        secret = secrets.token_bytes(SECRET_BYTES)
        unix_ns = self._clock.unix_ns()
        await self._step(
            Recovered(records, journal.term, journal.history, journal.nodes, secret, unix_ns)
        )
        self._recovered.set()
        await self._journal.forget()
        staging = asyncio.ensure_future(self._staging.run())
        # A tick, so that its failure is noticed at once, not at the next event.
        staging.add_done_callback(lambda _: self._queue.put_nowait((Tick(), False)))
        suspends = asyncio.ensure_future(watch_suspends(self._woke))
        try:
            while True:
                event = await self._next_event()
                if staging.done():
                    staging.result()
                await self._step(event)
                await self._gather()
        finally:
            suspends.cancel()
            staging.cancel()
            with anyio.CancelScope(shield=True):
                # No write of this term may be under way in the next one.
                await asyncio.wait([staging])

    async def wait_recovered(self) -> None:
        """Wait until the machine has processed the loaded journal."""
        await self._recovered.wait()

    def has_recovered(self) -> bool:
        """Return whether the machine has processed the journal; before, its view is empty."""
        return self._recovered.is_set()

    # ------------------------------------------------------------ inputs

    async def connect(self, session: Session, hello: Hello) -> None:
        """Queue an agent's Hello; the agent is registered when the machine sends Welcome."""
        session.node_id = hello.node.node_id
        await self._post(AgentConnected(session.session_id, hello))

    async def receive(self, session: Session, message: AgentMessage) -> None:
        """Queue an agent's message; wait while the queue is full."""
        await self._post(AgentMessageReceived(session.session_id, message))

    def disconnect(self, session: Session, reason: str) -> None:
        """Queue the end of a stream. Never waits; only the first call for a session counts."""
        if self.sessions.end(session, reason):
            # Exceeds the limit, but at most once per session: an end must not wait for room.
            event = AgentDisconnected(session.session_id, session.reason)
            self._queue.put_nowait((event, False))

    async def request(self, make: Callable[[str], CoordinatorEvent]) -> Reply:
        """Queue a user's request and wait for the machine's reply.

        Args:
            make: builds the event from the request's id.
        """
        self._requests += 1
        request_id = f"r{self._requests}"
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        try:
            await self._post(make(request_id))
            return await future
        finally:
            del self._replies[request_id]

    async def submit(self, spec: JobSpec, submitter: str) -> Reply:
        """Submit a job to the machine, and wait for its reply.

        A large function is stored before the machine gets the job: storing its pieces takes many
        writes, which would delay all other decisions. But the machine is asked first whether it
        would refuse the job: without compaction, every write takes space in etcd for ever.

        Args:
            spec: with an id.
            submitter: the name of the user who submits it.

        Raises:
            Unavailable: the term ended before.
        """
        job_id, payload = spec.job_id, spec.entry.payload
        if len(payload) <= PIECE_BYTES or self._knows(job_id):
            return await self.request(lambda number: SubmitRequested(number, spec, submitter))
        self._staging.check_open()
        small = replace(spec, entry=replace(spec.entry, payload=b""))
        checked = await self.request(
            lambda number: SubmitRequested(number, small, submitter, dry_run=True)
        )
        if checked.error:
            return checked
        is_taken = False
        with self._staging.held(job_id):
            try:
                await self._staging.stage(job_id, payload)
                reply = await self.request(lambda number: SubmitRequested(number, spec, submitter))
                is_taken = not reply.error
                return reply
            finally:
                if not is_taken:
                    self._staging.drop(job_id)

    def report_coordinators(self, addresses: tuple[str, ...]) -> None:
        """Send the coordinators' addresses to every agent, also to those that connect later."""
        self._coordinators = Coordinators(addresses)
        for session in self.sessions.registered():
            session.send(self._coordinators)

    def end(self, why: str, *, at_once: bool) -> None:
        """End the term: close all sessions, and fail the requests that still wait.

        Args:
            why: for both.
            at_once: discard queued messages to agents: another process may lead already.
        """
        self.sessions.close_all(why, at_once=at_once)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(Unavailable(f"{why}; the request may still take effect"))

    def view(self) -> ClusterView:
        """Return the machine's state now; ages count from `view().now_ns`.

        While a `Persist` waits for the store, this is the state that is not durable yet.
        """
        now_ns = self._clock.monotonic_ns()
        if self._view is None:
            self._view = self._machine.view(now_ns)
        return replace(self._view, now_ns=now_ns)

    def samples(self) -> tuple[JobSample, ...]:
        """Return what the history keeps of each job now."""
        return self._machine.samples()

    def waits_for_store(self) -> str:
        """Return "waiting for the store since 12 s", "" when nothing waits for long."""
        since_ns = self._persisting_since_ns
        waited_s = (self._clock.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0
        return f"waiting for the store since {waited_s:.0f} s" if waited_s >= SLOW_S else ""

    def _knows(self, job_id: JobId) -> bool:
        return any(job.record.spec.job_id == job_id for job in self.view().jobs)

    # ------------------------------------------------------------ the owner task

    def _woke(self, slept_ns: int) -> None:
        self._queue.put_nowait((WokeFromSuspend(slept_ns), False))

    async def _post(self, event: CoordinatorEvent) -> None:
        await self._room.acquire()
        self._queue.put_nowait((event, True))

    async def _next_event(self) -> CoordinatorEvent:
        """Return all queued events, or a `Tick` when the machine's deadline comes first.

        A tick comes after all events queued when its deadline came: messages in time must count,
        or a peer would be blamed for our own slowness. But it comes before later events: a flood
        of them must not delay a deadline.
        """
        deadline_ns = self._machine.next_deadline_ns()
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

    async def _gather(self) -> None:
        """Wait after a slow step, so that more events gather for the next one.

        In a large cluster each evaluation of a group is slow, and one is enough for all messages
        that came meanwhile: for a thousand agents that reconnect it would run a thousand times.
        """
        if self._took_s >= GATHER_S_MIN and self._copied_agents:
            await anyio.sleep(min(RETURN_GATHER * self._took_s, RETURN_GATHER_S_MAX))
        elif self._took_s >= GATHER_S_MIN or len(self.sessions) >= MANY_SESSIONS:
            await anyio.sleep(min(max(self._took_s, GATHER_S_MIN), GATHER_S_MAX))

    async def _step(self, event: CoordinatorEvent) -> None:
        self._journal.check_leader_state()
        began_ns = self._clock.monotonic_ns()
        self._copied_agents = _is_arrival(event)
        effects = self._machine.step(event, began_ns)
        self._took_s = (self._clock.monotonic_ns() - began_ns) / 1e9
        self._view = None
        for effect in effects:
            if isinstance(effect, SendAgent):  # There may be ten thousand.
                self._send(effect)
            else:
                await self._perform(effect)
        self.watchers.wake(jobs_of(event, effects))

    async def _perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Note):
            self._publish(effect)
        elif isinstance(effect, Persist):
            await self._persist(effect)
        elif isinstance(effect, PersistNodes):
            self._persisting_since_ns = self._clock.monotonic_ns()
            record = effect.record
            await retry_until_available(
                "the nodes", lambda: self._journal.write_nodes(record), self._clock
            )
            self._persisting_since_ns = 0
        elif isinstance(effect, Reply):
            future = self._replies.get(effect.request_id)
            if future is not None and not future.done():
                future.set_result(effect)
        elif isinstance(effect, CloseSession):
            session = self.sessions.find(effect.session)
            if session is not None:
                session.close(effect.reason)
        elif isinstance(effect, Forget):
            self.watchers.forget(effect.job_ids)
            self._history.forget(effect.job_ids)
            await self._journal.forget(effect.job_ids)

    def _send(self, effect: SendAgent) -> None:
        session = self.sessions.find(effect.session)
        if session is None:
            return
        self._journal.check_leader_state()
        session.send(effect.message)
        self._history.sent(effect)
        if isinstance(effect.message, Welcome):
            self.sessions.register(session)
            if self._coordinators is not None:
                session.send(self._coordinators)

    def _publish(self, note: Note) -> None:
        log.info("%s", note_text(note))
        if self._event_log is not None:
            self._event_log.write(note)
        self.watchers.publish(note)
        self._history.send_new(JobId(note.job_id))

    async def _persist(self, effect: Persist) -> None:
        """Write the records and return when they are durable, however long that takes."""
        self._persisting_since_ns = self._clock.monotonic_ns()
        await retry_until_available(
            "a record", lambda: self._journal.write(effect.records), self._clock
        )
        self.commits.add((self._clock.monotonic_ns() - self._persisting_since_ns) / 1e9)
        self._persisting_since_ns = 0


def _is_arrival(event: CoordinatorEvent) -> bool:
    """Return whether the event has only connecting agents."""
    events = event.events if isinstance(event, EventBatch) else (event,)
    return all(isinstance(one, AgentConnected) for one in events)

"""The driver: one task that owns the coordinator's state machine and performs its effects.

Rule: events enter one queue and are processed in order, all queued ones in one batch. Effects are
performed in order, and none after a `Persist` before it is durable. All other code uses the
queue, the sessions or the watchers, never the machine; only `view` reads it, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import anyio

from elastic.coord.chunks import PIECE_BYTES
from elastic.coord.event_queue import EventQueue
from elastic.coord.journal import Journal
from elastic.coord.leadership import SLOW_S, retry_until_available
from elastic.coord.payload_upload import PayloadUploads
from elastic.coord.run_history import RunHistory
from elastic.coord.sessions import Session, Sessions
from elastic.coord.suspend_detector import watch_suspends
from elastic.coord.watchers import Watchers, jobs_of
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
from elastic.core.facts import JobId
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.core.messages import AgentMessage, Coordinators, Hello, Welcome
from elastic.core.view import ClusterView, JobSample
from elastic.errors import Unavailable
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import EventLog, note_text
from elastic.runtime.exposition import Histogram

log = logging.getLogger(__name__)

EVENTS_MAX = 4096
"""Messages and requests that wait for the machine. The sender of one more waits in its own
stream, where gRPC's flow control stops it."""
SECRET_BYTES = 32
GATHER_S_MIN, GATHER_S_MAX = 0.005, 0.05
"""After a step that took longer than the first, the driver waits as long as the step took, the
second at most."""
RETURN_GATHER, RETURN_GATHER_S_MAX = 4, 0.3
"""After a step with only connecting agents it waits so many times as long, up to the second."""
MANY_SESSIONS = 500
"""From this many on it always waits at least GATHER_S_MIN: similar messages come in thousands."""


class _Requests:
    """The requests of users that wait for the machine's replies, by their ids."""

    def __init__(self) -> None:
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._made = 0

    @contextmanager
    def waiting(self) -> Iterator[tuple[str, asyncio.Future[Reply]]]:
        """Enter a wait for a reply; yields the request's id and where the reply comes."""
        self._made += 1
        request_id = f"r{self._made}"
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        try:
            yield request_id, future
        finally:
            del self._replies[request_id]

    def answer(self, reply: Reply) -> None:
        """Hand a reply to who waits for it, if anybody still does."""
        future = self._replies.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, why: str) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(Unavailable(f"{why}; the request may still take effect"))


class Driver:
    """Runs a machine: events in, effects out.

    Attributes:
        sessions: the agents' streams.
        watchers: subscriptions to jobs.
        commits: seconds until records were durable.
    """

    def __init__(
        self,
        machine: CoordinatorMachine,
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
        self._events = EventQueue(clock, events_max)
        self._requests = _Requests()
        self._staging = PayloadUploads(journal, clock, self._knows)
        self._view: ClusterView | None = None
        self._persisting_since_ns = 0
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
        staging.add_done_callback(lambda _: self._events.put_at_once(Tick()))
        suspends = asyncio.ensure_future(
            watch_suspends(lambda slept_ns: self._events.put_at_once(WokeFromSuspend(slept_ns)))
        )
        try:
            while True:
                event = await self._events.next(self._machine.next_deadline_ns())
                if staging.done():
                    staging.result()
                took_s = await self._step(event)
                await self._gather(took_s, only_arrivals=_is_arrival(event))
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
        await self._events.put(AgentConnected(session.session_id, hello))

    async def receive(self, session: Session, message: AgentMessage) -> None:
        """Queue an agent's message; wait while the queue is full."""
        await self._events.put(AgentMessageReceived(session.session_id, message))

    def disconnect(self, session: Session, reason: str) -> None:
        """Queue the end of a stream. Never waits; only the first call for a session counts."""
        if self.sessions.end(session, reason):
            # Exceeds the limit, but at most once per session: an end must not wait for room.
            self._events.put_at_once(AgentDisconnected(session.session_id, session.reason))

    async def request(self, make: Callable[[str], CoordinatorEvent]) -> Reply:
        """Queue a user's request and wait for the machine's reply.

        Args:
            make: builds the event from the request's id.
        """
        with self._requests.waiting() as (request_id, reply):
            await self._events.put(make(request_id))
            return await reply

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
        self._requests.fail(why)

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

    async def _gather(self, took_s: float, *, only_arrivals: bool) -> None:
        """Wait after a slow step, so that more events gather for the next one.

        In a large cluster each evaluation of a group is slow, and one is enough for all messages
        that came meanwhile: for a thousand agents that reconnect it would run a thousand times.

        Args:
            took_s: how long the machine took.
            only_arrivals: the step had only connecting agents.
        """
        if took_s >= GATHER_S_MIN and only_arrivals:
            await anyio.sleep(min(RETURN_GATHER * took_s, RETURN_GATHER_S_MAX))
        elif took_s >= GATHER_S_MIN or len(self.sessions) >= MANY_SESSIONS:
            await anyio.sleep(min(max(took_s, GATHER_S_MIN), GATHER_S_MAX))

    async def _step(self, event: CoordinatorEvent) -> float:
        """Do what the machine decides; returns how many seconds it took to decide."""
        self._journal.check_leader_state()
        began_ns = self._clock.monotonic_ns()
        effects = self._machine.step(event, began_ns)
        took_s = (self._clock.monotonic_ns() - began_ns) / 1e9
        self._view = None
        for effect in effects:
            if isinstance(effect, SendAgent):  # There may be ten thousand.
                self._send(effect)
            else:
                await self._perform(effect)
        self.watchers.wake(jobs_of(event, effects))
        return took_s

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
            self._requests.answer(effect)
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

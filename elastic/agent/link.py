"""The agent's stream to the coordinator: one attempt per `Connect`, over a list of endpoints.

Rule: the state machine decides when to retry; this module performs `Connect`, `Disconnect` and
`SendCoordinator`, and posts what happened. Requests for logs and learned endpoints of coordinators
bypass the machine (`on_follow`, `send_lines`, `on_learned`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from elastic.agent.leader_discovery import HOPELESS, find_leader
from elastic.agent.outbox import Outbox
from elastic.core.config import NS_PER_S, ns
from elastic.core.events.agent import (
    AgentEvent,
    Connected,
    ConnectionLost,
    CoordinatorMessageReceived,
)
from elastic.core.facts import SessionId
from elastic.core.messages import AgentMessage, Coordinators, FollowLogs, LogLines, Refusal, Welcome
from elastic.errors import (
    ConfigError,
    CoordinatorUnreachable,
    ElasticError,
)
from elastic.runtime.access import Access
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import quoted
from elastic.runtime.rpc import SILENCE_S, plain_addresses
from elastic.runtime.stream import ClientStream
from elastic.wire.codec_stream import FROM_AGENT, TO_AGENT

log = logging.getLogger(__name__)

LEARNED_MAX = 8
"""How many endpoints learned from coordinators are kept beside the configured ones; the newest."""
FIRST_ANSWER_S_MAX = 30.0
"""Timeout for the first reply on a new stream. Long, because the coordinator may have ten thousand
agents to answer at once, and every reconnect delays it further for all."""
REMIND_S = 30.0
"""How often an unchanged reason for waiting is logged again."""


@dataclass(frozen=True, kw_only=True)
class LinkCallbacks:
    """Callbacks of the link; all are called on the event loop.

    Attributes:
        post: receives events for the machine.
        on_follow: receives requests for logs.
        on_end: called when a stream has ended.
        draw: returns a number from 0.0 to 1.0, the jitter of the next pause.
        on_learned: receives the endpoints beside the configured ones, when they change.
    """

    post: Callable[[AgentEvent], None]
    on_follow: Callable[[FollowLogs], None]
    on_end: Callable[[], None]
    draw: Callable[[], float]
    on_learned: Callable[[tuple[str, ...]], None] = lambda endpoints: None


class Link:
    """At most one stream at a time, to one of the coordinator's endpoints."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        learned: Sequence[str] = (),
        access: Access,
        callbacks: LinkCallbacks,
        clock: Clock,
    ) -> None:
        """Open no connection yet.

        Args:
            endpoints: "host:port" of every coordinator that may lead, in order of preference.
            learned: more endpoints, which an earlier run of this agent learned from a coordinator.
            access: credentials; read again for each connection.
            callbacks: receive events, requests and learned endpoints.
            clock: measures how long the agent has waited.
        """
        self._named = tuple(endpoints)
        self._learned = tuple(name for name in learned if name not in self._named)[:LEARNED_MAX]
        self._endpoints = (*self._named, *self._learned)
        self._access = access
        self._callbacks = callbacks
        self._session = SessionId("")
        self._outbox = Outbox()
        self._task: asyncio.Task[None] | None = None
        self._ever_welcomed = False
        self._silence_s = SILENCE_S
        self._complaint = WaitLogger(clock)

    def connect(self, session: SessionId) -> None:
        """Open a stream with this session id; an earlier stream is dropped."""
        self._drop()
        self._session = session
        self._outbox = Outbox()
        self._task = asyncio.ensure_future(self._run(session, self._outbox))

    def disconnect(self, session: SessionId) -> None:
        """Drop the stream; no further event is posted for it."""
        if session == self._session:
            self._drop()

    def send(self, session: SessionId, message: AgentMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if session != self._session or self._outbox.put(message) or self._task is None:
            return
        # The Hello of the next connection carries the full state, so reconnecting loses nothing.
        log.warning("coordinator_does_not_read session=%s", session)
        self._drop()
        reason = "the coordinator does not read what this agent sends"
        self._callbacks.post(ConnectionLost(session, reason, self._callbacks.draw()))

    async def send_lines(self, lines: LogLines) -> bool:
        """Send output when there is room; False when the stream that requested it has ended."""
        return await self._outbox.put_lines(lines)

    async def close(self, timeout_s: float) -> None:
        """Send queued messages and end the stream cleanly, within the timeout."""
        task = self._task
        if task is None:
            return
        self._outbox.finish()
        await asyncio.wait([task], timeout=timeout_s)
        self._drop()
        await asyncio.wait([task], timeout=timeout_s)

    def _drop(self) -> None:
        self._outbox.close()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._callbacks.on_end()

    # -------------------------------------------------------------------------- one session

    async def _run(self, session: SessionId, outbox: Outbox) -> None:
        """Open the stream, carry messages until it breaks, and post why."""
        try:
            stream = await self._open()
            try:
                self._callbacks.post(Connected(session))
                reason = await self._converse(session, stream, outbox)
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.close()
        except HOPELESS as error:
            reason = str(error)
            if not self._ever_welcomed:
                # An agent that was accepted before retries: its token file may be corrected.
                self._callbacks.post(
                    CoordinatorMessageReceived(session, Refusal(reason, final=True))
                )
                return
        except ElasticError as error:
            reason = str(error)
            if not isinstance(error, CoordinatorUnreachable):
                self._prefer_next()  # It replies but does not accept us: it may not lead now.
        except Exception as error:
            # A bug on this path must not end the agent of running workers: log it, and retry.
            log.exception("link_failed session=%s", session)
            reason = f"{type(error).__name__}: {error}"
        outbox.close()
        if session == self._session:
            self._task = None
            self._callbacks.on_end()
        self._complaint.report(reason)
        self._callbacks.post(ConnectionLost(session, reason, self._callbacks.draw()))

    async def _open(self) -> ClientStream:
        """Return a stream to the leading coordinator; the last good endpoint is tried first.

        Raises:
            NotAuthorized, VersionMismatch: one refused us permanently, and none accepted us.
            ElasticError: none of them accepted us.
        """
        stream = await find_leader(
            self._endpoints,
            self._access,
            self._complaint.report_at_once,
            learned=self._learned,
            silence_s=self._silence_s,
        )
        # A leader that a standby pointed to is remembered.
        self._learn((stream.endpoint,))
        others = (endpoint for endpoint in self._endpoints if endpoint != stream.endpoint)
        self._endpoints = (stream.endpoint, *others)
        return stream

    def _learn(self, names: Sequence[str]) -> None:
        """Remember coordinator endpoints beside the configured ones; the newest first."""
        fresh = [name for name in names if name not in self._named]
        older = [name for name in self._learned if name not in fresh]
        learned = tuple((*fresh, *older)[:LEARNED_MAX])
        known = [name for name in self._endpoints if name in (*self._named, *learned)]
        self._endpoints = (*known, *(name for name in learned if name not in known))
        if sorted(learned) != sorted(self._learned):
            self._callbacks.on_learned(learned)
        self._learned = learned

    async def _converse(self, session: SessionId, stream: ClientStream, outbox: Outbox) -> str:
        """Send and receive until the stream ends; return why it ended.

        Raises:
            ElasticError: it broke, or the coordinator ended it with an error.
        """
        reason, failure = "", None
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_all, stream, outbox)
            try:
                reason = await self._receive_all(session, stream)
            except ElasticError as error:
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return reason

    async def _send_all(self, stream: ClientStream, outbox: Outbox) -> None:
        while (message := await outbox.get()) is not None:
            try:
                await stream.write(FROM_AGENT.encode(message))
            except ConfigError as error:
                kind = type(message).__name__
                log.error("message_unsendable message=%s error=%r", kind, str(error))
            except ElasticError:
                return  # The reading side gets the same error, and reports it.
        await stream.finish()

    async def _receive_all(self, session: SessionId, stream: ClientStream) -> str:
        with anyio.move_on_after(FIRST_ANSWER_S_MAX) as waiting:
            data = await stream.read()
        if waiting.cancelled_caught:
            return f"the coordinator at {stream.endpoint} took the stream and does not answer"
        self._silence_s = await stream.silence_s()
        while data is not None:
            message = TO_AGENT.decode(data)
            if isinstance(message, FollowLogs):
                self._callbacks.on_follow(message)
            elif isinstance(message, Coordinators):
                self._learn(plain_addresses(",".join(message.addresses)))
            else:
                self._note_answer(message)
                self._callbacks.post(CoordinatorMessageReceived(session, message))
            data = await stream.read()
        return f"the coordinator at {stream.endpoint} ended the stream"

    def _note_answer(self, message: object) -> None:
        if isinstance(message, Welcome):
            self._ever_welcomed = True
            self._complaint.clear()
        elif isinstance(message, Refusal):
            self._prefer_next()
            self._complaint.report(message.reason)

    def _prefer_next(self) -> None:
        """Start the next attempt with the next endpoint."""
        self._endpoints = (*self._endpoints[1:], self._endpoints[0])


class WaitLogger:
    """Logs why the agent waits: when the reason changes, and every `REMIND_S`.

    The first reason is not logged here, because the machine logs it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reason = ""
        self._since_ns = 0
        self._reported_ns = 0

    def report_at_once(self, reason: str) -> None:
        """Log a reason that the machine does not log: the first one too."""
        if not self._reason:
            self._reason = " "  # Differs from every real reason.
            self._since_ns = self._clock.monotonic_ns()
        self.report(reason)

    def report(self, reason: str) -> None:
        """Log the reason, unless the same one was logged less than `REMIND_S` ago."""
        now_ns = self._clock.monotonic_ns()
        if not self._reason:
            self._since_ns = self._reported_ns = now_ns
        elif reason != self._reason or now_ns - self._reported_ns >= ns(REMIND_S):
            waited = (now_ns - self._since_ns) // NS_PER_S
            log.warning("waiting_for_coordinator for_s=%d reason=%s", waited, quoted(reason))
            self._reported_ns = now_ns
        self._reason = reason

    def clear(self) -> None:
        """Forget the reason, because the wait is over."""
        self._reason = ""

"""The service for agents: one bidirectional stream per agent, in bytes.

Rule: reading posts to the driver, writing drains the session's queue; neither decides anything.
However a stream ends, the driver is notified once. An idle stream runs no Python: gRPC answers and
times the pings, and its done-callback reports a silent agent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import anyio
import grpc
import grpc.aio

from elastic.coord.leader_state import LeaderState, Term
from elastic.coord.roles import CALLER
from elastic.coord.sessions import Session
from elastic.core.messages import AgentMessage, Hello, LogLines
from elastic.errors import ConfigError, ElasticError, NotPermitted, PeerError
from elastic.runtime.rpc import SILENCE_KEY, SILENCE_S, TERM_KEY, TIME_KEY, term_of
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT, TO_AGENT

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
LEADER_WAIT_S = 30.0
"""A standby holds an agent's call so long for news of the leader; then the agent retries."""

Context = grpc.aio.ServicerContext[bytes, bytes]
Writing = Coroutine[asyncio.Future[None], None, None]


class AgentsService:
    """Serves `Agents.Attach`."""

    def __init__(self, leader_state: LeaderState, silence_s: float = SILENCE_S) -> None:
        """Feed the driver of the current term; the output of workers bypasses it.

        Args:
            leader_state: the leadership state of this coordinator.
            silence_s: a peer whose host is silent for so long is lost; sent to agents.
        """
        self._leader_state = leader_state
        self._silence_ms = str(round(silence_s * 1000))

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to register. Messages stay bytes: our codec rejects bad ones."""
        service, _, method = ATTACH_METHOD.strip("/").rpartition("/")
        attach: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self.attach
        )
        return grpc.method_handlers_generic_handler(service, {method: attach})

    async def attach(self, _: Any, context: Context) -> None:
        """Serve one agent's stream until it ends."""
        tenure = await self._admit(context)
        # The agent sends Hello only after this metadata, so a refusal reaches it unchanged.
        now = str(time.time_ns())
        await context.send_initial_metadata(((TIME_KEY, now), (SILENCE_KEY, self._silence_ms)))
        driver = tenure.driver
        if not self._leader_state.leads(driver):
            # The term ended meanwhile: this stream would get no replies and never end.
            raise self._leader_state.refusal()
        session = driver.sessions.open(context.peer())
        context.add_done_callback(lambda *_: session.cut("the stream ended"))  # type: ignore[arg-type]
        refusal: ElasticError | None = None
        try:
            refusal = await self._hold(tenure, session, context)
        finally:
            driver.disconnect(session, "the stream ended")
        if refusal is not None:
            raise refusal  # The guard reports it to the agent and in the log.

    async def _admit(self, context: Context) -> Term:
        """Return the term to serve under; on a standby, agents may wait for a new leader.

        Raises:
            NotLeading: this coordinator does not lead; the text names the leader.
        """
        given = {str(key): value for key, value in context.invocation_metadata() or ()}
        if TERM_KEY in given:
            await self._leader_state.wait_news(term_of(str(given[TERM_KEY])), LEADER_WAIT_S)
        return self._leader_state.require()

    async def _hold(self, tenure: Term, session: Session, context: Context) -> ElasticError | None:
        """Read and write until either ends; return the error if the agent was at fault."""
        refusals: list[ElasticError] = []

        async def read() -> None:
            try:
                await self._read(tenure, session, context)
            except (PeerError, NotPermitted) as error:
                refusals.append(error)
                session.cut(str(error))
            else:
                # The agent will send no more; messages queued for it may still be sent.
                session.close("the agent ended the stream")

        session.on_news(StreamWriter(session, context).write_on)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await session.wait_cut()
            tasks.cancel_scope.cancel()
        return refusals[0] if refusals else None

    async def _read(self, tenure: Term, session: Session, context: Context) -> None:
        with anyio.move_on_after(HELLO_TIMEOUT_S) as waiting:
            message = await _next(context)
        if waiting.cancelled_caught:
            raise PeerError(f"{session.peer} opened a stream and sent nothing; expected Hello")
        if message is None:
            return
        if not isinstance(message, Hello):
            raise PeerError(f"{session.peer}: first message {_name(message)}, expected Hello")
        CALLER.get().check_may_attach(message.node.node_id)
        await tenure.driver.connect(session, message)
        while (message := await _next(context)) is not None:
            if isinstance(message, LogLines):
                tenure.follows.take(session.session_id, message)
            elif isinstance(message, Hello):
                raise PeerError(f"{session.peer} sent Hello twice; expected it once per stream")
            else:
                await tenure.driver.receive(session, message)


class StreamWriter:
    """Writes a session's queued messages to its agent, one at a time.

    Not a task per session: a message to an agent that reads is on its way when `Session.send`
    returns, and ten thousand tasks need not be woken, each twice.
    """

    def __init__(self, session: Session, context: Context) -> None:
        self._session = session
        self._context = context
        # The write in progress: gRPC accepts no other until it is done.
        self._writing: Writing | None = None

    def write_on(self) -> None:
        """Write queued messages; if a write is in progress, its end calls this again."""
        while self._writing is None and (message := self._session.next_message()) is not None:
            try:
                data = TO_AGENT.encode(message)
            except ConfigError as error:
                log.error("message_unsendable kind=%s error=%r", _name(message), str(error))
                continue
            writing: Writing = self._context.write(data)  # type: ignore[assignment]
            self._writing = writing
            self._advance(writing)
        if self._writing is None and self._session.is_over():
            self._session.cut("closed")

    def _advance(self, writing: Writing) -> None:
        """Run a write until it waits for a future, or ends."""
        try:
            waits_for = writing.send(None)
        except StopIteration:
            self._writing = None
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError) as error:
            # No task surrounds the write, so only this code sees that it was cancelled.
            self._writing = None
            log.debug("write_failed peer=%s error=%r", self._session.peer, str(error))
            self._session.cut("the stream ended")
        else:
            waits_for.add_done_callback(lambda _: self._go_on(writing))

    def _go_on(self, writing: Writing) -> None:
        self._advance(writing)
        self.write_on()


async def _next(context: Context) -> AgentMessage | None:
    """Return the next message, None at the end of the stream.

    Raises:
        PeerError: the bytes are not a valid message.
    """
    data = await context.read()
    return FROM_AGENT.decode(data) if isinstance(data, bytes) else None


def _name(message: object) -> str:
    return type(message).__name__

"""The service for agents: one bidirectional stream per agent, in bytes.

Rule: reading posts to the driver, writing drains the session's queue; neither decides anything.
However a stream ends, the driver is notified once. An idle stream costs no Python: gRPC answers and
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
from elastic.wire.codec_stream import (
    ATTACH_METHOD,
    decode_agent_message,
    encode_coordinator_message,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
WAIT_AT_THE_DOOR_S = 30.0
"""An agent that waits here for the next leader asks again after this."""

Context = grpc.aio.ServicerContext[bytes, bytes]
Writing = Coroutine[asyncio.Future[None], None, None]


class AgentsService:
    """Serves `Agents.Attach`."""

    def __init__(self, office: LeaderState, silence_s: float = SILENCE_S) -> None:
        """Feed the driver of the term that holds; output of workers never comes near it.

        Args:
            office: whether we lead.
            silence_s: a peer whose host is silent so long is lost; agents are told.
        """
        self._leader_state = office
        self._silence_ms = str(round(silence_s * 1000))

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers. Messages stay bytes: our codec refuses bad ones."""
        service, _, method = ATTACH_METHOD.strip("/").rpartition("/")
        attach: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self.attach
        )
        return grpc.method_handlers_generic_handler(service, {method: attach})

    async def attach(self, _: Any, context: Context) -> None:
        """Hold one agent's stream until it ends."""
        tenure = await self._admit(context)
        # The agent waits for this before it says hello: a refusal stays what it is.
        now = str(time.time_ns())
        await context.send_initial_metadata(((TIME_KEY, now), (SILENCE_KEY, self._silence_ms)))
        driver = tenure.driver
        if not self._leader_state.leads(driver):
            # The term ended meanwhile: nobody would answer over this stream, nor end it.
            raise self._leader_state.refusal()
        session = driver.sessions.open(context.peer())
        context.add_done_callback(lambda *_: session.cut("the stream ended"))  # type: ignore[arg-type]
        refusal: ElasticError | None = None
        try:
            refusal = await self._hold(tenure, session, context)
        finally:
            driver.disconnect(session, "the stream ended")
        if refusal is not None:
            raise refusal  # The guard says so, to the agent and in the log.

    async def _admit(self, context: Context) -> Term:
        """Return the term to serve under; a standby lets agents wait that ask for news.

        Raises:
            NotLeading: this coordinator does not lead; says who does.
        """
        given = {str(key): value for key, value in context.invocation_metadata() or ()}
        if TERM_KEY in given:
            await self._leader_state.wait_news(term_of(str(given[TERM_KEY])), WAIT_AT_THE_DOOR_S)
        return self._leader_state.require()

    async def _hold(self, tenure: Term, session: Session, context: Context) -> ElasticError | None:
        """Read and write until one of the two ends; return what was wrong with the agent."""
        refusals: list[ElasticError] = []

        async def read() -> None:
            try:
                await self._read(tenure, session, context)
            except (PeerError, NotPermitted) as error:
                refusals.append(error)
                session.cut(str(error))
            else:
                # The agent will say no more; what is queued for it may still go out.
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
            raise PeerError(f"{session.peer} opened a stream and said nothing; expected Hello")
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
                raise PeerError(f"{session.peer} said Hello twice; expected it once per stream")
            else:
                await tenure.driver.hear(session, message)


class StreamWriter:
    """Writes what a session has for its agent, a message as soon as the one before is out.

    Not a task that waits for both: what is said to an agent that listens is on its way when
    `Session.send` returns, and ten thousand tasks need not be woken, each twice.
    """

    def __init__(self, session: Session, context: Context) -> None:
        """Write nothing yet."""
        self._session = session
        self._context = context
        # The one that is under way: gRPC takes no other until it is out.
        self._writing: Writing | None = None

    def write_on(self) -> None:
        """Begin to write what waits, unless a write is under way: this is called again then."""
        while self._writing is None and (message := self._session.next_message()) is not None:
            try:
                data = encode_coordinator_message(message)
            except ConfigError as error:
                log.error("message_unsendable kind=%s error=%r", _name(message), str(error))
                continue
            writing: Writing = self._context.write(data)  # type: ignore[assignment]
            self._writing = writing
            self._advance(writing)
        if self._writing is None and self._session.is_over():
            self._session.cut("closed")

    def _advance(self, writing: Writing) -> None:
        """Let a write go on as far as it comes: to the future that it waits for, or to its end."""
        try:
            waits_for = writing.send(None)
        except StopIteration:
            self._writing = None
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError) as error:
            # Nobody but us would see that it was cancelled: there is no task around it.
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
        PeerError: bytes that are no message.
    """
    data = await context.read()
    return decode_agent_message(data) if isinstance(data, bytes) else None


def _name(message: object) -> str:
    return type(message).__name__

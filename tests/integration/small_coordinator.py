"""A coordinator's door without the coordinator: real gRPC, with the test in the machine's place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import grpc.aio

from elastic.core.messages import CoordinatorMessage
from elastic.errors import ElasticError, NotAuthorized, NotLeading
from elastic.runtime.rpc import SILENCE_KEY, TERM_KEY, bearer_of, server_options, status_of
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT, TO_AGENT
from tests.patience import DEADLINE_S

Found = TypeVar("Found")


class Heard:
    """What came, for whoever waits for some of it."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._came = anyio.Event()

    def add(self, item: object) -> None:
        self.all.append(item)
        self._came.set()
        self._came = anyio.Event()

    async def wait_for(
        self, kind: type[Found], where: Callable[[Found], bool] = lambda _: True
    ) -> Found:
        """Take out the first of this kind for which `where` holds."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                for number, item in enumerate(self.all):
                    if isinstance(item, kind) and where(item):
                        del self.all[number]
                        return item
                await self._came.wait()


class SmallCoordinator:
    """The agents' door of a coordinator, with the test in place of the machine."""

    def __init__(
        self, *, token: str = "", refusal: ElasticError | None = None, silence_ms: str = ""
    ) -> None:
        # Where each stream that was let in came from.
        self.peers: list[str] = []
        self._greeting = ((SILENCE_KEY, silence_ms),) if silence_ms else ()
        self.received = Heard()
        self.ended = anyio.Event()
        self.probed_again = anyio.Event()
        self.port = 0
        self._token = token
        self._refusal = refusal
        self._admitting = anyio.Event()
        self._out: asyncio.Queue[CoordinatorMessage | bytes | None] = asyncio.Queue()

    def say(self, message: CoordinatorMessage | bytes | None) -> None:
        """Send to the newest agent; None ends its stream."""
        self._out.put_nowait(message)

    def admit(self) -> None:
        """Take in those who wait for a leader after the one that the refusal names."""
        self._refusal = None
        self._admitting.set()

    async def attach(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        try:
            token = bearer_of(context.invocation_metadata() or ())
            if token != self._token:
                raise NotAuthorized(f"agent came with{' a wrong' if token else 'out a'} token")
            given = dict(context.invocation_metadata() or ())
            if isinstance(self._refusal, NotLeading) and TERM_KEY in given:
                self.probed_again.set()
                await self._admitting.wait()
            if self._refusal is not None:
                raise self._refusal
        except ElasticError as error:
            await context.abort(*status_of(error))
        self.peers.append(context.peer())
        await context.send_initial_metadata(self._greeting)
        context.add_done_callback(lambda _: self.ended.set())
        self._out = asyncio.Queue()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, context, tasks.cancel_scope)
            while isinstance(data := await context.read(), bytes):
                self.received.add(FROM_AGENT.decode(data))
            tasks.cancel_scope.cancel()

    async def _write(
        self, context: grpc.aio.ServicerContext[bytes, bytes], scope: anyio.CancelScope
    ) -> None:
        while (message := await self._out.get()) is not None:
            is_raw = isinstance(message, bytes)
            await context.write(message if is_raw else TO_AGENT.encode(message))
        scope.cancel()


@asynccontextmanager
async def serving(coordinator: SmallCoordinator, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback; gives the endpoint."""
    service, _, method = ATTACH_METHOD.strip("/").rpartition("/")
    attach = grpc.stream_stream_rpc_method_handler(coordinator.attach)
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: attach}),)
    )
    coordinator.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{coordinator.port}"
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(None)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The client side of one bidirectional gRPC stream, with messages as bytes and our own errors.

Rule: every await ends: connecting has a timeout, and a stream whose peer falls silent is ended by
keepalive (see `rpc.channel_options`), which wakes its reader and writer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import anyio

from elastic.errors import CoordinatorUnreachable
from elastic.runtime.access import Access
from elastic.runtime.rpc import (
    NO_ACCESS,
    SILENCE_S,
    TERM_KEY,
    TIME_KEY,
    call_metadata,
    error_from_rpc,
    open_channel,
    silence_of,
)

if TYPE_CHECKING:
    import grpc.aio

CLOSE_S_MAX = 1.0
ADMISSION_S_MAX = 1.0


class ClientStream:
    """An open stream; made by `open_stream`.

    Attributes:
        endpoint: "host:port" of the server.
    """

    def __init__(
        self,
        endpoint: str,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
    ) -> None:
        self.endpoint = endpoint
        self._channel = channel
        self._call = call

    async def read(self) -> bytes | None:
        """Return the next message, None when the server ended the stream without an error.

        Raises:
            ElasticError: the stream broke, or the server ended it with an error.
        """
        import grpc.aio

        try:
            message = await self._call.read()
            if isinstance(message, bytes):
                return message
            if await self._call.code() is grpc.StatusCode.OK:
                return None
            await self._call.read()
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.endpoint) from error
        raise CoordinatorUnreachable(self.endpoint, "the stream ended without a status")

    async def write(self, message: bytes) -> None:
        """Pass one message to the transport; waits while flow control blocks.

        Raises:
            ElasticError: the stream is broken or has ended.
        """
        import grpc

        try:
            await self._call.write(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.endpoint) from error
        except asyncio.InvalidStateError as error:
            raise CoordinatorUnreachable(self.endpoint, "the stream is over") from error

    async def server_time_ns(self) -> int | None:
        """Return the server's wall clock at admission, None if it did not send it."""
        for key, value in await self._call.initial_metadata() or ():
            if key == TIME_KEY and str(value).isdigit():
                return int(value)
        return None

    async def silence_s(self) -> float:
        """Return the seconds of silence after which the server considers a peer lost."""
        return silence_of(await self._call.initial_metadata() or ())

    async def finish(self) -> None:
        """Half-close: end writing. The server may still write, and then ends the stream.

        A stream that has ended already is no error.
        """
        import grpc

        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def close(self) -> None:
        """End the stream and its connection; never raises an error of the peer."""
        self._call.cancel()
        await self._channel.close(CLOSE_S_MAX)


async def open_stream(
    endpoint: str,
    method: str,
    *,
    access: Access = NO_ACCESS,
    timeout_s: float = 2.0,
    after_term: int | None = None,
    silence_s: float = SILENCE_S,
) -> ClientStream:
    """Connect to `endpoint` and open the stream `method`; returns once it is connected.

    If the server sends another silence limit, the stream is opened again with that one.

    Args:
        endpoint: "host:port".
        method: "/package.Service/Method".
        access: credentials for the server; its files are read now.
        timeout_s: of connecting; a server that accepts but sends nothing counts as unreachable.
        after_term: makes a standby reply only when it knows a leader of a later term than this, or
            leads itself; the call waits for that without a timeout. None: refuse at once.
        silence_s: silence of the server's host after which it is lost, as last set by the server.

    Raises:
        CoordinatorUnreachable: nothing replies there.
        ElasticError: the server refused, or a file of `access` is not valid.
    """
    stream, wanted_s = await _open_once(endpoint, method, access, timeout_s, after_term, silence_s)
    if wanted_s == silence_s:
        return stream
    with anyio.CancelScope(shield=True):
        await stream.close()
    again, _ = await _open_once(endpoint, method, access, timeout_s, None, wanted_s)
    return again


async def _open_once(
    endpoint: str,
    method: str,
    access: Access,
    timeout_s: float,
    after_term: int | None,
    silence_s: float,
) -> tuple[ClientStream, float]:
    """Return the stream, and the silence limit of its server."""
    import grpc

    metadata = call_metadata(access.current_token())
    channel = open_channel(endpoint, access, silence_s)
    opener: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
    waits = ((TERM_KEY, str(after_term)),) if after_term is not None else ()
    call = opener(metadata=(*metadata, *waits))
    stream = ClientStream(endpoint, channel, call)
    try:
        with anyio.fail_after(timeout_s):
            await call.wait_for_connection()
        # A write to a stream that the server is just refusing would hide the reason behind an
        # internal error of gRPC: wait for a refusal first. A server that admits us sends initial
        # metadata at once; one that sends none costs this wait.
        wanted_s = silence_s
        with anyio.move_on_after(ADMISSION_S_MAX if after_term is None else None):
            wanted_s = await stream.silence_s()
        await call.wait_for_connection()  # Raises the server's refusal, if any.
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await stream.close()
        if isinstance(error, TimeoutError):
            raise CoordinatorUnreachable(endpoint, f"no connection in {timeout_s:g} s") from error
        if isinstance(error, grpc.RpcError):
            raise error_from_rpc(error, endpoint) from error
        raise
    return stream, wanted_s

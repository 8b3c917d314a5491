"""One bidirectional gRPC stream from the client's side, speaking bytes and our errors.

Rule: every await has an end: connecting has a deadline, and a stream whose peer falls silent is
ended by keepalive (see `rpc.channel_options`), which wakes whoever reads or writes.
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
    """A stream that stands; made by `open_stream`.

    Attributes:
        endpoint: "host:port" of the server.
    """

    def __init__(
        self,
        endpoint: str,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
    ) -> None:
        """Take over a channel and the one call that runs on it."""
        self.endpoint = endpoint
        self._channel = channel
        self._call = call

    async def read(self) -> bytes | None:
        """Return the next message, None when the server ended the stream in good order.

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
        """Hand one message to the transport; waits while the server does not take any.

        Raises:
            ElasticError: the stream is broken or over.
        """
        import grpc

        try:
            await self._call.write(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.endpoint) from error
        except asyncio.InvalidStateError as error:
            raise CoordinatorUnreachable(self.endpoint, "the stream is over") from error

    async def server_time_ns(self) -> int | None:
        """Return the server's wall clock when it let us in, None if it does not say."""
        for key, value in await self._call.initial_metadata() or ():
            if key == TIME_KEY and str(value).isdigit():
                return int(value)
        return None

    async def silence_s(self) -> float:
        """Return after how many seconds of silence the server takes a peer for lost."""
        return silence_of(await self._call.initial_metadata() or ())

    async def finish(self) -> None:
        """Say that nothing more will be written; the server may still write, and ends the stream.

        A stream that is over already is no error.
        """
        import grpc

        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def close(self) -> None:
        """End the stream and its connection; never raises because of the peer."""
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
    """Connect to `endpoint` and open the stream `method`; returns once the connection stands.

    A server that asks for pings in other intervals is connected to once more.

    Args:
        endpoint: "host:port".
        method: "/package.Service/Method".
        access: what is shown to the server; its files are read now.
        timeout_s: for the connection; a server that accepts and says nothing counts as away.
        after_term: a standby is to answer when another leader than that of this term is known, or
            itself; this call waits for that without end. None: it is to refuse at once.
        silence_s: of the server's host after which it is lost, as it said last.

    Raises:
        CoordinatorUnreachable: nothing answers there.
        ElasticError: what answered said no, or a file of `access` is no good.
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
    """Return the stream, and the silence that its server allows."""
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
        # A write to a stream that the server is refusing at this moment would hide its reason
        # behind an internal error of gRPC: let the refusal come first. A server that lets us in
        # says so at once by its initial metadata; one that does not costs this wait.
        wanted_s = silence_s
        with anyio.move_on_after(ADMISSION_S_MAX if after_term is None else None):
            wanted_s = await stream.silence_s()
        await call.wait_for_connection()  # Raises what the server said, if it said no.
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await stream.close()
        if isinstance(error, TimeoutError):
            raise CoordinatorUnreachable(endpoint, f"no connection in {timeout_s:g} s") from error
        if isinstance(error, grpc.RpcError):
            raise error_from_rpc(error, endpoint) from error
        raise
    return stream, wanted_s

"""What a hostile or broken client does to a port, over real sockets; each leaves when told to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import grpc
import grpc.aio

from elastic.runtime.rpc import MESSAGE_BYTES_MAX, Options, call_metadata, channel_options
from tests.patience import DEADLINE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
# The beginning of a HEADERS frame that announces 16 kB and never brings them.
HALF_HEADERS = b"\x00\x40\x00\x01\x00\x00\x00\x00\x01" + b"\x88" * 100
# DATA for a stream that was never opened.
LOST_DATA = b"\x00\x00\x04\x00\x00\x00\x00\x00\x07abcd"

GREETINGS: dict[str, bytes] = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 40,
    "HTTP/1": b"GET /jobs HTTP/1.1\r\nHost: elastic\r\n\r\n",
    "a preface and nothing": PREFACE,
    "a preface, settings and nothing": PREFACE + SETTINGS,
    "half of a header": PREFACE + SETTINGS + HALF_HEADERS,
    "data for no stream": PREFACE + SETTINGS + LOST_DATA,
    "ten thousand pings": PREFACE + SETTINGS + PING * 10_000,
    "ten thousand settings": PREFACE + SETTINGS * 10_000,
    "a frame of 16 MB": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100_000,
}


def connected(address: str, greeting: bytes) -> socket.socket:
    """Return a socket that has said this much; what the server says to it nobody reads."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    with contextlib.suppress(OSError):  # It may hang up while we talk.
        sock.sendall(greeting)
    return sock


@contextlib.contextmanager
def strangers(address: str, greeting: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections open."""
    socks: list[socket.socket] = []
    try:
        while len(socks) < count:
            socks.append(connected(address, greeting))
        yield socks
    finally:
        for sock in socks:
            sock.close()


async def wait_hung_up(sock: socket.socket) -> None:
    """Wait until the server has closed a connection."""
    sock.setblocking(False)
    with anyio.fail_after(DEADLINE_S):
        while True:
            await anyio.wait_readable(sock)
            try:
                if not sock.recv(65536):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return


def generous(*more: tuple[str, int]) -> Options:
    """Options of a client that sends what ours would not."""
    limits = (("grpc.max_send_message_length", -1), *more)
    return (*(o for o in channel_options() if "message_length" not in o[0]), *limits)


async def oversize(address: str, method: str, token: str) -> str:
    """Send one message above the limit; returns the status."""
    async with grpc.aio.insecure_channel(address, options=generous()) as channel:
        call: Any = channel.unary_unary(method)(
            b"x" * (MESSAGE_BYTES_MAX + 1), metadata=call_metadata(token), timeout=DEADLINE_S
        )
        return str((await call.code()).name)


@contextlib.asynccontextmanager
async def never_reading(
    address: str, method: str, request: bytes, token: str, count: int
) -> AsyncIterator[list[Any]]:
    """Open streams and read nothing from them, with a small window; whoever uses it waits."""
    options = generous(("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        calls: list[Any] = [
            channel.unary_stream(method)(request, metadata=call_metadata(token))
            for _ in range(count)
        ]
        try:
            yield calls
        finally:
            for call in calls:
                call.cancel()

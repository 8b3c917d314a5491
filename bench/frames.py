"""A client of one gRPC stream that costs next to nothing: HTTP/2's frames by hand, over asyncio.

Rule: only what a bench needs to play thousands of agents on the machine of the coordinator that it
measures. gRPC's own client takes ten times the processor for a message, as much as the coordinator
takes to send it. Everything is in the clear, whatever is unexpected ends the connection.

Frames and settings: RFC 9113; header literals: RFC 7541, 6.2.2; messages: gRPC over HTTP/2.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 4
FRAME_HEAD, MESSAGE_HEAD = 9, 5
WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
STREAM = 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Return a block of header literals; names and values are shorter than 127 bytes."""
    return b"".join(
        bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in pairs
    )


class GrpcStream(asyncio.Protocol):
    """One connection with one bidirectional stream."""

    def __init__(
        self,
        method: str,
        metadata: Iterable[tuple[str, str]],
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """Open the stream as soon as the connection stands.

        Args:
            method: "/package.Service/Method".
            metadata: of the call.
            on_message: called with each message of the server.
            on_end: called once, however it ends.
        """
        self._headers = headers(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", "bench"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                *metadata,
            ]
        )
        self._on_message, self._on_end = on_message, on_end
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._body = b""
        self._may_send = FIRST_WINDOW

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet and open the stream."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        opening = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW))
        opening += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - FIRST_WINDOW))
        transport.write(opening + frame(HEADERS, END_HEADERS, STREAM, self._headers))

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        self._on_end()

    def send(self, message: bytes) -> None:
        """Send a message; the server has always given room for the few of an agent."""
        assert self._transport is not None
        self._may_send -= len(message) + MESSAGE_HEAD
        assert self._may_send > 0, "the server took too little of what was sent"
        body = struct.pack(">BI", 0, len(message)) + message
        self._transport.write(frame(DATA, 0, STREAM, body))

    def close(self) -> None:
        """Drop the connection as a dead host's kernel does."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take frames apart."""
        data = self._unread + data if self._unread else data
        at, size = 0, len(data)
        while size - at >= FRAME_HEAD:
            end = at + FRAME_HEAD + int.from_bytes(data[at : at + 3], "big")
            if end > size:
                break
            self._take(data[at + 3], data[at + 4], data[at + FRAME_HEAD : end])
            at = end
        self._unread = data[at:]

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == DATA:
            self._body += payload
            self._take_messages()
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == WINDOW_UPDATE:
            self._may_send += int.from_bytes(payload, "big")
        if kind in (RST_STREAM, GOAWAY) or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._transport.abort()

    def _take_messages(self) -> None:
        while len(self._body) >= MESSAGE_HEAD:
            end = MESSAGE_HEAD + int.from_bytes(self._body[1:MESSAGE_HEAD], "big")
            if len(self._body) < end:
                return
            message, self._body = self._body[MESSAGE_HEAD:end], self._body[end:]
            self._on_message(message)

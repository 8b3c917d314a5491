"""The agent's end of the pipe to one of its worker processes, on asyncio.

Rule: writing never blocks, because a stopped worker does not read and the agent must continue;
unread messages are buffered up to a limit. Reading continues after writing has failed: the last
messages of a worker that has ended are still in the socket. (asyncio's own transports drop them.)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator

from elastic.core.messages import PipeToAgent, PipeToWorker
from elastic.errors import PeerError, check
from elastic.wire.codec_stream import FROM_WORKER, TO_WORKER
from elastic.wire.frames import FRAME_BYTES_MAX, FrameReader, encode_frame

READ_BYTES = 64 * 1024
BACKLOG_BYTES_MAX = FRAME_BYTES_MAX + 1024 * 1024
"""Limit of one worker's unread bytes: the largest message and a few thousand small ones."""


class AsyncPipe:
    """Sends `PipeToWorker` and receives `PipeToAgent`; created and used in one event loop.

    Args:
        sock: the agent's end of the socket pair; owned by the pipe.
        who: the process, for errors, such as "process 3 (pid 4711)".
    """

    def __init__(self, sock: socket.socket, who: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._who = who
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(who)
        self._received: deque[bytes] = deque()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._gone = False
        self._closed = False
        self._reading = False

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are buffered here because the socket's kernel buffer is full."""
        return self._backlog_bytes

    def send(self, message: PipeToWorker) -> bool:
        """Write one message, or buffer it until the worker reads; never blocks.

        Returns:
            False if the other end is closed and the message was dropped.

        Raises:
            PeerError: the worker has left more than `BACKLOG_BYTES_MAX` unread; this message was
                dropped, and the process should be killed.
            ConfigError: a value in the message cannot be encoded.
            UsageError: the message is too large.
        """
        frame = encode_frame(TO_WORKER.encode(message))
        if self._gone or self._closed:
            return False
        if self._backlog_bytes + len(frame) > BACKLOG_BYTES_MAX:
            raise PeerError(
                f"{self._who} does not read its pipe: {self._backlog_bytes} bytes wait for it, at "
                f"most {BACKLOG_BYTES_MAX} are kept; kill it"
            )
        self._backlog.append(memoryview(frame))
        self._backlog_bytes += len(frame)
        if len(self._backlog) == 1:
            # Usually the kernel accepts it at once, and the loop needs no writer.
            self._write()
            if self._backlog:
                self._loop.add_writer(self._sock, self._write)
        return not self._gone

    async def receive(self) -> PipeToAgent | None:
        """Return the next message, None when the other end is closed and all were returned.

        For one task; a cancelled call loses no data.

        Raises:
            PeerError: the bytes are not a message, or end inside one; no more can be read.
        """
        while not self._received:
            data = await self._read()
            if not data:
                self._frames.end()
                return None
            self._received.extend(self._frames.feed(data))
        return FROM_WORKER.decode(self._received.popleft())

    async def __aiter__(self) -> AsyncIterator[PipeToAgent]:
        """Yield messages until the other end is closed; PeerError if bytes are no message."""
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Close this end and drop unread data; a pending `receive` returns None."""
        if self._closed:
            return
        self._closed = True
        self._stop_writing()
        # An error means that the other end is already closed.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._reading:
            self._sock.close()

    def _write(self) -> None:
        """Write as much as the kernel accepts; the loop calls this when the socket is writable."""
        try:
            while self._backlog:
                sent = self._sock.send(self._backlog[0])
                self._backlog_bytes -= sent
                if sent < len(self._backlog[0]):
                    self._backlog[0] = self._backlog[0][sent:]
                    return
                self._backlog.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._gone = True
        self._stop_writing()

    def _stop_writing(self) -> None:
        self._backlog.clear()
        self._backlog_bytes = 0
        self._loop.remove_writer(self._sock)

    async def _read(self) -> bytes:
        """Return the next bytes, b"" at the end; a cancelled call has consumed none."""
        if self._closed:
            return b""
        check(not self._reading, f"{self._who}: two tasks read one pipe")
        self._reading = True
        try:
            await self._readable()
            return self._sock.recv(READ_BYTES)
        except OSError:
            # The worker ended with unread data of ours; all that it wrote was returned before.
            return b""
        finally:
            self._reading = False
            if self._closed:
                self._sock.close()

    async def _readable(self) -> None:
        # Waiting first, even when data is ready, lets other tasks run during a flood of messages.
        ready: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(self._sock, wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock)

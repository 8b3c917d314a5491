"""The worker's end of the pipe to its agent: blocking, for threads.

Rule: one thread reads; any thread may write, one message at a time. The socket stays in blocking
mode without a timeout, since that would apply to both directions.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator

from elastic.core.messages import PipeToAgent, PipeToWorker
from elastic.errors import Unavailable
from elastic.wire.codec_stream import FROM_WORKER, TO_WORKER
from elastic.wire.frames import FrameReader, encode_frame

READ_BYTES = 64 * 1024


class Pipe:
    """Sends `PipeToAgent` and receives `PipeToWorker`.

    Args:
        sock: this process's end of the socket pair that the agent made; owned by the pipe.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._writing = threading.Lock()
        self._frames = FrameReader("the agent")
        self._received: deque[bytes] = deque()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor, for select; `receive` may have messages though not readable."""
        return self._sock.fileno()

    def send(self, message: PipeToAgent) -> None:
        """Write one message, from any thread; blocks while the agent does not read.

        Raises:
            Unavailable: the agent has closed the pipe.
            ConfigError: a value in the message cannot be encoded.
            UsageError: the message is too large.
        """
        frame = encode_frame(FROM_WORKER.encode(message))
        try:
            with self._writing:
                self._sock.sendall(frame)
        except OSError as error:
            raise Unavailable(f"the agent closed the pipe ({error})") from error

    def receive(self, timeout_s: float | None = None) -> PipeToWorker | None:
        """Return the next message.

        Args:
            timeout_s: seconds to wait, None for no limit; 0 polls.

        Returns:
            The message, None on a timeout.

        Raises:
            Unavailable: the agent has closed the pipe, and all its messages were returned.
            PeerError: the bytes are not a message; no more can be read.
        """
        while not self._received:
            if self._closed:
                raise Unavailable("this end of the pipe to the agent was closed")
            # A message may arrive in several pieces, and the timeout applies to each: the agent
            # writes whole frames, so pieces follow each other at once.
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            self._received.extend(self._frames.feed(self._read()))
        return TO_WORKER.decode(self._received.popleft())

    def __iter__(self) -> Iterator[PipeToWorker]:
        """Yield messages until the agent closes the pipe.

        Raises:
            PeerError: the bytes are not a message.
        """
        while True:
            try:
                message = self.receive()
            except Unavailable:
                return
            if message is not None:
                yield message

    def close(self) -> None:
        """Close this end; a thread that blocks in `receive` gets Unavailable."""
        self._closed = True
        # An error means that the other end is already closed.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(READ_BYTES)
        except OSError as error:
            # The agent ended with unread data of ours.
            raise Unavailable(f"the agent is gone ({error})") from error
        if not data:
            self._frames.end()
            raise Unavailable("the agent closed the pipe")
        return data

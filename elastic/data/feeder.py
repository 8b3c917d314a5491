"""A feeder: a process that does work with the rows of micro-batches, for whoever connects.

Rule: a batch depends on its request alone, so that any feeder can compute it, twice is no harm, and
nothing is lost with one. It computes one batch at a time, because the user's functions share the
generators of random numbers; its connections read and send meanwhile. Of each connection it holds
one request at most. It imports torch only where the user's functions do, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from collections import OrderedDict
from typing import Any

from elastic.worker.data.randomness import seeded

POLL_S = 1.0
LENGTH = struct.Struct(">Q")
MESSAGE_BYTES_MAX = 1 << 32
TAG_BYTES = 32
WORK_KEPT = 8
"""Different work that is kept with what its classes hold: that of each dataset that is read."""


class MessageConnection:
    """Messages between a training process and a feeder; for one thread.

    Rule: with a key, a message is accepted only from the other side that has it, unchanged and in
    its turn, its length before that. They are pickles, and who can change packets must neither run
    code by them, nor have memory reserved for what does not come.
    """

    def __init__(self, sock: socket.socket, key: bytes = b"", *, is_client: bool = False) -> None:
        """Use a connected socket, which the caller closes.

        Args:
            sock: the connection.
            key: of this connection alone, b"" for one that no network carries.
            is_client: this side sends requests.
        """
        self._sock = sock
        self._key = key
        self._is_client = is_client
        self._num_sent = 0
        self._num_received = 0

    def send(self, value: bytes) -> None:
        """Send a message; raises OSError if the connection broke."""
        length = LENGTH.pack(len(value))
        pieces = (length, self._next_tag(length), value, self._next_tag(value))
        # By one call, without a copy; each further one could wake the other side for a piece.
        count = self._sock.sendmsg(pieces)
        for piece in pieces:
            if count < len(piece):
                self._sock.sendall(memoryview(piece)[count:])
            count = max(0, count - len(piece))

    def receive(self) -> bytearray:
        """Receive a message.

        Raises:
            EOFError: the other side is gone.
            ValueError: it is larger than any real one, or not what the other side has sent.
        """
        # Authenticated too, because memory for the message is reserved by it.
        (size,) = LENGTH.unpack(self._receive_piece(LENGTH.size))
        if size > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {size} bytes, at most {MESSAGE_BYTES_MAX} are taken")
        return self._receive_piece(size)

    def _next_tag(self, value: bytes) -> bytes:
        self._num_sent += 1
        return self._tag(value, self._num_sent, by_client=self._is_client)

    def _receive_piece(self, size: int) -> bytearray:
        value = _exactly(self._sock, size + (TAG_BYTES if self._key else 0))
        tag = value[size:]
        del value[size:]
        self._num_received += 1
        expected = self._tag(value, self._num_received, by_client=not self._is_client)
        if not hmac.compare_digest(expected, tag):
            raise ValueError("a message that was changed on its way")
        return value

    def _tag(self, value: bytes | bytearray, number: int, *, by_client: bool) -> bytes:
        """Return a keyed hash of the piece with this number of one side, b"" without a key."""
        if not self._key:
            return b""
        head = (b"client" if by_client else b"server") + LENGTH.pack(number)
        # Twice as fast as BLAKE2 where the processor has instructions for it.
        tag = hmac.new(self._key, head, "sha256")
        tag.update(value)
        return tag.digest()


def _exactly(sock: socket.socket, size: int) -> bytearray:
    value = bytearray(size)
    left = memoryview(value)
    while left:
        count = sock.recv_into(left)
        if not count:
            raise EOFError("the other side has closed")
        left = left[count:]
    return value


class BatchServer:
    """Computes batches for any number of connections, each in a thread of its own."""

    def __init__(self) -> None:
        """Begin without work; each connection brings its own: a function of rows."""
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Any] = OrderedDict()

    def serve(self, line: MessageConnection) -> None:
        """Reply to the requests of a connection until it ends.

        The other side was authenticated before: what it sends is unpickled.
        """
        with contextlib.suppress(EOFError, OSError):
            pickled = bytes(line.receive())
            try:
                with self._lock:
                    self._work_of(pickled)
            except Exception:
                line.send(pickle.dumps((False, traceback.format_exc(limit=-3))))
                return
            line.send(pickle.dumps((True, None)))
            while True:
                line.send(self._answer(pickled, line.receive()))

    def _work_of(self, pickled: bytes) -> Any:
        if pickled not in self._known:
            self._known[pickled] = pickle.loads(pickled)
            _limit_threads()
        self._known.move_to_end(pickled)
        while len(self._known) > WORK_KEPT:
            self._known.popitem(last=False)
        return self._known[pickled]

    def _answer(self, pickled: bytes, request: bytearray) -> bytes:
        with self._lock:
            had_torch = "torch" in sys.modules
            answer = _compute(self._work_of(pickled), request)
            if "torch" in sys.modules and not had_torch:
                # The work has imported it just now, and drawn from what was not seeded before, also
                # for instances that it has made.
                del self._known[pickled]
                answer = _compute(self._work_of(pickled), request)
            return answer


def _compute(work: Any, request: bytearray) -> bytes:
    key, rows = pickle.loads(request)
    try:
        with seeded(key):
            return pickle.dumps((True, work(rows)), protocol=5)
    except Exception:
        return pickle.dumps((False, traceback.format_exc(limit=-3)))


def _limit_threads() -> None:
    """Have torch use one thread, where it is imported: there are as many feeders as are wanted."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def main() -> None:
    """Serve the inherited connections of the training process until that is gone."""
    path, parent, *descriptors = sys.argv[1:]
    sys.path[:] = json.loads(path)
    server = BatchServer()
    lines = [MessageConnection(socket.socket(fileno=int(one))) for one in descriptors]
    threads = [threading.Thread(target=server.serve, args=(line,), daemon=True) for line in lines]
    for thread in threads:
        thread.start()
    # Other processes may hold the other ends of the connections, which then do not close.
    while os.getppid() == int(parent) and any(thread.is_alive() for thread in threads):
        time.sleep(POLL_S)
    os._exit(0)


if __name__ == "__main__":
    main()

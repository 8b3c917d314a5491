"""Protocol that copies a snapshot from node to node: one request per connection.

a request and its reply, between peers that know the job's secret (`secret_connection`)
then, from the side that has them, the bytes of the snapshot, their CRC-32, whether they are
complete, and a proof of both; and after a push the server's final reply
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic.errors import NotAuthorized, PeerError, Refused
from elastic.runtime.secret_connection import SecretConnection, connecting
from elastic.runtime.snapshot_memory import SnapshotMark

log = logging.getLogger(__name__)


GREETING = b"elastic copies 1"
TRAILER = struct.Struct(">IB")
CHUNK = 1 << 20
BYTES_MAX = 1 << 42
SOURCE_CHARS_MAX = 200
BODY_S = 10.0
RATE_MIN = 10_000_000
"""Bytes per second: the timeout of a body is `BODY_S`, plus its bytes at this rate."""
NICENESS = 10
LIST, FETCH, TEXT, PUSH = "list", "fetch", "text", "push"


@dataclass(frozen=True)
class CopyRequest:
    """A client's request.

    Attributes:
        verb: `list` all copies, `fetch` one, `text` to fetch only its skeleton (what is no
            tensor), or `push` one.
        mark: of the copy that is fetched or pushed.
        source: the node whose rows these are, "" for state that all members share.
    """

    verb: str
    job_id: str
    mark: SnapshotMark | None = None
    source: str = ""


@dataclass(frozen=True)
class CopyAnswer:
    """A positive reply of an agent that holds copies.

    Attributes:
        mark: of the copy, or None; in reply to a push: the agent has this copy already.
        copies: source and mark of each, in reply to `list`.
    """

    mark: SnapshotMark | None = None
    copies: tuple[tuple[str, SnapshotMark], ...] = ()


YES = CopyAnswer()


class CopyConnection(SecretConnection):
    """One connection between two peers that know the job's secret; for one thread."""

    greeting = GREETING

    # ------------------------------------------------------------------- client

    def request(self, request: CopyRequest, key: str) -> CopyAnswer:
        """Send the request, and return the reply.

        Raises:
            NotAuthorized: the other side does not know the secret.
            Refused: it refuses the request.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        mark = list(request.mark) if request.mark is not None else None
        values = {"verb": request.verb, "job": request.job_id, "mark": mark}
        self.ask(values | ({"source": request.source} if request.source else {}), key)
        return self.read_answer(key)

    def read_answer(self, key: str) -> CopyAnswer:
        """Return the other side's reply; raises as `request`."""
        answer = self.read_reply(key)
        if reason := str(answer.get("refused", ""))[:500]:
            raise Refused(reason)
        return CopyAnswer(_mark(answer.get("mark")), _copies(answer.get("copies", [])))

    # ------------------------------------------------------------------- server

    def listen(self, key_of: Callable[[str], str]) -> tuple[CopyRequest, str]:
        """Return the authenticated request with the job's secret.

        Args:
            key_of: returns the secret of a job, "" for one without copies here.

        Raises:
            NotAuthorized: the client does not know the secret; a refusal was sent.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        message, key = self.take_request(lambda message: key_of(str(message.get("job", ""))))
        verb, job_id, source = (str(message.get(name, "")) for name in ("verb", "job", "source"))
        mark = _mark(message.get("mark"))
        return CopyRequest(verb, job_id, mark, source[:SOURCE_CHARS_MAX]), key

    def answer(self, key: str, answer: CopyAnswer = YES, *, refused: str = "") -> None:
        """Send a positive reply with the requested data, or a refusal with its reason.

        Raises:
            OSError: the connection broke.
        """
        values: dict[str, Any] = {"mark": list(answer.mark) if answer.mark else None}
        if answer.copies:
            values["copies"] = [[source, list(mark)] for source, mark in answer.copies]
        self.reply(key, values | {"refused": refused})

    # ------------------------------------------------------------------- the bytes

    def send_body(
        self, key: str, body: memoryview, is_whole: Callable[[], bool], crc: int | None = None
    ) -> bool:
        """Send the bytes of a snapshot, and whether they stayed unchanged until the last one.

        Args:
            key: the job's secret.
            body: all of them.
            is_whole: called after the last; returns whether they are unchanged.
            crc: the CRC-32 computed when they were received, None to compute it now.

        Raises:
            OSError: the connection broke, or the peer is too slow.
        """
        self._begin_body(len(body))
        counted = 0
        for start in range(0, len(body), CHUNK):
            chunk = body[start : start + CHUNK]
            if crc is None:
                counted = zlib.crc32(chunk, counted)
            self._wait_s()
            self._sock.sendall(chunk)
        whole = is_whole()
        self._send(TRAILER.pack(counted if crc is None else crc, whole))
        self._prove(key)
        return whole

    def read_body(self, key: str, body: memoryview) -> int:
        """Read the bytes of a snapshot into place; returns their CRC-32.

        Args:
            key: the job's secret.
            body: memory for all of them.

        Raises:
            NotAuthorized: their CRC-32 is not from the peer that has proven to have the secret.
            ValueError: they differ from those sent, or changed while they were sent.
            OSError: the connection broke, or the peer is too slow.
        """
        self._begin_body(len(body))
        crc = 0
        at = 0
        while at < len(body):
            self._wait_s()
            count = self._sock.recv_into(body[at : at + CHUNK])
            if not count:
                raise ConnectionResetError(f"it ended after {at} of {len(body)} bytes")
            crc = zlib.crc32(body[at : at + count], crc)
            at += count
        sent, whole = TRAILER.unpack(self._read(TRAILER.size))
        if not self._is_proven(key):
            raise NotAuthorized("the end of a snapshot is not from the peer that began to send it")
        if not whole:
            raise ValueError("the snapshot has changed while it was sent")
        if sent != crc:
            raise ValueError(f"the bytes have CRC-32 {crc:08x}, {sent:08x} were sent")
        return crc

    def _begin_body(self, num_bytes: int) -> None:
        self._until = time.monotonic() + BODY_S + num_bytes / RATE_MIN


@contextlib.contextmanager
def calling(
    address: str, begun: Callable[[socket.socket], None] = lambda sock: None
) -> Iterator[CopyConnection]:
    """Connect to an agent that holds copies; see `connecting`."""
    with connecting(address, begun) as sock:
        yield CopyConnection(sock, is_client=True)


def yield_to_training() -> None:
    """Lower this thread's priority (nice), so that training has precedence."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _mark(numbers: Any) -> SnapshotMark | None:
    """Parse a mark from a peer, None for none; PeerError if it is not valid."""
    if numbers is None:
        return None
    is_list = isinstance(numbers, list) and len(numbers) == len(SnapshotMark._fields)
    if not is_list or not all(type(n) is int and 0 <= n < 1 << 64 for n in numbers):
        raise PeerError(f"a mark of {str(numbers)[:100]}")
    mark = SnapshotMark(*numbers)
    if not mark.number or mark.num_bytes > BYTES_MAX:
        raise PeerError(f"a snapshot of {mark.num_bytes} bytes, number {mark.number}")
    return mark


def _copies(values: Any) -> tuple[tuple[str, SnapshotMark], ...]:
    """Parse a list of sources and marks from a peer; PeerError if it is not valid."""
    found = []
    for one in values if isinstance(values, list) else [values]:
        source, numbers = one if isinstance(one, list) and len(one) == 2 else ("", None)
        mark = _mark(numbers)
        if mark is None:
            raise PeerError(f"a list of copies with {str(one)[:100]}")
        found.append((str(source)[:SOURCE_CHARS_MAX], mark))
    return tuple(found)

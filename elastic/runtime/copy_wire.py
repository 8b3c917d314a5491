"""Protocol that copies a snapshot from node to node: one request per connection.

    server   GREETING, and a nonce of 32 bytes
    client   a nonce of 32 bytes, a request, a proof
    server   a reply, a proof
    then, from the side that has them, the bytes of the snapshot, their CRC-32, and whether they are
    complete; and after a push the server's final reply

Requests and replies are JSON with a four-byte length prefix. A proof is a hash of everything sent
before, keyed with the job's secret, so that the secret itself is never sent. Where nodes have
certificates of the cluster, the connection uses mutual TLS (`peer_tls`); otherwise TLS with a
certificate that the serving agent made itself (`own_tls`), or plain text on loopback.

Rule: nothing of a peer is trusted before its proof was checked; every length has a limit and every
wait a timeout, so that a faulty, slow, or vanished peer costs no more than a thread for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic.errors import NotAuthorized, PeerError, Refused
from elastic.runtime.own_tls import ConnectionTls, PinnedCertificate
from elastic.runtime.peer_tls import PeerTls, refused
from elastic.runtime.rpc import is_loopback, parse_endpoint
from elastic.runtime.snapshot_memory import SnapshotMark

log = logging.getLogger(__name__)


GREETING = b"elastic copies 1"
NONCE_BYTES = 32
FRAME_BYTES_MAX = 1 << 16
LENGTH = struct.Struct(">I")
TRAILER = struct.Struct(">IB")
CHUNK = 1 << 20
BYTES_MAX = 1 << 42
SOURCE_CHARS_MAX = 200
CONNECT_S = 2.0
TALK_S = 5.0
"""Timeout of a single send or receive."""
BODY_S = 10.0
RATE_MIN = 10_000_000
"""Bytes per second: the timeout of a body is `BODY_S`, plus its bytes at this rate."""
NICENESS = 10
ASK, LIST, FETCH, TEXT, PUSH = "ask", "list", "fetch", "text", "push"


@dataclass(frozen=True)
class CopyRequest:
    """A client's request.

    Attributes:
        verb: `ask` for the mark of the newest copy, `list` all copies, `fetch` one, `text` to fetch
            only its skeleton (what is no tensor), or `push` one.
        job_id: the job of the copy.
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


class CopyConnection:
    """One connection between two peers that know the job's secret; for one thread.

    Attributes:
        is_client: whether this side sends the request.
    """

    def __init__(self, sock: socket.socket, *, is_client: bool) -> None:
        """Use a connected socket, which the caller closes."""
        self.is_client = is_client
        self._sock = sock
        self._reported = hashlib.blake2b(digest_size=32)
        self._until = time.monotonic() + BODY_S

    # ------------------------------------------------------------------- client

    def request(self, request: CopyRequest, key: str) -> CopyAnswer:
        """Send the request, and return the reply.

        Raises:
            NotAuthorized: the other side does not know the secret.
            Refused: it refuses the request.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        if self._read(len(GREETING)) != GREETING:
            raise PeerError("the other side is no agent that holds copies")
        self._read(NONCE_BYTES)
        self._send(secrets.token_bytes(NONCE_BYTES))
        mark = list(request.mark) if request.mark is not None else None
        values = {"verb": request.verb, "job": request.job_id, "mark": mark}
        self._send_json(values | ({"source": request.source} if request.source else {}))
        self._prove(key)
        return self.read_answer(key)

    def read_answer(self, key: str) -> CopyAnswer:
        """Return the other side's reply; raises as `request`."""
        answer = self._read_json()
        reason = str(answer.get("refused", ""))[:500]
        if not self._is_proven(key):
            raise NotAuthorized(f"the other agent does not know this job: {reason or 'no reason'}")
        if reason:
            raise Refused(reason)
        return CopyAnswer(_mark(answer.get("mark")), _copies(answer.get("copies", [])))

    # ------------------------------------------------------------------- server

    def listen(self, key_of: Callable[[str], str]) -> tuple[CopyRequest, str]:
        """Send the greeting, and return the authenticated request with the job's secret.

        Args:
            key_of: returns the secret of a job, "" for one without copies here.

        Raises:
            NotAuthorized: the client does not know the secret; a refusal was sent.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        self._send(GREETING + secrets.token_bytes(NONCE_BYTES))
        self._read(NONCE_BYTES)
        message = self._read_json()
        verb, job_id, source = (str(message.get(name, "")) for name in ("verb", "job", "source"))
        request = CopyRequest(verb, job_id, _mark(message.get("mark")), source[:SOURCE_CHARS_MAX])
        key = key_of(request.job_id)
        if not self._is_proven(key) or not key:
            self.answer(secrets.token_hex(), refused="nothing is held here under this key")
            raise NotAuthorized("a request without the job's key")
        return request, key

    def answer(self, key: str, answer: CopyAnswer = YES, *, refused: str = "") -> None:
        """Send a positive reply with the requested data, or a refusal with its reason.

        Raises:
            OSError: the connection broke.
        """
        values: dict[str, Any] = {"mark": list(answer.mark) if answer.mark else None}
        if answer.copies:
            values["copies"] = [[source, list(mark)] for source, mark in answer.copies]
        self._send_json(values | {"refused": refused})
        self._prove(key)

    # ------------------------------------------------------------------- the bytes

    def send_body(
        self, body: memoryview, is_whole: Callable[[], bool], crc: int | None = None
    ) -> bool:
        """Send the bytes of a snapshot, and whether they stayed unchanged until the last one.

        Args:
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
        self._sock.sendall(TRAILER.pack(counted if crc is None else crc, whole))
        return whole

    def read_body(self, body: memoryview) -> int:
        """Read the bytes of a snapshot into place; returns their CRC-32.

        Raises:
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
        sent, whole = TRAILER.unpack(self._read(TRAILER.size, is_reported=False))
        if not whole:
            raise ValueError("the snapshot has changed while it was sent")
        if sent != crc:
            raise ValueError(f"the bytes have CRC-32 {crc:08x}, {sent:08x} were sent")
        return crc

    # ------------------------------------------------------------------- pieces

    def _begin_body(self, num_bytes: int) -> None:
        self._until = time.monotonic() + BODY_S + num_bytes / RATE_MIN

    def _wait_s(self) -> None:
        """Set the socket's timeout: `TALK_S`, or what is left of the total."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side is too slow")
        self._sock.settimeout(min(TALK_S, left_s))

    def _prove(self, key: str) -> None:
        self._send(self._proof(key, by_client=self.is_client))

    def _is_proven(self, key: str) -> bool:
        expected = self._proof(key, by_client=not self.is_client)
        return hmac.compare_digest(expected, self._read(len(expected)))

    def _proof(self, key: str, *, by_client: bool) -> bytes:
        who = b"client" if by_client else b"server"
        secret = hashlib.blake2b(key.encode()).digest()
        return hashlib.blake2b(
            who + self._reported.digest(), key=secret, digest_size=NONCE_BYTES
        ).digest()

    def _send_json(self, values: dict[str, Any]) -> None:
        text = json.dumps(values).encode()
        self._send(LENGTH.pack(len(text)) + text)

    def _read_json(self) -> dict[str, Any]:
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        if size > FRAME_BYTES_MAX:
            raise PeerError(f"a message of {size} bytes, at most {FRAME_BYTES_MAX} are taken")
        try:
            values = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise PeerError(f"a message that is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise PeerError(f"a message that is a {type(values).__name__}, expected an object")
        return values

    def _send(self, data: bytes) -> None:
        self._reported.update(data)
        self._wait_s()
        self._sock.sendall(data)

    def _read(self, count: int, *, is_reported: bool = True) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait_s()
            more = self._sock.recv(count - len(data))
            if not more:
                raise ConnectionResetError("the other side has closed the connection")
            data += more
        if is_reported:
            self._reported.update(data)
        return bytes(data)


def lock_of(ours: PeerTls | None, address: str, fingerprint: str) -> ConnectionTls | None:
    """Return the TLS for a connection to an agent; None for plain text, which is for loopback only.

    Args:
        ours: of this node, None if it has no certificate of the cluster.
        address: "host:port" of that agent.
        fingerprint: of the certificate that the agent made itself, as reported by the coordinator;
            "" if the agent made none.

    Raises:
        NotAuthorized: it has a certificate of the cluster, and this node has none.
    """
    if ours is not None:
        return ours
    if fingerprint:
        return PinnedCertificate(fingerprint)
    if not is_loopback(parse_endpoint(address)[0]):
        raise NotAuthorized(
            f"the agent at {address} has a certificate of the cluster, and this node has none: "
            f"start all agents with one (--tls-cert, --tls-key, --tls-ca), or none"
        )
    return None


@contextlib.contextmanager
def calling(
    address: str,
    *,
    tls: ConnectionTls | None = None,
    begun: Callable[[socket.socket], None] = lambda sock: None,
) -> Iterator[CopyConnection]:
    """Connect to an agent that holds copies; the connection ends with the block.

    Args:
        address: "host:port".
        tls: see `lock_of`; None for plain text.
        begun: receives the socket, so that another thread can end the connection.

    Raises:
        NotAuthorized: it is no agent of this cluster.
        OSError: it does not reply.
    """
    raw = socket.create_connection(parse_endpoint(address), CONNECT_S)
    with securing(raw, tls, is_client=True, begun=begun) as sock:
        try:
            yield CopyConnection(sock, is_client=True)
        except ssl.SSLError as error:
            if not isinstance(tls, PeerTls):
                raise
            raise refused(error) from error  # In TLS 1.3 a refused certificate shows only now.


@contextlib.contextmanager
def securing(
    raw: socket.socket,
    tls: ConnectionTls | None,
    *,
    is_client: bool,
    begun: Callable[[socket.socket], None],
) -> Iterator[socket.socket]:
    """Yield the socket to use on a new connection, which ends with the block.

    Args:
        raw: the connection.
        tls: None for plain text.
        is_client: whether this side has connected.
        begun: receives the socket, before anything is waited for.

    Raises:
        NotAuthorized: the other side is no agent of this cluster.
        OSError: the connection broke, or TLS took too long.
    """
    with raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            begun(raw)
            yield raw
            return
        with tls.wrap(raw, is_client=is_client) as sock:
            begun(sock)
            tls.greet(sock)
            yield sock


def yield_to_training() -> None:
    """Lower this thread's priority (nice), so that training has precedence."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _mark(numbers: Any) -> SnapshotMark | None:
    """Parse a mark from a peer, None for none.

    Raises:
        PeerError: it is not valid.
    """
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
    """Parse a list of sources and marks from a peer.

    Raises:
        PeerError: it is not valid.
    """
    found = []
    for one in values if isinstance(values, list) else [values]:
        source, numbers = one if isinstance(one, list) and len(one) == 2 else ("", None)
        mark = _mark(numbers)
        if mark is None:
            raise PeerError(f"a list of copies with {str(one)[:100]}")
        found.append((str(source)[:SOURCE_CHARS_MAX], mark))
    return tuple(found)

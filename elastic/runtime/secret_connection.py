"""Connections between two processes that know a secret: each proves it before it is trusted.

    server   its greeting, and a nonce of 32 bytes
    client   a nonce of 32 bytes, a request, a proof
    server   a reply, a proof

Requests and replies are JSON with a four-byte length prefix. A proof is a hash of everything sent
before, keyed with the secret, so that the secret itself is never sent. What follows is protected
by its sender and receiver, with further proofs or with `session_key`. Nothing is encrypted: the
same state goes over gloo and NCCL, which cannot be (docs/security.md).

Rule: nothing of a peer is trusted before its proof was checked; every length has a limit and every
wait a timeout, so that a faulty, slow, or vanished peer costs no more than a thread for a while. A
flood of unauthenticated connections locks no peer out: each new one replaces the oldest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from elastic.errors import NotAuthorized, PeerError
from elastic.runtime.rpc import parse_endpoint

NONCE_BYTES = 32
FRAME_BYTES_MAX = 1 << 16
LENGTH = struct.Struct(">I")
CONNECT_S = 2.0
TALK_S = 5.0
"""Timeout of a single send or receive."""
TOTAL_S = 10.0
"""Timeout of the conversation."""
STRANGERS_MAX = 64
"""Unauthenticated connections at once. A client with a secret needs only some round trips here."""
CROWD_PAUSE_S = 0.005
"""Pause after each replaced connection during a flood: limits the load on the node."""
STRANGERS_REPORTED_S = 60.0
HOSTS_REMEMBERED = 1024


class SecretConnection:
    """One connection between two peers that know a secret; for one thread.

    Attributes:
        greeting: what the server sends first.
        is_client: whether this side sends the request.
    """

    greeting: ClassVar[bytes]

    def __init__(self, sock: socket.socket, *, is_client: bool) -> None:
        """Use a connected socket, which the caller closes."""
        self.is_client = is_client
        self._sock = sock
        self._reported = hashlib.blake2b(digest_size=32)
        self._until = time.monotonic() + TOTAL_S

    def ask(self, request: dict[str, Any], key: str) -> None:
        """Send a request, as the client.

        Raises:
            PeerError: the other side does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        if self._read(len(self.greeting)) != self.greeting:
            raise PeerError(f"the other side does not begin with {self.greeting.decode()!r}")
        self._read(NONCE_BYTES)
        self._send(secrets.token_bytes(NONCE_BYTES))
        self._send_json(request)
        self._prove(key)

    def read_reply(self, key: str) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            NotAuthorized: the other side does not know the secret.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        reply = self._read_json()
        if not self._is_proven(key):
            reason = str(reply.get("refused", ""))[:500] or "no reason"
            raise NotAuthorized(f"the other side does not know this job: {reason}")
        return reply

    def take_request(self, key_of: Callable[[dict[str, Any]], str]) -> tuple[dict[str, Any], str]:
        """Send the greeting, as the server; return the authenticated request, and the secret.

        Args:
            key_of: returns the secret for a request, "" for none.

        Raises:
            NotAuthorized: the client does not know the secret; a refusal was sent.
            PeerError: it does not speak this protocol.
            OSError: the connection broke, or timed out.
        """
        self._send(self.greeting + secrets.token_bytes(NONCE_BYTES))
        self._read(NONCE_BYTES)
        request = self._read_json()
        key = key_of(request)
        if not self._is_proven(key) or not key:
            self.reply(secrets.token_hex(), {"refused": "nothing is held here under this key"})
            raise NotAuthorized("a request without the job's key")
        return request, key

    def reply(self, key: str, values: dict[str, Any]) -> None:
        """Send a reply; raises OSError if the connection broke."""
        self._send_json(values)
        self._prove(key)

    def session_key(self, key: str) -> bytes:
        """Return a key for what is sent after the reply, which only peers with the secret know."""
        return self._keyed(b"session", key)

    # ------------------------------------------------------------------- pieces

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
        return self._keyed(b"client" if by_client else b"server", key)

    def _keyed(self, what: bytes, key: str) -> bytes:
        """Return a hash of everything reported so far, and of what it is for."""
        secret = hashlib.blake2b(key.encode()).digest()
        return hashlib.blake2b(
            what + self._reported.digest(), key=secret, digest_size=NONCE_BYTES
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

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait_s()
            more = self._sock.recv(count - len(data))
            if not more:
                raise ConnectionResetError("the other side has closed the connection")
            data += more
        self._reported.update(data)
        return bytes(data)


class UnauthenticatedConnections:
    """The unauthenticated connections of a server, in limited number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # With their hosts, oldest first.
        self._hosts: dict[socket.socket, str] = {}
        self._reported: dict[str, float] = {}

    def make_room(self) -> None:
        """End the oldest connection of the host that has most of them, if there are too many."""
        with self._lock:
            if len(self._hosts) < STRANGERS_MAX:
                return
            ((crowd, _),) = Counter(self._hosts.values()).most_common(1)
            oldest = next(sock for sock, host in self._hosts.items() if host == crowd)
            del self._hosts[oldest]
            end(oldest)
        time.sleep(CROWD_PAUSE_S)

    def add(self, sock: socket.socket, host: str) -> None:
        """Count a new connection."""
        with self._lock:
            self._hosts[sock] = host

    def discard(self, sock: socket.socket) -> None:
        """Do not count it any more: it is authenticated, or gone."""
        with self._lock:
            self._hosts.pop(sock, None)

    def is_news(self, host: str) -> bool:
        """Return whether to log a failure before authentication: once per host and minute."""
        now = time.monotonic()
        with self._lock:
            if now - self._reported.get(host, -STRANGERS_REPORTED_S) < STRANGERS_REPORTED_S:
                return False
            if len(self._reported) >= HOSTS_REMEMBERED:
                self._reported.clear()
            self._reported[host] = now
        return True


@contextlib.contextmanager
def connecting(
    address: str, begun: Callable[[socket.socket], None] = lambda sock: None
) -> Iterator[socket.socket]:
    """Connect to a server, as its client; the connection ends with the block.

    Args:
        address: "host:port".
        begun: receives the socket, so that another thread can end the connection.

    Raises:
        OSError: it does not reply.
    """
    with socket.create_connection(parse_endpoint(address), CONNECT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun(sock)
        yield sock


def end(sock: socket.socket) -> None:
    """End this connection, which wakes the thread that waits on it; from any thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

"""The rendezvous store of rank 0, for the groups that it leads; one thread serves all members.

Rule: a client is unauthenticated until it has proven that it knows the secret of a generation that
we serve. Unauthenticated clients can read and change nothing. Each costs a descriptor and a few
bytes for a limited time. Their number is limited: the oldest one of the host with the most is
closed first. They are logged once a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from elastic.errors import GroupError
from elastic.runtime.listening import AcceptErrors
from elastic.runtime.rpc import format_endpoint
from elastic.runtime.worker_ports import ANY_PORT, PortRange, listen_within, remedy
from elastic.worker.group import store_wire
from elastic.worker.group.store_wire import StoreVerb

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Members that may connect to a leader at the same moment."""
STRANGERS_MAX = 256
"""Connections that have shown nothing yet, or are of a generation that we do not know yet."""
STRANGER_S = 5.0
"""A member sends its proof within a round trip, and tries again."""
REPORTED_S = 60.0
READ_BYTES = 1 << 18
TICK_S = 0.1
"""How exactly waits and strangers are timed."""


@dataclass
class _Space:
    """The keys of one generation.

    Attributes:
        waiting: clients that wait for keys.
        wanted: by missing key, the clients that wait for it.
    """

    key: str
    values: dict[bytes, bytes] = field(default_factory=dict)
    members: set[_StoreClient] = field(default_factory=set)
    waiting: dict[_StoreClient, _Wait] = field(default_factory=dict)
    wanted: dict[bytes, set[_StoreClient]] = field(default_factory=dict)


@dataclass
class _Wait:
    """A client's wait for keys.

    Attributes:
        until: `time.monotonic()` of its timeout.
        missing: keys without a value.
    """

    keys: list[bytes]
    wants_values: bool
    until: float
    missing: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class _StoreClient:
    """One connection.

    Attributes:
        greeting: what was sent first.
        since: `time.monotonic()` of its beginning.
        generation, claim: what an unauthenticated client has sent, once it is complete.
        space: the keys of an authenticated client's generation.
        unsent: what the kernel has not taken yet.
    """

    sock: socket.socket
    host: str
    greeting: bytes
    since: float
    generation: int = 0
    claim: bytes = b""
    space: _Space | None = None
    read: bytearray = field(default_factory=bytearray)
    unsent: deque[memoryview] = field(default_factory=deque)


class StoreServer:
    """A store that listens before its address is announced.

    Every worker has one, so that any of them can lead a later generation.

    Attributes:
        address: "host:port".
    """

    def __init__(self, host: str, ports: PortRange = ANY_PORT) -> None:
        """Listen on a free port of this address; GroupError if this machine does not have it."""
        try:
            self._listener = listen_within(ports, host, backlog=BACKLOG)
        except OSError as error:
            raise GroupError(
                f"the rendezvous store cannot listen on {host}: {error}; {remedy(error)}"
            ) from error
        self.address = format_endpoint(host, self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._spaces: dict[int, _Space] = {}
        self._strangers: dict[_StoreClient, None] = {}
        self._reported_at = -REPORTED_S
        self._unreported = 0
        self._accept_errors = AcceptErrors("the rendezvous store")
        self._shut_until = 0.0
        self._checked_at = 0.0
        self._orders: deque[tuple[int, str]] = deque()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_reader = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_reader.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="elastic-store", daemon=True)
        self._thread.start()

    def admit(self, generation: int, key: str) -> None:
        """Serve a generation that we lead; an older one ends with its last member."""
        self._orders.append((generation, key))
        self._ring()

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._is_closed = True
        self._ring()
        self._thread.join()
        # Not by the thread, which may see the flag, and end, before we ring.
        self._bell.close()
        self._bell_reader.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"\0")

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select(TICK_S if self._is_timed() else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._bell_reader:
                    self._bell_reader.recv(READ_BYTES)
                else:
                    self._turn(key.data, events)
            while self._orders:
                self._admit(*self._orders.popleft())
            self._check_at_the_clock()
        for peer in [*self._strangers, *(p for s in self._spaces.values() for p in s.members)]:
            peer.sock.close()
        self._selector.close()
        self._listener.close()

    def _is_timed(self) -> bool:
        waits = any(space.waiting for space in self._spaces.values())
        return waits or bool(self._strangers) or bool(self._shut_until)

    def _check_at_the_clock(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < TICK_S:
            return
        self._checked_at = now
        for peer in [one for one in self._strangers if one.since + STRANGER_S <= now]:
            self._turn_away(peer, "has proven nothing in time")
        for space in self._spaces.values():
            for peer in [one for one, wait in space.waiting.items() if wait.until <= now]:
                _forget_wait(space, peer)
                self._answer(peer, store_wire.TIMED_OUT)
        if self._shut_until and self._shut_until <= now:
            self._shut_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _admit(self, generation: int, key: str) -> None:
        self._spaces = {number: one for number, one in self._spaces.items() if one.members}
        self._spaces.setdefault(generation, _Space(key))
        for peer in [one for one in self._strangers if one.claim]:
            self._check_at_claim(peer)

    # ------------------------------------------------------------------------- unauthenticated

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            pause_s = self._accept_errors.pause_s(error)
            if pause_s:
                self._selector.unregister(self._listener)
                self._shut_until = time.monotonic() + pause_s
            return
        if len(self._strangers) >= STRANGERS_MAX:
            ((crowd, _),) = Counter(one.host for one in self._strangers).most_common(1)
            oldest = next(one for one in self._strangers if one.host == crowd)
            self._turn_away(oldest, f"is one of {STRANGERS_MAX} that have proven nothing")
        sock.setblocking(False)
        greeting = store_wire.MAGIC + os.urandom(store_wire.NONCE_BYTES)
        peer = _StoreClient(sock, str(address[0]), greeting, time.monotonic())
        self._strangers[peer] = None
        self._selector.register(sock, selectors.EVENT_READ, peer)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.send(greeting)
        except OSError:
            self._turn_away(peer, "has hung up")

    def _listen_to_stranger(self, peer: _StoreClient) -> None:
        try:
            data = peer.sock.recv(store_wire.HELLO_BYTES + 1 - len(peer.read))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.read += data
        if not data or len(peer.read) > store_wire.HELLO_BYTES or peer.claim:
            # A client that only checks whether we listen sends nothing; that is not logged.
            self._turn_away(peer, "does not send a member's hello" if peer.read else "")
            return
        if len(peer.read) == store_wire.HELLO_BYTES:
            peer.claim = bytes(peer.read)
            (peer.generation,) = store_wire.GENERATION.unpack_from(
                peer.claim, store_wire.NONCE_BYTES
            )
            self._check_at_claim(peer)

    def _check_at_claim(self, peer: _StoreClient) -> None:
        """Let a member in; one of a generation that is not known yet waits a little."""
        space = self._spaces.get(peer.generation)
        if space is None:
            if peer.generation < max(self._spaces, default=0):
                self._turn_away(peer, "is of a generation that is over")
            return
        greetings = (peer.greeting, peer.claim[: -store_wire.PROOF_BYTES])
        theirs = store_wire.proof(space.key, "client", *greetings)
        if not store_wire.is_proof(peer.claim[-store_wire.PROOF_BYTES :], theirs):
            self._turn_away(peer, "does not know the generation's secret")
            return
        del self._strangers[peer]
        peer.read.clear()
        peer.space = space
        space.members.add(peer)
        self._send(peer, store_wire.proof(space.key, "server", *greetings))

    def _turn_away(self, peer: _StoreClient, why: str) -> None:
        del self._strangers[peer]
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if not why:
            return
        self._unreported += 1
        now = time.monotonic()
        if now - self._reported_at >= REPORTED_S:
            log.warning(
                "stranger_turned_away host=%s count=%d reason='it %s': only members of the group "
                "can use a worker's store",
                peer.host, self._unreported, why,
            )  # fmt: skip
            self._reported_at, self._unreported = now, 0

    # ---------------------------------------------------------------- members

    def _turn(self, peer: _StoreClient, events: int) -> None:
        """Read from a connection, or write to it, whatever is possible."""
        if peer.space is None:
            if peer in self._strangers:
                self._listen_to_stranger(peer)
            return
        if peer not in peer.space.members:
            return  # It was closed in this round.
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                data = peer.sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                peer.read += data
                self._take_frames(peer, peer.space)
        except BlockingIOError:
            return
        except (OSError, ValueError, OverflowError) as error:
            if not isinstance(error, OSError):
                log.warning("store_member_cut host=%s error=%r", peer.host, str(error)[:200])
            self._forget_client(peer)

    def _forget_client(self, peer: _StoreClient) -> None:
        space = peer.space
        if space is not None:
            space.members.discard(peer)
            _forget_wait(space, peer)
            is_old = space is not self._spaces.get(max(self._spaces, default=0))
            if is_old and not space.members:
                self._spaces = {n: one for n, one in self._spaces.items() if one is not space}
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()

    def _take_frames(self, peer: _StoreClient, space: _Space) -> None:
        at = 0
        while peer in space.members and len(peer.read) - at >= store_wire.LENGTH.size:
            (size,) = store_wire.LENGTH.unpack_from(peer.read, at)
            if size > store_wire.FRAME_BYTES_MAX:
                raise ValueError(f"a request of {size} bytes")
            end = at + store_wire.LENGTH.size + size
            if len(peer.read) < end:
                break
            verb, fields = store_wire.unpacked(bytes(peer.read[at + store_wire.LENGTH.size : end]))
            at = end
            self._do(peer, space, StoreVerb(verb), fields)
        del peer.read[:at]

    def _do(self, peer: _StoreClient, space: _Space, verb: StoreVerb, fields: list[bytes]) -> None:
        """Carry out a request; ValueError if it is malformed."""
        values = space.values
        if verb in store_wire.WAITING:
            ms, *keys = fields
            until = time.monotonic() + int(ms) / 1e3
            wait = _Wait(keys, verb is StoreVerb.MULTI_GET, until)
            if peer in space.waiting:
                raise ValueError("a request before the answer to the last")
            space.waiting[peer] = wait
            self._answer_if_there(peer, space, wait)
        elif verb is StoreVerb.CHECK:
            self._answer(peer, store_wire.DONE, _yes(all(key in values for key in fields)))
        elif verb is StoreVerb.COUNT:
            self._answer(peer, store_wire.DONE, b"%d" % len(values))
        elif verb is StoreVerb.DELETE:
            (key,) = fields
            self._answer(peer, store_wire.DONE, _yes(values.pop(key, None) is not None))
        elif verb is StoreVerb.ADD:
            key, number = fields
            # As text, like torch's own store.
            values[key] = b"%d" % (int(values.get(key) or b"0") + int(number))
            self._answer(peer, store_wire.DONE, values[key])
            self._report_waiting(space, key)
        elif verb is StoreVerb.COMPARE_SET:
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                values[key] = desired
                self._report_waiting(space, key)
            self._answer(peer, store_wire.DONE, values.get(key, expected))
        elif verb is StoreVerb.APPEND:
            key, value = fields
            values[key] = values.get(key, b"") + value
            self._report_waiting(space, key)
        else:
            values.update(zip(fields[::2], fields[1::2], strict=True))
            for key in fields[::2]:
                self._report_waiting(space, key)

    def _report_waiting(self, space: _Space, key: bytes) -> None:
        for peer in space.wanted.pop(key, ()):
            wait = space.waiting[peer]
            wait.missing.discard(key)
            if not wait.missing:
                self._answer_if_there(peer, space, wait)

    def _answer_if_there(self, peer: _StoreClient, space: _Space, wait: _Wait) -> None:
        wait.missing = {key for key in wait.keys if key not in space.values}
        if wait.missing:
            for key in wait.missing:
                space.wanted.setdefault(key, set()).add(peer)
            return
        del space.waiting[peer]
        found = [space.values[key] for key in wait.keys] if wait.wants_values else []
        self._answer(peer, store_wire.DONE, *found)

    def _answer(self, peer: _StoreClient, status: int, *fields: bytes) -> None:
        self._send(peer, store_wire.packed(status, fields))

    def _send(self, peer: _StoreClient, data: bytes) -> None:
        peer.unsent.append(memoryview(data))
        try:
            self._flush(peer)
        except OSError:
            self._forget_client(peer)

    def _flush(self, peer: _StoreClient) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                data = peer.unsent[0]
                sent = peer.sock.send(data, socket.MSG_NOSIGNAL)
                if sent == len(data):
                    peer.unsent.popleft()
                else:
                    peer.unsent[0] = data[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)


def _forget_wait(space: _Space, peer: _StoreClient) -> None:
    wait = space.waiting.pop(peer, None)
    for key in wait.missing if wait is not None else ():
        wanting = space.wanted.get(key, set())
        wanting.discard(peer)
        if not wanting:
            space.wanted.pop(key, None)


def _yes(is_so: bool) -> bytes:
    return b"1" if is_so else b"0"

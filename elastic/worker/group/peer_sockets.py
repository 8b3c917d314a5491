"""Direct connections between the members of a group, for the engine's own traffic.

They replace gloo for it: gloo's I/O thread starts a message only after the receiver has posted its
buffer, and never wakes some waits when a connection breaks. These connections can be cut by any
thread in microseconds, and a wait on one then raises. Each group has its own.

Rule: only the main thread sends and receives, while it waits and when it calls `poll`. While it
waits, for a message or for room in a socket's buffer, it reads from all peers, so that no cycle of
members can block on full buffers. Messages are matched by tag and sender, and may arrive before
they are expected; until then they take memory of their own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import GroupBroken
from elastic.runtime.listening import family_of
from elastic.runtime.worker_ports import ANY_PORT, PortRange, listen_within
from elastic.worker.group import connections

HEADER = struct.Struct("<qq")
"""Before each message: its tag, its bytes."""
HELLO = struct.Struct("<16sq")
"""First bytes on a connection: the receiver's token, the sender's rank."""
JOIN_S = 30.0
"""How long members may take to connect to each other, once all know the endpoints."""
BACKLOG = 1024
"""Members that may connect to one at the same moment."""
STRANGERS_MAX = 256
"""Connections that have not sent their hello; the oldest makes room for the next."""
POLL_S_MAX = 2e6
"""The kernel counts milliseconds in 32 bits."""
BYTES_MAX = 4 << 30
"""No message is longer."""
BUFFERS_MAX = 64
"""Buffers of one system call: it takes longer for each, also for those that it does not reach."""
READY, LARGE = 2, 3
"""Tags of `exchange`: there is memory for the message; the message."""


@dataclass(frozen=True)
class PeerEndpoint:
    """Where a member listens.

    Attributes:
        address: IP address as text.
        port: 0 for a member that does not listen.
        token: 16 bytes that a connecting member must send; others are refused.
    """

    address: str = "::"
    port: int = 0
    token: bytes = bytes(16)

    def plain(self) -> list[str | int]:
        """Return it as JSON has it."""
        return [self.address, self.port, self.token.hex()]

    @staticmethod
    def of(plain: Sequence[Any]) -> PeerEndpoint:
        address, port, token = plain
        return PeerEndpoint(address, port, bytes.fromhex(token))


@dataclass(frozen=True)
class PeerAddress:
    """How a member is reached by others.

    Attributes:
        host: address of this machine that they reach.
        timeout_s: how long to wait while nothing comes.
        node: name of our node; members of a node share memory. "" if the machine is the node.
        ports: the range of ports to listen on.
    """

    host: str = "127.0.0.1"
    timeout_s: float = 1800.0
    node: str = ""
    ports: PortRange = ANY_PORT


Buffers = Sequence[memoryview]
"""Bytes of one message, one after the other."""
Wanted = tuple[Buffers, Callable[[], None] | None]


@dataclass
class _PeerConnection:
    """The connection to one member, and the messages in progress on it.

    Attributes:
        unsent: what the kernel has not taken yet.
        head, taken: the header being read, and the number of its bytes read so far.
        tag: of the message being read.
        into: buffers left to fill of the message being read, None between messages.
        wanted: by tag, where an expected message goes, and what is called when it is there.
        then: the call for the message being read.
        arrived: tags of received messages that have no call.
        early: messages received before they were expected.
        early_into: the one of those being read.
        broken: the error for every wait for this member; None while the connection works.
    """

    rank: int
    sock: socket.socket
    unsent: deque[memoryview] = field(default_factory=deque)
    head: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    taken: int = 0
    tag: int = 0
    into: list[memoryview] | None = None
    wanted: dict[int, Wanted] = field(default_factory=dict)
    then: Callable[[], None] | None = None
    arrived: set[int] = field(default_factory=set)
    early: dict[int, deque[bytearray]] = field(default_factory=dict)
    early_into: bytearray | None = None
    broken: GroupBroken | None = None


class PeerSockets:
    """This rank's connections to others of one group."""

    def __init__(self, reach: PeerAddress) -> None:
        """Listen on a free port.

        Raises:
            OSError: this machine does not have the address, or no port of the range is free.
        """
        *_, where = socket.getaddrinfo(reach.host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = listen_within(reach.ports, str(where[0]), backlog=BACKLOG)
        address, port = self._listener.getsockname()[:2]
        self.endpoint = PeerEndpoint(str(address).partition("%")[0], port, secrets.token_bytes(16))
        self.received_bytes = 0
        self._timeout_s = reach.timeout_s
        self._peers: dict[int, _PeerConnection] = {}
        self._by_number: dict[int, _PeerConnection] = {}
        self._due: deque[Callable[[], None]] = deque()
        self._poll = select.poll()
        # All that `cut` ends: connections, also those in progress, and the listener.
        self._socks = [self._listener]
        self._lock = threading.Lock()
        self._is_cut = False
        connections.register(self)

    # ------------------------------------------------------------------------------ connecting

    def join(
        self,
        rank: int,
        endpoints: Sequence[PeerEndpoint],
        limit_s: float = JOIN_S,
        partners: Iterable[int] | None = None,
    ) -> None:
        """Connect to other members, which do the same.

        Args:
            rank: ours.
            endpoints: of all members, by rank.
            limit_s: how long it may take.
            partners: ranks to connect to; None for all.

        Raises:
            OSError: a member could not be reached, or has not connected in time.
        """
        deadline = time.monotonic() + limit_s
        others = {*(range(len(endpoints)) if partners is None else partners)} - {rank}
        for other in sorted(one for one in others if one < rank):
            sock = self._connected(endpoints[other], deadline)
            sock.sendall(HELLO.pack(endpoints[other].token, rank))
            self._add(other, sock)
        self._accept({one for one in others if one > rank}, deadline)
        self._drop(self._listener)
        for peer in self._peers.values():
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _add(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = self._peers[rank] = self._by_number[sock.fileno()] = _PeerConnection(rank, sock)
        self._poll.register(peer.sock, select.POLLIN)

    def _connected(self, endpoint: PeerEndpoint, deadline: float) -> socket.socket:
        """Return a connection that `cut` can end at any moment, also while it is being made.

        Begun under the lock: `shutdown` has no effect on a socket that has not begun to connect,
        which would then wait for a member that is gone.
        """
        sock = socket.socket(family_of(endpoint.address))
        sock.setblocking(False)
        with self._lock:
            self._socks.append(sock)
            is_cut = self._is_cut
            code = (
                errno.ECONNABORTED if is_cut else sock.connect_ex((endpoint.address, endpoint.port))
            )
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            code = errno.ETIMEDOUT
            if poll.poll(_left_s(deadline) * 1e3):
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or self._is_cut:
            raise OSError(code or errno.ECONNABORTED, os.strerror(code or errno.ECONNABORTED))
        sock.settimeout(_left_s(deadline))
        return sock

    def _tracked(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            self._socks.append(sock)
            is_cut = self._is_cut
        if is_cut:
            raise OSError("the group is over")
        return sock

    def _drop(self, sock: socket.socket) -> None:
        """Close a socket, under the lock: `cut` could otherwise hit a reused descriptor."""
        with self._lock:
            self._socks.remove(sock)
            sock.close()

    def _accept(self, missing: set[int], deadline: float) -> None:
        """Wait until these ranks have connected.

        All connections are read concurrently: a silent one delays no other. OSError if one
        has not come in time, or the group was cut.
        """
        hellos: dict[int, tuple[socket.socket, bytearray]] = {}
        poll, listening = select.poll(), self._listener.fileno()
        self._listener.setblocking(False)
        poll.register(listening, select.POLLIN)
        while missing:
            ready = poll.poll(_left_s(deadline) * 1e3)
            if time.monotonic() >= deadline:  # Also while strangers keep it busy.
                raise TimeoutError(f"timed out waiting for rank {', '.join(map(str, missing))}")
            for number, _ in ready:
                if number == listening:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        sock = self._tracked(self._listener.accept()[0])
                        sock.setblocking(False)
                        hellos[sock.fileno()] = sock, bytearray()
                        poll.register(sock, select.POLLIN)
                elif number in hellos:
                    sock, hello = hellos[number]
                    if _is_reading(sock, hello):
                        continue
                    poll.unregister(number)
                    del hellos[number]
                    other = self._rank_in(hello)
                    if other in missing:
                        missing.discard(other)
                        self._add(other, sock)
                    else:
                        self._drop(sock)
            while len(hellos) > STRANGERS_MAX:
                poll.unregister(oldest := next(iter(hellos)))
                self._drop(hellos.pop(oldest)[0])
        for sock, _ in hellos.values():
            self._drop(sock)

    def _rank_in(self, hello: bytearray) -> int:
        """Return the rank of the member that sent this, -1 if it was no member."""
        if len(hello) < HELLO.size:
            return -1
        token, rank = HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(token, self.endpoint.token) else -1

    # -------------------------------------------------------------------------------- messages

    def send(self, rank: int, tag: int, data: Buffers) -> None:
        """Send bytes, which must stay as they are until `flush` has returned.

        Args:
            rank: the receiver's.
            tag: distinguishes messages in progress between the same two members.
            data: views of bytes, sent one after the other.

        Raises:
            GroupBroken: the group broke.
        """
        peer = self._peers[rank]
        if peer.broken is not None:
            raise peer.broken
        header = memoryview(HEADER.pack(tag, sum(map(len, data))))
        if peer.unsent:
            peer.unsent += (header, *data)
            return
        peer.unsent = deque((header, *data))
        _flush(peer)
        if peer.unsent:
            self._poll.modify(peer.sock, select.POLLIN | select.POLLOUT)

    def expect(
        self, rank: int, tag: int, data: Buffers, then: Callable[[], None] | None = None
    ) -> None:
        """Have the next message with this tag received into these buffers.

        Args:
            rank: the sender's.
            tag: its tag.
            data: views of bytes, filled one after the other; together as long as the message.
            then: called once it is received; if None, use `wait`.

        Raises:
            GroupBroken: it was received already, with another length.
        """
        peer = self._peers[rank]
        early = peer.early.get(tag)
        if not early:
            peer.wanted[tag] = data, then
            return
        _take(peer, tag, early.popleft(), (data, then))

    def forget(self, rank: int, tag: int) -> None:
        """Expect no message with this tag any more; nothing of it has come."""
        if (peer := self._peers.get(rank)) is not None:
            peer.wanted.pop(tag, None)

    def receive(self, rank: int, tag: int) -> bytearray:
        """Wait for a message of any length, which is not expected.

        Raises:
            GroupBroken: the group broke, or nothing came in time.
        """
        early = self._peers[rank].early
        self.wait_until(lambda: bool(early.get(tag)), [rank])
        return early[tag].popleft()

    def exchange(self, sends: Mapping[int, Buffers], receives: Mapping[int, Buffers]) -> None:
        """Send large messages, and receive them where they belong; returns when that is done.

        None is sent before its receiver expects it, and has reported that.

        Args:
            sends: by rank that calls this too: what is sent to it, not empty.
            receives: by rank: where its message goes.

        Raises:
            GroupBroken: the group broke, or nothing came in time.
        """
        for rank, data in receives.items():
            self.expect(rank, LARGE, data)
            self.send(rank, READY, [memoryview(b"\1")])
        for rank, data in sends.items():
            self.receive(rank, READY)
            self.send(rank, LARGE, data)
        for rank in receives:
            self.wait(rank, LARGE)
        self.flush()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something once the calls in progress have returned, to avoid recursion.

        So exchanges in progress get further, all of them whenever any is waited for.
        """
        self._due.append(call)

    def wait(self, rank: int, tag: int) -> None:
        """Wait for a message that is expected; see `wait_until`.

        Raises:
            GroupBroken: the group broke, or nothing came in time.
        """
        peer = self._peers[rank]
        self.wait_until(lambda: tag in peer.arrived, [rank])
        peer.arrived.discard(tag)

    def wait_until(
        self,
        is_there: Callable[[], bool],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Receive and send until a condition holds.

        Args:
            is_there: the condition, checked whenever something was received.
            ranks: that it is expected from, for the error; None for all.

        Raises:
            GroupBroken: the group broke, or nothing came in time.
        """
        while True:
            self._call()
            if is_there():
                return
            for rank in self._peers if ranks is None else ranks:
                broken = self._peers[rank].broken
                if broken is not None:
                    raise broken
            self._poll_once(lambda: f"rank {', '.join(map(str, ranks or self._peers))}")

    def flush(self) -> None:
        """Wait until the kernel has taken everything that was sent.

        Raises:
            GroupBroken: the group broke, or a peer does not read.
        """
        while any(peer.unsent for peer in self._peers.values()):
            self._poll_once(lambda: "others to read")

    def poll(self) -> None:
        """Receive what is there, and send what there is room for; never blocks.

        Raises:
            GroupBroken: the group broke.
        """
        while self._poll_once(None):
            pass
        self._call()

    def _call(self) -> None:
        while self._due:
            self._due.popleft()()

    def _poll_once(self, what: Callable[[], str] | None) -> bool:
        """Wait until a peer has sent or can take something, and handle it; False if none did.

        `what` names what is waited for; None not to wait.
        """
        ready = self._poll.poll(0 if what is None else min(self._timeout_s, POLL_S_MAX) * 1e3)
        if not ready and what is not None:
            raise GroupBroken(
                f"peer sockets: timed out after {self._timeout_s:.0f} s waiting for {what()}"
            )
        for number, event in ready:
            peer = self._by_number[number]
            if peer.unsent and event & ~select.POLLIN:
                _flush(peer)
                if not peer.unsent and peer.broken is None:
                    self._poll.modify(peer.sock, select.POLLIN)
            if event & ~select.POLLOUT:
                self._read(peer)
        return bool(ready)

    def _read(self, peer: _PeerConnection) -> None:
        while peer.broken is None:
            into = [peer.head[peer.taken :]] if peer.into is None else peer.into
            try:
                count = peer.sock.recvmsg_into(into[:BUFFERS_MAX])[0]
            except BlockingIOError:
                return
            except OSError as error:
                self._break(peer, error)
                return
            if not count:
                self._break(peer, None)
                return
            self.received_bytes += count
            if peer.into is None:
                peer.taken += count
                if peer.taken == HEADER.size:
                    peer.taken = 0
                    self._begin(peer)
            else:
                _advance(peer.into, count)
                if not peer.into:
                    self._end(peer)

    def _break(self, peer: _PeerConnection, error: OSError | None) -> None:
        peer.broken = _broken(peer, error)
        self._poll.unregister(peer.sock)
        peer.unsent.clear()

    def _begin(self, peer: _PeerConnection) -> None:
        """Choose the buffers for the message whose header was read."""
        peer.tag, size = HEADER.unpack(peer.head)
        wanted = peer.wanted.pop(peer.tag, None)
        if wanted is not None:
            data, peer.then = wanted
            _check_length(peer, peer.tag, size, sum(map(len, data)))
            peer.into = [*data]
            return
        if not 0 < size <= BYTES_MAX:
            raise GroupBroken(f"peer sockets: rank {peer.rank} announces a message of {size} bytes")
        peer.early_into = bytearray(size)
        peer.into = [memoryview(peer.early_into)]

    def _end(self, peer: _PeerConnection) -> None:
        """Deliver the message that was read completely."""
        peer.into = None
        message, peer.early_into = peer.early_into, None
        if message is None:
            then, peer.then = peer.then, None
            _arrived(peer, peer.tag, then)
        elif (wanted := peer.wanted.pop(peer.tag, None)) is not None:
            # It became expected after its header was read.
            _take(peer, peer.tag, message, wanted)
        else:
            peer.early.setdefault(peer.tag, deque()).append(message)

    # ------------------------------------------------------------------------------ the end

    def cut(self) -> None:
        """End all connections; any thread. Waits in them raise."""
        with self._lock:
            self._is_cut = True
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, and forget what is expected; for the thread that uses them.

        Exchanges are what is called for expected messages, and hold their connections: left to the
        garbage collector, memory of the size of all gradients would stay until it comes by.
        """
        with self._lock:
            for sock in self._socks:
                sock.close()
            self._socks = []
        self._peers.clear()
        self._by_number.clear()
        self._due.clear()

    def __del__(self) -> None:
        """Close the connections of an object that was not closed."""
        if hasattr(self, "_lock"):
            self.close()


def _is_reading(sock: socket.socket, hello: bytearray) -> bool:
    """Read what is there of a hello; return whether more is to come."""
    try:
        more = sock.recv(HELLO.size - len(hello))
    except BlockingIOError:
        return True
    except OSError:
        return False
    hello += more
    return bool(more) and len(hello) < HELLO.size


def _flush(peer: _PeerConnection) -> None:
    try:
        while peer.unsent:
            some = list(itertools.islice(peer.unsent, BUFFERS_MAX))
            count = peer.sock.sendmsg(some, [], socket.MSG_NOSIGNAL)
            while peer.unsent and count >= len(peer.unsent[0]):
                count -= len(peer.unsent.popleft())
            if count:
                peer.unsent[0] = peer.unsent[0][count:]
    except BlockingIOError:
        return
    except OSError as error:
        raise _broken(peer, error) from error


def _advance(into: list[memoryview], count: int) -> None:
    done = 0
    while done < len(into) and count >= len(into[done]):
        count -= len(into[done])
        done += 1
    del into[:done]
    if count:
        into[0] = into[0][count:]


def _take(peer: _PeerConnection, tag: int, message: bytearray, wanted: Wanted) -> None:
    data, then = wanted
    _check_length(peer, tag, len(message), sum(map(len, data)))
    start = 0
    for into in data:
        into[:] = message[start : start + len(into)]
        start += len(into)
    _arrived(peer, tag, then)


def _arrived(peer: _PeerConnection, tag: int, then: Callable[[], None] | None) -> None:
    if then is None:
        peer.arrived.add(tag)
    else:
        then()


def _check_length(peer: _PeerConnection, tag: int, size: int, expected: int) -> None:
    if size != expected:
        raise GroupBroken(
            f"peer sockets: rank {peer.rank} sent {size} bytes with tag {tag}, expected {expected}"
        )


def _broken(peer: _PeerConnection, error: OSError | None) -> GroupBroken:
    why = f" ({error})" if error is not None else ""
    return GroupBroken(f"peer sockets: Connection closed by peer, rank {peer.rank}{why}")


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())

"""Direct connections between all members of a group, for messages too small for gloo.

gloo's own thread carries each message, after the receiver has said that it waits for it: four
changes of thread where one system call and one wake-up do. With a model of 16,000 parameters that
was most of a step. A mesh is made when a group meets; members who cannot reach each other agree to
go without one.

Rule: the main thread sends and receives, and only while it waits for something; while it waits, be
it for a message or for room, it reads from everybody, so that no ring of members can wait for room
at each other. Any thread may cut a mesh, after which nothing waits in it. A message is taken in the
order of its tag and sender, whether or not somebody waits for it already.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

HEADER = struct.Struct("<qq")
"""Before each message: its tag, its bytes."""
HELLO = struct.Struct("<16sq")
"""First words on a connection: the token of whom it goes to, the rank of whom it comes from."""
DOOR = struct.Struct("<16sq16s")
JOIN_S = 2.0
"""How long members may take to connect to each other, once all have told of their doors."""
HELLO_S = 0.5
POLL_S_MAX = 3600.0
"""The kernel counts milliseconds in 32 bits."""
FAILURES_MAX = 2
"""After so many a process tries no more: whatever stands between the members, it stays."""
BYTES_MAX = 64 << 20
"""No message is longer."""


@dataclass(frozen=True)
class Door:
    """Where a member lets the others in.

    Attributes:
        address: IP address as text.
        port: 0 for a member that has no door.
        token: 16 bytes that whoever knocks must know; others are turned away.
    """

    address: str = "::"
    port: int = 0
    token: bytes = bytes(16)

    def numbers(self) -> list[int]:
        """Return it as five numbers of 64 bits."""
        packed = _in_sixteen_bytes(self.address)
        return list(struct.unpack("<5q", DOOR.pack(packed, self.port, self.token)))

    @staticmethod
    def of(numbers: Sequence[int]) -> Door:
        """Read such numbers."""
        packed, port, token = DOOR.unpack(struct.pack("<5q", *numbers))
        address = IPv6Address(packed)
        return Door(str(address.ipv4_mapped or address), port, token)


@dataclass(frozen=True)
class Reach:
    """How a member is reached by others.

    Attributes:
        host: address of this machine that they reach, "" for none: small messages go by gloo.
        timeout_s: how long a message is waited for.
    """

    host: str = ""
    timeout_s: float = 1800.0


def _in_sixteen_bytes(address: str) -> bytes:
    ip = ip_address(address)
    return ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed


@dataclass
class _Peer:
    """The connection to one member, and what is under way on it.

    Attributes:
        unsent: what the kernel has not taken yet.
        head, taken: the header being read; bytes read of it, or of the message behind it.
        tag, target: of the message being read, None between messages.
        wanted: where messages of a tag go.
        arrived: tags whose wanted message is there.
        early: messages that nobody wanted yet.
        broken: why nothing comes any more; an error for who waits for this member, nobody else.
    """

    rank: int
    sock: socket.socket
    unsent: deque[memoryview] = field(default_factory=deque)
    head: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    taken: int = 0
    tag: int = 0
    target: memoryview | None = None
    wanted: dict[int, memoryview] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    early: dict[int, deque[bytearray]] = field(default_factory=dict)
    early_target: bytearray | None = None
    broken: RuntimeError | None = None


class Mesh:
    """This rank's connections to all others of one group."""

    def __init__(self, reach: Reach) -> None:
        """Open a door.

        Raises:
            OSError: this machine does not have the address.
        """
        family, _, _, _, where = socket.getaddrinfo(reach.host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=128)
        address, port = self._listener.getsockname()[:2]
        self.door = Door(str(address).partition("%")[0], port, secrets.token_bytes(16))
        self._timeout_s = reach.timeout_s
        self._peers: dict[int, _Peer] = {}
        # All that is to be cut, be it connected or still on its way.
        self._socks = [self._listener]
        self._lock = threading.Lock()
        self._is_cut = False

    # ------------------------------------------------------------------------------ connecting

    def join(self, rank: int, doors: Sequence[Door], limit_s: float = JOIN_S) -> None:
        """Connect to all others, who do the same.

        Args:
            rank: ours.
            doors: of all members, by rank.
            limit_s: how long it may take.

        Raises:
            OSError: somebody could not be reached, or has not come in time.
        """
        deadline = time.monotonic() + limit_s
        for other in range(rank):
            sock = self._connected(doors[other], deadline)
            sock.sendall(HELLO.pack(doors[other].token, rank))
            self._peers[other] = _Peer(other, sock)
        while len(self._peers) < len(doors) - 1:
            self._listener.settimeout(_left_s(deadline))
            sock = self._tracked(self._listener.accept()[0])
            other = self._rank_of(sock, deadline)
            if rank < other < len(doors) and other not in self._peers:
                self._peers[other] = _Peer(other, sock)
            else:
                self._drop(sock)
        self._drop(self._listener)
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connected(self, door: Door, deadline: float) -> socket.socket:
        """Return a connection that `cut` ends at any moment, also while it comes about.

        Begun under the lock: a socket that has not begun to connect cannot be shut down, and
        would wait for somebody who is gone when it did.
        """
        sock = socket.socket(socket.AF_INET6 if ":" in door.address else socket.AF_INET)
        sock.setblocking(False)
        with self._lock:
            self._socks.append(sock)
            is_cut = self._is_cut
            code = errno.ECONNABORTED if is_cut else sock.connect_ex((door.address, door.port))
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
        """Let `cut` know of a socket."""
        with self._lock:
            self._socks.append(sock)
            is_cut = self._is_cut
        if is_cut:
            raise OSError("the group is over")
        return sock

    def _drop(self, sock: socket.socket) -> None:
        """Close a socket, not while `cut` is at it, which could hit whoever gets the number."""
        with self._lock:
            self._socks.remove(sock)
            sock.close()

    def _rank_of(self, sock: socket.socket, deadline: float) -> int:
        """Return who knocks, -1 for a stranger."""
        hello = b""
        try:
            sock.settimeout(min(HELLO_S, _left_s(deadline)))
            while len(hello) < HELLO.size:
                part = sock.recv(HELLO.size - len(hello))
                if not part:
                    return -1
                hello += part
        except OSError:
            return -1
        token, rank = HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(token, self.door.token) else -1

    # -------------------------------------------------------------------------------- messages

    def send(self, rank: int, tag: int, data: memoryview) -> None:
        """Send bytes, which must stay as they are until `flush` has returned.

        Raises:
            RuntimeError: the group broke.
        """
        peer = self._peers[rank]
        header = HEADER.pack(tag, len(data))
        sent = 0
        if not peer.unsent:
            try:
                sent = peer.sock.sendmsg([header, data], [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise _broken(peer, error) from error
        if sent < HEADER.size:
            peer.unsent.append(memoryview(header)[sent:])
        rest = data[max(0, sent - HEADER.size) :]
        if len(rest):
            peer.unsent.append(rest)

    def expect(self, rank: int, tag: int, data: memoryview) -> None:
        """Let the next message of this tag be written here; `wait` tells when it is there.

        Raises:
            RuntimeError: it has come already, with another length.
        """
        peer = self._peers[rank]
        early = peer.early.get(tag)
        if not early:
            peer.wanted[tag] = data
            return
        _take(peer, tag, early.popleft(), data)

    def wait(self, rank: int, tag: int) -> None:
        """Wait for a message that is expected.

        Raises:
            RuntimeError: the group broke, or nothing came in time.
        """
        peer = self._peers[rank]
        deadline = time.monotonic() + self._timeout_s
        while tag not in peer.arrived:
            if self._read(peer):
                continue
            if peer.broken is not None:
                raise peer.broken
            self._wait_for(f"rank {rank}", deadline)
        peer.arrived.discard(tag)

    def flush(self) -> None:
        """Wait until the kernel has taken everything that was sent.

        Raises:
            RuntimeError: the group broke, or somebody does not read.
        """
        deadline = time.monotonic() + self._timeout_s
        while any(peer.unsent for peer in self._peers.values()):
            self._wait_for("others to read", deadline)

    def _read(self, peer: _Peer) -> bool:
        """Read a part of a message; return whether there was anything."""
        if peer.broken is not None:
            return False
        target = peer.head if peer.target is None else peer.target
        try:
            count = peer.sock.recv_into(target[peer.taken :])
        except BlockingIOError:
            return False
        except OSError as error:
            peer.broken = _broken(peer, error)
            return False
        if not count:
            peer.broken = _broken(peer, None)
            return False
        peer.taken += count
        if peer.taken == len(target):
            peer.taken = 0
            if peer.target is None:
                self._begin(peer)
            else:
                self._end(peer)
        return True

    def _begin(self, peer: _Peer) -> None:
        """A header is read: find the place for its message."""
        peer.tag, size = HEADER.unpack(peer.head)
        wanted = peer.wanted.pop(peer.tag, None)
        if wanted is not None:
            _check_length(peer, peer.tag, size, len(wanted))
            peer.target = wanted
            return
        if not 0 < size <= BYTES_MAX:
            raise RuntimeError(f"mesh: rank {peer.rank} announces a message of {size} bytes")
        peer.early_target = bytearray(size)
        peer.target = memoryview(peer.early_target)

    def _end(self, peer: _Peer) -> None:
        """A message is there."""
        peer.target = None
        message, peer.early_target = peer.early_target, None
        if message is None:
            peer.arrived.add(peer.tag)
        elif (wanted := peer.wanted.pop(peer.tag, None)) is not None:
            # Expected since its header was read.
            _take(peer, peer.tag, message, wanted)
        else:
            peer.early.setdefault(peer.tag, deque()).append(message)

    def _wait_for(self, what: str, deadline: float) -> None:
        """Sleep until anybody has sent something or takes what we could not send, and do that."""
        poll = select.poll()
        peers = {}
        for peer in self._peers.values():
            events = (0 if peer.broken else select.POLLIN) | (select.POLLOUT if peer.unsent else 0)
            if events:
                peers[peer.sock.fileno()] = peer
                poll.register(peer.sock, events)
        ready = poll.poll(min(max(0.0, deadline - time.monotonic()), POLL_S_MAX) * 1e3)
        if not ready and time.monotonic() >= deadline:
            raise RuntimeError(f"mesh: timed out after {self._timeout_s:.0f} s waiting for {what}")
        for number, event in ready:
            peer = peers[number]
            if peer.unsent and event & ~select.POLLIN:
                _send_rest(peer)
            if event & ~select.POLLOUT:
                self._read(peer)

    # ------------------------------------------------------------------------------ the end

    def cut(self) -> None:
        """End all connections; for any thread. Whoever waits in them raises."""
        with self._lock:
            self._is_cut = True
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of all connections; for the thread that uses them."""
        with self._lock:
            for sock in self._socks:
                sock.close()
            self._socks = []

    def __del__(self) -> None:
        """Close what nobody can reach any more."""
        if hasattr(self, "_lock"):
            self.close()


def _send_rest(peer: _Peer) -> None:
    try:
        while peer.unsent:
            data = peer.unsent[0]
            sent = peer.sock.send(data, socket.MSG_NOSIGNAL)
            if sent < len(data):
                peer.unsent[0] = data[sent:]
                return
            peer.unsent.popleft()
    except BlockingIOError:
        return
    except OSError as error:
        raise _broken(peer, error) from error


def _take(peer: _Peer, tag: int, message: bytearray, into: memoryview) -> None:
    _check_length(peer, tag, len(message), len(into))
    into[:] = message
    peer.arrived.add(tag)


def _check_length(peer: _Peer, tag: int, size: int, expected: int) -> None:
    if size != expected:
        raise RuntimeError(
            f"mesh: rank {peer.rank} sent {size} bytes with tag {tag}, expected {expected}"
        )


def _broken(peer: _Peer, error: OSError | None) -> RuntimeError:
    why = f" ({error})" if error is not None else ""
    return RuntimeError(f"mesh: Connection closed by peer, rank {peer.rank}{why}")


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


# ----------------------------------------------------------------------- the meshes of groups

_meshes: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()
_ready: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()
_lock = threading.Lock()
_failures = 0


def mesh_of(group: Any) -> Mesh | None:
    """Return the mesh of a group, None if it has none."""
    return _ready.get(group)


def open_mesh(group: Any, reach: Reach) -> Door:
    """Open our door for this group, unless it has been opened before.

    Returns:
        Where the others find us; a door without a port if there is to be no mesh.
    """
    with _lock:
        known = _meshes.get(group)
    if known is not None:
        return known.door
    if group.size() < 2 or not reach.host or _failures >= FAILURES_MAX:
        return Door()
    try:
        mesh = Mesh(reach)
    except OSError as error:
        log.info("mesh_without_door host=%s error=%r", reach.host, str(error))
        return Door()
    with _lock:
        _meshes[group] = mesh
    return mesh.door


def join_mesh(group: Any, doors: Sequence[Door]) -> bool:
    """Connect to the others of this group; they all must have told of their doors.

    Returns:
        Whether we have connections to all of them; what counts is that everyone says so.
    """
    try:
        _meshes[group].join(group.rank(), doors)
    except OSError as error:
        log.info("mesh_not_joined error=%r", str(error))
        return False
    return True


def use_mesh(group: Any) -> None:
    """Take the mesh into use: all members have said that they are connected."""
    global _failures
    _ready[group] = _meshes[group]
    _failures = 0


def leave_mesh(group: Any) -> None:
    """Let go of a mesh that not everyone could join or wanted; the group itself stands."""
    global _failures
    with _lock:
        mesh = _meshes.pop(group, None)
    if mesh is None:
        return
    # A death among us does not get here: it breaks the group, and says nothing of the network.
    _failures += 1
    log.warning(
        "mesh_left host=%s: not all members reach each other at the addresses that they announce; "
        "small messages go by gloo, which is slower",
        mesh.door.address,
    )
    mesh.cut()
    mesh.close()


def cut_all() -> None:
    """Cut every mesh of this process; for any thread, when the group is over."""
    with _lock:
        meshes = list(_meshes.values())
    for mesh in meshes:
        mesh.cut()

"""The sockets of a torch group: found exactly, shut down from any thread, checked for hang-ups.

Rule: a socket is named by (descriptor, inode), and nothing is done to a descriptor whose inode
has changed since, because a closed descriptor is reused by anybody. What gloo itself watches (the
epoll set of its device, as the kernel prints it) is the list of a group's sockets; it contains no
others, whatever other threads open meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import select
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DESCRIPTORS = "/proc/self/fd"
# "tfd:  12 events:  19 data: 5650  pos:0 ino:8b57 sdev:9", one line for each watched descriptor.
WATCHED_LINE = re.compile(r"^tfd:\s*(\d+)\s.*\bino:([0-9a-f]+)\b", re.MULTILINE)
POLL_RDHUP = getattr(select, "POLLRDHUP", 0x2000)
TCP_INFO_BYTES = 192
BYTES_RECEIVED_AT = 128
"""In `struct tcp_info`: tcpi_bytes_received, since Linux 4.1."""
PRINT_BYTES = 16
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_DROP))
"""A `struct sock_fprog` of one instruction: return 0, drop the packet."""
GONE = POLL_RDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(frozen=True)
class WatchedDescriptor:
    """A descriptor, and its inode when it was listed."""

    descriptor: int
    inode: int


@dataclass(frozen=True)
class GlooEpoll:
    """The epoll set of one gloo device; open as long as the device is."""

    descriptor: int

    def watched(self) -> tuple[WatchedDescriptor, ...]:
        """Return all that the device watches now: its pipe, its listener, its connections."""
        try:
            with open(f"/proc/self/fdinfo/{self.descriptor}", encoding="ascii") as lines:
                text = lines.read()
        except FileNotFoundError:
            return ()
        return tuple(
            WatchedDescriptor(int(number), int(inode, 16))
            for number, inode in WATCHED_LINE.findall(text)
        )


def socket_inodes() -> frozenset[int]:
    return frozenset(one.inode for one in _sockets())


def find_event_loop(known: frozenset[int]) -> GlooEpoll | None:
    """Find the epoll set of a gloo device made since `known` was taken; None without /proc.

    Such a set holds one listening socket that is not in `known`, and a pipe to wake the loop. A
    server that another thread opens at the same moment differs: asyncio wakes itself through a
    socket pair.
    """
    for descriptor in _descriptors():
        if _link(descriptor) != "anon_inode:[eventpoll]":
            continue
        loop = GlooEpoll(descriptor)
        watched = loop.watched()
        listeners = [one for one in watched if one.inode not in known and _is_listener(one)]
        pipes = [one for one in watched if _link(one.descriptor).startswith("pipe:")]
        if len(listeners) == 1 and len(pipes) == 1:
            return loop
    return None


def end_reading(sockets: Iterable[WatchedDescriptor]) -> list[socket.socket]:
    """Make gloo read the end of these connections, at once; it then fails and closes them.

    Only the reading side is shut down, although both would free waiting threads. A thread that
    begins to send at that very moment would get EPIPE before gloo has read the end; gloo then
    queues the message, and never wakes its sender when the pair closes: the sender waits for its
    timeout. 35 of 750 members hung like that when groups that reduce all the time were aborted
    with SHUT_RDWR, and none with SHUT_RD.

    `close` would not do: it wakes no thread that is blocked on the same socket, and the descriptor
    could be reused while its owner still uses it. Listeners are left alone: gloo would loop on
    a closed one.

    Returns:
        Handles on those that were still connected. While they are open, gloo's own `close` does
        not reset the connection, which could make the peer's gloo miss a sender in turn.
    """
    handles = []
    for one in sockets:
        with _duplicate(one) as sock:
            if sock is None or _listens(sock):
                continue
            with contextlib.suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RD)
                handles.append(sock.dup())
    return handles


def any_hung_up(sockets: Iterable[WatchedDescriptor]) -> bool:
    """Return whether one of these connections has ended: by its peer, by an error, or by us.

    gloo closes its end as soon as it sees the peer's, so a closed socket counts.
    """
    for one in sockets:
        with _duplicate(one) as sock:
            if sock is None:
                return True
            poll = select.poll()
            poll.register(sock, POLL_RDHUP)
            if any(event & GONE for _, event in poll.poll(0)):
                return True
    return False


def received_bytes(sockets: Iterable[WatchedDescriptor]) -> int:
    """Return the bytes received over these connections, 0 where the kernel does not count them."""
    found = 0
    for one in sockets:
        with _duplicate(one) as sock, contextlib.suppress(OSError, struct.error, AttributeError):
            if sock is not None:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                found += struct.unpack_from("=Q", info, BYTES_RECEIVED_AT)[0]
    return found


def ends_print(sockets: Iterable[WatchedDescriptor], key: bytes) -> bytes:
    """Return a hash of connections that is the same at both of their ends.

    The XOR of one hash for each connection, so that those of all members of a group cancel out.
    With the secret `key` an attacker cannot choose what his connection adds.
    """
    total = 0
    for one in sockets:
        with _duplicate(one) as sock, contextlib.suppress(OSError):
            if sock is None or _listens(sock):
                continue
            ends = sorted([_plain(sock.getsockname()), _plain(sock.getpeername())])
            text = " ".join(ends).encode()
            digest = hashlib.blake2b(text, key=key[:64], digest_size=PRINT_BYTES).digest()
            total ^= int.from_bytes(digest, "big")
    return total.to_bytes(PRINT_BYTES, "big")


def shut_listener(loop: GlooEpoll | None) -> None:
    """Refuse further connections to a gloo device.

    Its listener stays open, since gloo would busy-loop without it: the kernel drops incoming
    packets for it. Existing connections are not affected.
    """
    _set_filter(loop, SO_ATTACH_FILTER, DROP_ALL)


def open_listener(loop: GlooEpoll | None) -> None:
    """Let members of a group that forms connect to a gloo device again."""
    _set_filter(loop, SO_DETACH_FILTER, bytes(4))


def _set_filter(loop: GlooEpoll | None, option: int, value: bytes) -> None:
    for one in loop.watched() if loop is not None else ():
        with _duplicate(one) as sock, contextlib.suppress(OSError):
            if sock is not None and _listens(sock):
                sock.setsockopt(socket.SOL_SOCKET, option, value)


def _plain(name: tuple[Any, ...]) -> str:
    """Return a socket's address as text; IPv4 in IPv6 becomes plain IPv4."""
    host = str(name[0]).partition("%")[0].removeprefix("::ffff:")
    return f"{host} {name[1]}"


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir(DESCRIPTORS)]


def _link(descriptor: int) -> str:
    try:
        return os.readlink(f"{DESCRIPTORS}/{descriptor}")
    except OSError:
        return ""  # closed since it was listed


def _sockets() -> Iterator[WatchedDescriptor]:
    for descriptor in _descriptors():
        link = _link(descriptor)
        if link.startswith("socket:["):
            yield WatchedDescriptor(descriptor, int(link[len("socket:[") : -1]))


@contextlib.contextmanager
def _duplicate(one: WatchedDescriptor) -> Iterator[socket.socket | None]:
    """Yield a handle on the socket, or None if it is gone or no internet socket.

    A duplicate, which its owner cannot close under us. At the limit of open files it is the
    owner's descriptor: the risk of its reuse is smaller than that of not cutting a connection.
    """
    is_own = True
    try:
        descriptor = os.dup(one.descriptor)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            yield None
            return
        is_own, descriptor = False, one.descriptor
    try:
        status = os.fstat(descriptor)
    except OSError:
        yield None  # closed just now
        return
    if status.st_ino != one.inode or not stat.S_ISSOCK(status.st_mode):
        if is_own:
            os.close(descriptor)
        yield None
        return
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock if sock.family in (socket.AF_INET, socket.AF_INET6) else None
    finally:
        if is_own:
            sock.close()
        else:
            sock.detach()


def _is_listener(one: WatchedDescriptor) -> bool:
    with _duplicate(one) as sock:
        return sock is not None and _listens(sock)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

"""What a gloo device watches, as the kernel prints it, and how it is told to hear no more of it."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from elastic.worker.group.sockets import GlooEpoll, WatchedDescriptor


def watched(sock: socket.socket) -> WatchedDescriptor:
    return WatchedDescriptor(sock.fileno(), os.fstat(sock.fileno()).st_ino)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    found = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2):
            ours = socket.create_connection(listener.getsockname())
            found.append((ours, listener.accept()[0]))
    yield found
    for ours, theirs in found:
        ours.close()
        theirs.close()


def test_a_silenced_socket_is_heard_of_no_more_and_stays(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (silent, its_peer), (other, others_peer) = pairs
    with select.epoll() as epoll:
        for sock in (silent, other):
            epoll.register(sock, select.EPOLLIN)
        loop = GlooEpoll(epoll.fileno())
        for peer in (its_peer, others_peer):
            peer.sendall(b"x")
        assert {number for number, _ in epoll.poll(5.0)} == {silent.fileno(), other.fileno()}
        told = loop._lines()
        loop.silence({watched(silent).inode})
        assert loop._lines() == told
        assert {number for number, _ in epoll.poll(5.0)} == {other.fileno()}
        its_peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        its_peer.close()  # By a reset.
        # The kernel may tell of the end once, whatever it is asked for.
        epoll.poll(0)
        assert [number for number, _ in epoll.poll(0)] == [other.fileno()]
        assert set(loop.watched()) == {watched(silent), watched(other)}
        epoll.unregister(silent)
        assert loop.watched() == (watched(other),)

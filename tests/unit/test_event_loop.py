"""What a gloo device watches, as the kernel prints it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from elastic.worker.group.gloo_sockets import GlooEpoll, WatchedDescriptor


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


def test_what_a_device_watches_is_listed(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (one, _), (other, _) = pairs
    with select.epoll() as epoll:
        for sock in (one, other):
            epoll.register(sock, select.EPOLLIN)
        loop = GlooEpoll(epoll.fileno())
        assert set(loop.watched()) == {watched(one), watched(other)}
        epoll.unregister(one)
        assert loop.watched() == (watched(other),)

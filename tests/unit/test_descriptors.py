"""A process that may open no more files: connections are cut all the same, and servers wait."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.runtime import secret_server
from elastic.runtime.listening import NO_ROOM_S, AcceptErrors
from elastic.runtime.secret_server import SecretServer
from elastic.worker.group.gloo_sockets import WatchedDescriptor, end_reading
from tests.patience import DEADLINE_S

FULL = """
import os, resource, socket
from elastic.worker.group.gloo_sockets import WatchedDescriptor, any_hung_up, end_reading

server = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(server.getsockname())
theirs, _ = server.accept()
one = WatchedDescriptor(ours.fileno(), os.fstat(ours.fileno()).st_ino)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.dup(0)
except OSError:
    pass
assert not any_hung_up([one])
end_reading([one])
ours.settimeout(10)
assert ours.recv(1) == b"", "whoever reads sees no end"
os.fstat(ours.fileno())
"""

RAISED = """
import resource, subprocess, sys
from elastic.runtime.descriptors import raise_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
assert raise_limit(100) == 100
assert raise_limit(50) == 100
assert raise_limit(10**6) == 200
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
print(subprocess.check_output([sys.executable, "-c", child], text=True))
"""


def run(code: str) -> str:
    """Run code in a process of its own, whose limits are its own."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=DEADLINE_S, capture_output=True, text=True
    ).stdout


def test_a_connection_is_cut_where_no_descriptor_is_left() -> None:
    run(FULL)


def test_a_socket_that_is_gone_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number, inode = server.fileno(), os.fstat(server.fileno()).st_ino
    assert end_reading([WatchedDescriptor(number, inode)]) == []


def test_children_have_the_limit_that_was_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run(RAISED).strip() == "200"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


# ------------------------------------------------------------------------------ servers


class Full:
    """The listener of a server that may open no more files, and is closed at the third attempt."""

    def __init__(self) -> None:
        self.attempts = 0
        self.is_open = True

    def accept(self) -> None:
        self.attempts += 1
        self.is_open = self.attempts < 3
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def fileno(self) -> int:
        return 5 if self.is_open else -1


def test_a_server_without_room_for_a_connection_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener: Any = Full()
    server = SecretServer(listener, lambda *_: None, what="copies", connections_max=1)
    pauses: list[float] = []
    monkeypatch.setattr(secret_server, "time", SimpleNamespace(sleep=pauses.append))
    server._accept()
    assert pauses == [NO_ROOM_S] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "accepts_nobody what='copies' error='[Errno 24] Too many open files'"
    ]


def test_a_client_that_is_gone_makes_no_other_wait() -> None:
    assert not AcceptErrors("x").pause_s(ConnectionAbortedError())
    assert not AcceptErrors("x").pause_s(BlockingIOError())

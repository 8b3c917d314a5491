"""Feeders on other nodes: how they listen, and how training processes find and reach them.

The feeders of a run are the workers of a job of their own. Their addresses are in a file of the run
directory, which one of them writes whenever their group changes. Both jobs were given the same
secret when they were submitted; both sides of a connection prove that they know it before anything
else is read (`secret_connection`), and nothing was unpickled before. Each message after that has a
keyed hash, so that nobody can change one who stands between them, as by changing that file.

Rule: a feeder whose Python or packages differ from ours may compute other bits, and is refused.
"""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch

from elastic.data.feeder import BatchServer, MessageConnection
from elastic.data.feeders import Feeder
from elastic.errors import Refused
from elastic.runtime.rpc import format_endpoint
from elastic.runtime.secret_connection import SecretConnection, connecting, end
from elastic.runtime.secret_server import SecretServer
from elastic.runtime.worker_ports import ANY_PORT, PortRange, listen_within
from elastic.storage.files import Files

FOLDER = "feeders"
CONNECTIONS_MAX = 1024
"""Authenticated connections of one feeder: two of each training process."""
BACKLOG = 128
LOOK_S = 2.0
"""How often a training process reads the file of addresses."""
SILENCE_S = 20
"""After so long without a sign of life the kernel gives up the other side's machine."""


def addresses_file(job_id: str) -> str:
    """Return the name, in the run directory, of the file with the addresses of a job's feeders."""
    return f"{FOLDER}/{job_id}.json"


def versions() -> dict[str, str]:
    """Return the versions that must be equal, so that the bits of a batch are."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {"torch": str(torch.__version__), "numpy": np.__version__}
    for name in ("pyarrow", "pandas", "elastic-torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return what differs between two processes' versions, "" for nothing."""
    return ", ".join(
        f"{name} {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    )


class FeederConnection(SecretConnection):
    """A connection from a training process to a feeder, before the first request."""

    greeting = b"elastic feeder 1"


def _watch(sock: socket.socket) -> None:
    """Wait for the other side as long as its machine lives."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S // 2),
        ("TCP_KEEPINTVL", SILENCE_S // 4),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class FeederServer:
    """Listens for training processes, and computes batches for those that know the secret.

    Attributes:
        address: "host:port" for training processes.
        packages: versions that a training process must have, too.
    """

    def __init__(self, host: str, key: str, ports: PortRange = ANY_PORT) -> None:
        """Listen, and serve from here on.

        Args:
            host: this node's address for other nodes.
            key: the secret.
            ports: the range of the port.

        Raises:
            OSError: this machine does not have the address, or no port is free.
        """
        self._key = key
        self._batches = BatchServer()
        self.packages = versions()
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        listener = listen_within(ports, host, backlog=BACKLOG)
        self.address = format_endpoint(host, listener.getsockname()[1])
        self._server = SecretServer(
            listener,
            self._talk,
            what="batches",
            connections_max=CONNECTIONS_MAX,
        )
        self._server.start()

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        self._server.close()

    def _talk(self, sock: socket.socket, proven: Callable[[], None]) -> None:
        line = FeederConnection(sock, is_client=False)
        request, _ = line.take_request(lambda request: self._key)
        proven()
        self._feed(line, request, sock)

    def _feed(self, line: FeederConnection, request: Mapping[str, Any], sock: Any) -> None:
        theirs = request.get("versions")
        refusal = difference(self.packages, theirs if isinstance(theirs, dict) else {})
        if not self._room.acquire(blocking=False):
            line.reply(self._key, {"refused": f"{CONNECTIONS_MAX} connections are open"})
            return
        try:
            line.reply(self._key, {"refused": refusal})
            if not refusal:
                _watch(sock)
                self._batches.serve(MessageConnection(sock, line.session_key(self._key)))
        finally:
            self._room.release()


class FeederOnNode:
    """A feeder on some node, as a training process sees it."""

    def __init__(self, address: str, key: str) -> None:
        """Connect nowhere yet.

        Args:
            address: "host:port".
            key: the secret.
        """
        self._address = address
        self._key = key
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    @contextlib.contextmanager
    def connect(self, number: int) -> Iterator[MessageConnection]:
        """Open a connection, on which operations and then requests may be sent.

        NotAuthorized if it does not know the secret; Refused if its versions differ from ours, or
        it has too many connections; OSError if it cannot be reached.
        """
        with connecting(self._address, self._begun) as sock:
            line = FeederConnection(sock, is_client=True)
            line.ask({"versions": versions()}, self._key)
            if reason := str(line.read_reply(self._key).get("refused", "")):
                raise Refused(f"the feeder at {self._address} is not used: {reason}")
            _watch(sock)
            yield MessageConnection(sock, line.session_key(self._key), is_client=True)

    def _begun(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.append(sock)
            if self._is_closed:
                end(sock)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for sock in self._sockets:
                end(sock)


class FeedersOnNodes:
    """Feeders of a run that are workers of a job of their own.

    Attributes:
        highest: number of them, at most.
    """

    def __init__(self, run_path: str, job_id: str, key: str, *, highest: int) -> None:
        """Look nowhere yet.

        Args:
            run_path: the run directory.
            job_id: of the job that is fed.
            key: the secret.
            highest: number of feeders, at most.
        """
        self.highest = highest
        self._files = Files(run_path)
        self._name = addresses_file(job_id)
        self._key = key
        self._known: list[str] = []
        self._next_look = 0.0

    def names(self) -> Sequence[str]:
        """Return the addresses of the present ones.

        Raises:
            StorageError: the run directory cannot be read.
            ValueError: the file is damaged.
        """
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if self._files.exists(self._name):
                self._known = [str(one) for one in json.loads(self._files.read(self._name))]
        return self._known

    def start(self, name: str) -> Feeder:
        """Return the feeder at this address."""
        return FeederOnNode(name, self._key)

    def grow(self) -> None:
        """Do nothing: the coordinator sees how long training waits, and starts more."""

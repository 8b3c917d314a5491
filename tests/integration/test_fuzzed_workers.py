"""The workers' protocols with bytes that nobody meant: by strangers, and by members gone mad.

A seed tells all that is sent: the same ones in each run, and fresh ones with the slow tests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest

from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.core.facts import JobId
from elastic.data.feeder_network import FeederConnection, FeederOnNode, FeederServer
from elastic.errors import ElasticError
from elastic.runtime import copy_wire, secret_connection
from elastic.runtime.copy_wire import LIST, PUSH, CopyConnection, CopyRequest, calling
from elastic.runtime.rpc import parse_endpoint
from elastic.worker.group import store_wire
from elastic.worker.group.group_store import GroupStore, StoreAddress
from elastic.worker.group.peer_sockets import HEADER, HELLO, PeerAddress, PeerSockets
from elastic.worker.group.store_server import StoreServer
from elastic.worker.group.store_wire import StoreVerb
from tests.patience import DEADLINE_S

HOST, KEY = "127.0.0.1", "the secret of generation 7"
EACH = 100
"""Conversations of a kind in the short tests."""
GROWN_BYTES_MAX = 64 << 20
FIELDS = (
    b"", b"k", b"1", b"-5", b"0x1", b"9" * 30, b"9" * 400, b"9" * 5000, b"nan", b"\xff\xfe", b"\0",
    b"x" * 70_000,
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1, 2**63, 10**400, 0.5, "", "j1", LIST, PUSH, "\ud800", [], [[]], {},
    [1] * 8, [2**64] * 8, [1, 1, 1, 1, 2**41, 1, 1, 1], ["n1", [1] * 8], "x" * 60_000,
)  # fmt: skip


class Fuzz:
    """Draws what to send."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def damaged(self, data: bytes) -> bytes:
        at = self.dice.randrange(len(data) + 1)
        some = self.dice.randbytes(self.dice.randrange(1, 20))
        return self.dice.choice([
            data, data, data[:at], data[:at] + some + data[at:], data + data, some,
            data[:at] + some + data[at + len(some) :],
        ])  # fmt: skip

    def frames(self) -> bytes:
        """Return requests to a store."""
        frames = b""
        for _ in range(self.dice.randrange(1, 5)):
            fields = [self.dice.choice(FIELDS) for _ in range(self.dice.randrange(4))]
            frames += store_wire.packed(self.dice.choice([*StoreVerb]), fields)
        return self.damaged(frames)

    def copies_request(self) -> dict[str, Any]:
        """Return a request to a copy server."""
        right = {"verb": LIST, "job": "j1", "mark": None, "source": ""}
        for name in self.dice.sample(sorted(right), self.dice.randrange(3)):
            right[name] = self.dice.choice(VALUES)
        return right


@contextlib.contextmanager
def unharmed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that nothing leaves a traceback, a descriptor or much memory."""
    process = psutil.Process()
    before, files = process.memory_info().rss, len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.INFO):
        yield
    assert not [one.getMessage() for one in caplog.records if one.exc_info]
    assert process.memory_info().rss - before < GROWN_BYTES_MAX
    assert len(os.listdir("/proc/self/fd")) <= files + 5


def connected(address: str) -> socket.socket:
    return socket.create_connection(parse_endpoint(address), DEADLINE_S)


def member_of(server: StoreServer) -> GroupStore:
    where, until = StoreAddress(server.address, 7, KEY), time.monotonic() + DEADLINE_S
    store = GroupStore.connect(where, lambda: until - time.monotonic(), lambda: False)
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    return store


def fuzz_store(fuzz: Fuzz, each: int) -> None:
    """Greet a store wrongly, and send it wrong requests after a right greeting."""
    server = StoreServer(HOST)
    server.admit(7, KEY)
    good = member_of(server)
    good.set("k", "v")
    for _ in range(each):
        with connected(server.address) as sock, contextlib.suppress(OSError):
            hello = fuzz.dice.randbytes(16) + store_wire.GENERATION.pack(fuzz.dice.choice([7, 8]))
            sock.sendall(fuzz.damaged(hello + bytes(32)) + fuzz.frames())
    assert good.num_keys() == 1
    for _ in range(each):
        bad = member_of(server)
        with contextlib.suppress(OSError):
            bad._sock.sendall(fuzz.frames())
            if fuzz.dice.random() < 0.3:
                bad._sock.shutdown(socket.SHUT_WR)
                while bad._sock.recv(1 << 16):
                    pass
        bad.close()
    good.set("l", "v")
    assert bytes(good.get("l")) == b"v"
    good.close()
    server.close()


def fuzz_sockets(fuzz: Fuzz, each: int) -> None:
    """Greet members wrongly while they connect, and be a member that sends wrong messages."""
    for _ in range(each // 10):
        both = [PeerSockets(PeerAddress(HOST, DEADLINE_S)) for _ in range(2)]
        ends = [sockets.endpoint for sockets in both]
        with contextlib.ExitStack() as stack:
            for sockets in both:
                stack.callback(sockets.close)
            for end in ends * 3:
                sock = stack.enter_context(socket.create_connection((end.address, end.port)))
                sock.sendall(fuzz.damaged(HELLO.pack(bytes(16), fuzz.dice.randrange(-2, 3))))
                sock.shutdown(socket.SHUT_WR)
            with ThreadPoolExecutor(2) as threads:
                for rank, sockets in enumerate(both):
                    threads.submit(sockets.join, rank, ends, DEADLINE_S)
            send_wrong_messages(fuzz, *both)


def send_wrong_messages(fuzz: Fuzz, one: PeerSockets, other: PeerSockets) -> None:
    """Send until the other refuses to go on."""
    other.expect(0, 1, [memoryview(bytearray(8))])
    for _ in range(20):
        size = fuzz.dice.choice((-1, 0, 1, 8, 100, 1 << 33, -(1 << 63)))
        head = HEADER.pack(fuzz.dice.choice((0, 1, 2, -1)), size)
        one._peers[1].sock.sendall(head + fuzz.dice.randbytes(max(0, min(size, 100))))
        try:
            other.poll()
        except RuntimeError as error:
            assert "peer sockets: rank 0" in str(error)  # noqa: PT017 (not each raises)
            return


def fuzz_copies(fuzz: Fuzz, each: int) -> None:
    """Ask a copy server wrongly, without the job's secret and with it."""
    store = CopyStore(lambda: None)
    store.grant(JobId("j1"), KEY)
    server = CopyServer(HOST, store)
    server.start()
    for _ in range(each):
        with connected(server.address) as sock, contextlib.suppress(OSError):
            text = json.dumps(fuzz.copies_request()).encode()
            sock.sendall(bytes(32) + fuzz.damaged(secret_connection.LENGTH.pack(len(text)) + text))
            sock.sendall(fuzz.dice.randbytes(32))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    for _ in range(each):
        with connected(server.address) as sock, contextlib.suppress(OSError, ElasticError):
            line = CopyConnection(sock, is_client=True)
            line._read(len(copy_wire.GREETING) + secret_connection.NONCE_BYTES)
            line._send(bytes(32))
            line._send_json(fuzz.copies_request())
            line._prove(KEY)
            line.read_answer(KEY)
            sock.sendall(fuzz.dice.randbytes(100))
    with calling(server.address) as line:
        assert line.request(CopyRequest(LIST, "j1"), KEY).copies == ()
    server.close()
    store.close()


def fuzz_feeder(fuzz: Fuzz, each: int) -> None:
    """Ask a feeder wrongly, without the secret and with it."""
    server = FeederServer(HOST, KEY)
    address = server.address
    for key in ("wrong", KEY):
        for _ in range(each):
            with connected(address) as sock, contextlib.suppress(OSError, ElasticError):
                line = FeederConnection(sock, is_client=True)
                line.ask(fuzz.copies_request(), key)
                line.read_reply(key)
                sock.sendall(fuzz.dice.randbytes(100))
    for _ in range(each):
        with connected(address) as sock, contextlib.suppress(OSError):
            sock.sendall(fuzz.dice.randbytes(100))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    with FeederOnNode(address, KEY).connect(0) as line:
        line.send(pickle.dumps([()]))
        assert pickle.loads(line.receive()) == (True, None)
    server.close()


KINDS = {"store": fuzz_store, "sockets": fuzz_sockets, "copies": fuzz_copies, "feeder": fuzz_feeder}


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_bytes_end_their_own_connection_and_nothing_else(
    caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with unharmed(caplog):
        KINDS[kind](Fuzz(1), EACH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_bytes_end_their_own_connection_and_nothing_else(
    caplog: pytest.LogCaptureFixture, kind: str, fresh_seed: int
) -> None:
    with unharmed(caplog):
        for number in range(100):
            KINDS[kind](Fuzz(fresh_seed + number), EACH)

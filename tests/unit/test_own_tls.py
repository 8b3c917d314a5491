"""Copies between agents without a certificate of the cluster: over TLS, with one of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.copy_desk import CopyDesk
from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.coord.certs import init_authority
from elastic.core.copy_messages import OWN_TLS_SINCE_MINOR, CopiesHeld, Doors, KeepCopy, Replicate
from elastic.core.world import HeldCopy, JobId, NodeId, WorkerPhase
from elastic.errors import NotAuthorized
from elastic.runtime import copy_wire
from elastic.runtime.access import find_tls
from elastic.runtime.copy_wire import FETCH, GREETING, PUSH, Request, calling, lock_of
from elastic.runtime.own_tls import OwnCertificate, Pinned
from elastic.runtime.peer_tls import PeerTls
from elastic.runtime.rpc import parse_endpoint
from elastic.runtime.snapshot_memory import Mark
from elastic.worker.peer_copies import PeerCopies
from tests.unit.coordinator_under_test import Coordinator
from tests.unit.test_peer_tls import NOW

JOB, KEY = JobId("j1"), "a secret of this job"
BODY = os.urandom(3 << 20)
MARK = Mark(1, 1, 10, 1, len(BODY) - 100, 7, 100, 9)
DEADLINE_S = 60.0
OURS = OwnCertificate()
LOCK = Pinned(OURS.fingerprint)


@pytest.fixture
def store() -> CopyStore:
    found = CopyStore(lambda: None)
    found.grant(JOB, KEY)
    return found


@pytest.fixture
def server(store: CopyStore) -> Iterator[CopyServer]:
    found = CopyServer("127.0.0.1", store, OURS)
    found.start()
    yield found
    found.close()


def push(address: str, lock: Pinned | None = LOCK, mark: Mark = MARK) -> None:
    with calling(address, tls=lock) as line:
        line.ask(Request(PUSH, JOB, mark), KEY)
        line.send_body(memoryview(BODY), lambda: True)
        line.read_answer(KEY)


def fetch(address: str, lock: Pinned | None = LOCK, key: str = KEY) -> bytes:
    body = bytearray(MARK.num_bytes)
    with calling(address, tls=lock) as line:
        line.ask(Request(FETCH, JOB, MARK), key)
        line.read_body(memoryview(body))
    return bytes(body)


def test_what_is_brought_and_fetched_is_encrypted_on_its_way(server: CopyServer) -> None:
    with Listener(parse_endpoint(server.address)) as listener:
        push(listener.address)
        assert fetch(listener.address) == BODY
    heard = listener.heard()
    assert len(heard) > 2 * len(BODY)
    for clear in (BODY[:64], BODY[-64:], b'"job"', GREETING):
        assert clear not in heard


class Listener:
    """Somebody on the way who passes on all that is said, and keeps it."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream, self._said = upstream, bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Listener:
        self._begin(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for sock in self._sockets:
            sock.close()

    def heard(self) -> bytes:
        return bytes(self._said)

    def _begin(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(self._upstream, DEADLINE_S)
            self._sockets += [near, far]
            self._begin(self._pass_on, near, far)
            self._begin(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._said += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_who_shows_another_certificate_is_told_nothing(server: CopyServer) -> None:
    """Not even which job it is about."""
    push(server.address)
    with pytest.raises(NotAuthorized, match="the coordinator has told"):
        fetch(server.address, Pinned(OwnCertificate().fingerprint))


def test_each_agent_makes_a_certificate_of_its_own() -> None:
    assert OURS.fingerprint != OwnCertificate().fingerprint
    assert len(OURS.fingerprint) == 64


@pytest.mark.parametrize("key", ["another key", ""])
def test_without_the_jobs_key_nothing_is_given(server: CopyServer, key: str) -> None:
    push(server.address)
    with pytest.raises(NotAuthorized, match="nothing is held here under this key"):
        fetch(server.address, key=key)


def test_who_was_told_a_fingerprint_does_not_talk_in_the_clear(store: CopyStore) -> None:
    clear = CopyServer("127.0.0.1", store)
    clear.start()
    try:
        with pytest.raises(NotAuthorized, match="speaks another TLS, or none"):
            push(clear.address)
    finally:
        clear.close()


def test_who_talks_in_the_clear_is_not_heard(server: CopyServer) -> None:
    with pytest.raises((OSError, NotAuthorized)):
        push(server.address, None)
    push(server.address)


# ---------------------------------------------------------------- which way is gone


def test_an_agent_that_others_reach_over_a_network_answers_at_two_doors() -> None:
    desk = CopyDesk("0.0.0.0", lambda event: None)
    try:
        assert desk.doors.at
        assert desk.doors.tls_at not in ("", desk.doors.at)
        assert len(desk.doors.fingerprint) == 64
    finally:
        desk.close()


def test_one_on_loopback_or_with_a_certificate_makes_none(tmp_path: Path) -> None:
    init_authority(tmp_path, ("127.0.0.1",), NOW)
    tls = PeerTls.of(find_tls(str(tmp_path / "coordinator")))
    for host, own in (("127.0.0.1", None), ("0.0.0.0", tls)):
        desk = CopyDesk(host, lambda event: None, own)
        desk.close()
        assert desk.doors.at
        assert desk.doors[1:] == ("", "")


def ordered(desk: CopyDesk, *, tls_only: bool) -> None:
    async def order() -> None:
        desk.order(KeepCopy(JOB, KEY, tls_only))

    asyncio.run(order())


def test_the_clear_door_is_shut_until_somebody_may_need_it() -> None:
    desk = CopyDesk("0.0.0.0", lambda event: None)
    try:
        ordered(desk, tls_only=True)
        port = {at: parse_endpoint(at)[1] for at in desk.doors[:2]}
        push(f"127.0.0.1:{port[desk.doors.tls_at]}", Pinned(desk.doors.fingerprint))
        with pytest.raises(ConnectionRefusedError):
            fetch(f"127.0.0.1:{port[desk.doors.at]}", None)
        ordered(desk, tls_only=False)
        assert fetch(f"127.0.0.1:{port[desk.doors.at]}", None) == BODY
    finally:
        desk.close()


def test_both_doors_lead_to_the_same_copies() -> None:
    desk = CopyDesk("0.0.0.0", lambda event: None)
    try:
        ordered(desk, tls_only=False)
        port = {at: parse_endpoint(at)[1] for at in desk.doors[:2]}
        push(f"127.0.0.1:{port[desk.doors.tls_at]}", Pinned(desk.doors.fingerprint))
        assert fetch(f"127.0.0.1:{port[desk.doors.at]}", None) == BODY
    finally:
        desk.close()


def test_who_is_of_an_older_version_is_told_of_the_door_that_it_knows() -> None:
    doors = Doors("a:1", "a:2", "f" * 64)
    assert doors.for_agent(OWN_TLS_SINCE_MINOR) == ("a:2", "f" * 64)
    assert doors.for_agent(OWN_TLS_SINCE_MINOR - 1) == ("a:1", "")
    assert Doors("a:1").for_agent(OWN_TLS_SINCE_MINOR) == ("a:1", "")
    assert Doors("a:1", "", "f" * 64).for_agent(OWN_TLS_SINCE_MINOR) == ("a:1", "")


def test_that_copies_go_in_the_clear_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_wire, "_said_in_the_clear", threading.Event())
    with caplog.at_level(logging.WARNING):
        assert lock_of(None, "127.0.0.1:1", "") is None
        assert not caplog.messages
        for _ in range(2):
            assert lock_of(None, "10.0.0.1:1", "") is None
        assert isinstance(lock_of(None, "10.0.0.1:1", "f" * 64), Pinned)
    assert len(caplog.messages) == 1
    assert "copies_in_the_clear first=10.0.0.1:1" in caplog.messages[0]


def test_a_certificate_of_the_cluster_comes_before_any_fingerprint(tmp_path: Path) -> None:
    init_authority(tmp_path, ("127.0.0.1",), NOW)
    tls = PeerTls.of(find_tls(str(tmp_path / "coordinator")))
    assert lock_of(tls, "10.0.0.1:1", "f" * 64) is tls


def test_a_worker_looks_for_the_certificate_of_each_agent(
    server: CopyServer, store: CopyStore
) -> None:
    push(server.address)
    clear = CopyServer("127.0.0.1", store)
    clear.start()
    try:
        addresses = [clear.address, server.address]
        good = PeerCopies(addresses, JOB, KEY, fingerprints=["", OURS.fingerprint])
        assert good.newest() == MARK.steps
        swapped = PeerCopies(addresses, JOB, KEY, fingerprints=[OURS.fingerprint, "0" * 64])
        assert swapped.newest() == -1
    finally:
        clear.close()


# ---------------------------------------------------------------- what the coordinator tells


def of(name: str, *, old: bool = False) -> dict[str, Any]:
    """Return what an agent tells of its doors."""
    if old:
        return {"copies_at": f"{name}:1", "protocol_minor": OWN_TLS_SINCE_MINOR - 1}
    own = {"copies_tls_at": f"{name}:2", "copies_fingerprint": name * 32}
    return {"copies_at": f"{name}:1", "protocol_minor": OWN_TLS_SINCE_MINOR, **own}


def told(old: Collection[str], *, is_sharded: bool) -> dict[str, Any]:
    """Let n1 train and n2 hold its state, then n3 too; return what n1 and n3 hear of n2."""
    played = Coordinator()
    for name in ("n1", "n2"):
        played.agent(name, **of(name, old=name in old))
    played.cordon("n2")
    played.submit("j1", 1, 2)
    played.ready("n1/1")
    wanted = {"copies_every": 5, "copies_sharded": is_sharded}
    played.update("n1/1", WorkerPhase.TRAINING, **wanted)
    (order,) = played.sent(Replicate)
    source = NodeId("n1" if is_sharded else "")
    played.says("n2", CopiesHeld((HeldCopy(JOB, 1, 5, source),)))
    played.agent("n3", **of("n3", old="n3" in old))
    played.ready("n3/1")
    played.ready("n1/1")
    return {"order": order} | {
        worker.partition("/")[0]: message.assignment for worker, message in played.announced.items()
    }


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("old", [(), ("n1",), ("n2",), ("n3",), ("n1", "n2", "n3")])
def test_each_agent_is_told_of_the_door_that_both_know(
    old: tuple[str, ...], is_sharded: bool
) -> None:
    heard = told(old, is_sharded=is_sharded)
    for caller in ("n1", "n3"):
        is_open = caller in old or "n2" in old
        expected = ("n2:1", "") if is_open else ("n2:2", "n2" * 32)
        if caller == "n1":
            assert (heard["order"].address, heard["order"].fingerprint) == expected
        place = heard[caller]
        prints = place.copies_fingerprints or ("",) * len(place.copies)
        ways = dict(zip(place.copies, prints, strict=True))
        known = {at: of for at, of in ways.items() if at.startswith("n2")}
        assert known in ({expected[0]: expected[1]}, {}), caller
    assert any(at.startswith("n2") for c in ("n1", "n3") for at in heard[c].copies)


def test_nodes_are_told_whether_anybody_needs_the_door_that_is_clear() -> None:
    played = Coordinator()
    for name in ("n1", "n2"):
        played.agent(name, **of(name))
    played.submit("j1")
    played.ready("n1/1")
    played.update("n1/1", WorkerPhase.TRAINING, copies_every=5)
    assert [m.tls_only for m in played.sent(KeepCopy)] == [True]
    played.agent("n3", **of("n3", old=True))
    assert [m.tls_only for m in played.sent(KeepCopy)] == [False]
    played.advance(1)
    assert played.sent(KeepCopy) == []
    played.disconnect("n3")
    played.agent("n3", incarnation=2, **of("n3"))
    assert [m.tls_only for m in played.sent(KeepCopy)] == [True]

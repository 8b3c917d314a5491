"""Copies from agent to agent over TLS: between nodes of one authority, and nobody else."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from elastic.agent.copy_server import STRANGERS_MAX, CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.coord.certs import Wanted, init_authority, issue, revoke_issued
from elastic.coord.roles import Role
from elastic.core.world import JobId
from elastic.errors import ConfigError, NotAuthorized, PeerError
from elastic.runtime import peer_tls
from elastic.runtime.access import find_tls
from elastic.runtime.copy_wire import ASK, FETCH, GREETING, PUSH, Line, Request, calling
from elastic.runtime.peer_tls import PeerTls
from elastic.runtime.rpc import parse_endpoint
from elastic.runtime.snapshot_memory import Mark

NOW = datetime.datetime.now(datetime.timezone.utc)
JOB, KEY = JobId("j1"), "a secret of this job"
BODY = os.urandom(3 << 20)
MARK = Mark(1, 1, 10, 1, len(BODY) - 100, 7, 100, 9)
DEADLINE_S = 60.0


class Cluster:
    """An authority, and an agent that holds copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_authority(folder, ("127.0.0.1",), NOW)
        self.store = CopyStore(lambda: None)
        self.store.grant(JOB, KEY)
        self.server = CopyServer("127.0.0.1", self.store, self.of("holder"))
        self.server.start()

    def of(self, name: str, role: Role = Role.NODE, days: float = 1) -> PeerTls:
        return peer_at(issue(self.folder, Wanted(name=name, role=role, days=days), NOW))

    @property
    def address(self) -> str:
        return self.server.address


def peer_at(folder: Path) -> PeerTls:
    found = PeerTls.of(find_tls(str(folder)))
    assert found is not None
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path / "pki")
    yield found
    found.server.close()


def push(cluster: Cluster, tls: PeerTls | None, mark: Mark = MARK) -> None:
    with calling(cluster.address, tls=tls) as line:
        line.ask(Request(PUSH, JOB, mark), KEY)
        line.send_body(memoryview(BODY), lambda: True)
        line.read_answer(KEY)


def fetch(cluster: Cluster, tls: PeerTls | None) -> bytes:
    with calling(cluster.address, tls=tls) as line:
        mark = line.ask(Request(ASK, JOB), KEY).mark
    assert mark is not None
    body = bytearray(mark.num_bytes)
    with calling(cluster.address, tls=tls) as line:
        line.ask(Request(FETCH, JOB, mark), KEY)
        line.read_body(memoryview(body))
    return bytes(body)


def test_what_one_node_brings_another_ones_worker_fetches(cluster: Cluster) -> None:
    push(cluster, cluster.of("n1"))
    told = cluster.of("n2").paths
    assert fetch(cluster, PeerTls.at(told)) == BODY


def test_a_coordinators_own_certificate_is_taken_too(cluster: Cluster) -> None:
    push(cluster, peer_at(cluster.folder / "coordinator"))


@pytest.mark.parametrize("verb", [ASK, FETCH, PUSH])
def test_a_certificate_of_another_authority_opens_nothing(
    cluster: Cluster, tmp_path: Path, verb: str
) -> None:
    push(cluster, cluster.of("n1"))
    init_authority(tmp_path / "theirs", ("127.0.0.1",), NOW)
    issue(tmp_path / "theirs", Wanted(name="n1", role=Role.NODE), NOW)
    stranger = tmp_path / "theirs" / "n1"
    with pytest.raises(NotAuthorized, match="one authority has signed"):
        ask(cluster, peer_at(stranger), verb)
    # One who believes our authority, and so hears our answer.
    shutil.copy(cluster.folder / "ca.crt", stranger / "ca.crt")
    with pytest.raises(NotAuthorized, match="UNKNOWN_CA"):
        ask(cluster, peer_at(stranger), verb)


def ask(cluster: Cluster, tls: PeerTls, verb: str) -> None:
    with calling(cluster.address, tls=tls) as line:
        line.ask(Request(verb, JOB, MARK), KEY)


@pytest.mark.parametrize("role", [Role.SUBMIT, Role.READ])
def test_a_users_certificate_with_the_key_of_a_job_opens_nothing(
    cluster: Cluster, role: Role
) -> None:
    with pytest.raises((NotAuthorized, ConnectionError)):
        ask(cluster, cluster.of("bob", role), ASK)
    push(cluster, cluster.of("n1"))


def test_a_certificate_that_is_over_opens_nothing(cluster: Cluster) -> None:
    with pytest.raises(NotAuthorized, match="EXPIRED"):
        ask(cluster, cluster.of("n1", days=1e-9), ASK)


@pytest.mark.parametrize("kind", ["another authority", "a user", "none"])
def test_nothing_is_asked_of_one_who_is_no_agent_of_the_cluster(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    """Neither the job's name nor a proof reaches who plays a holder."""
    init_authority(tmp_path / "theirs", ("127.0.0.1",), NOW)
    players = {
        "another authority": lambda: peer_at(tmp_path / "theirs" / "coordinator"),
        "a user": lambda: cluster.of("bob", Role.SUBMIT),
        "none": lambda: None,
    }
    with playing(players[kind]()) as (address, heard):
        with pytest.raises(NotAuthorized), calling(address, tls=cluster.of("n1")) as line:
            line.ask(Request(ASK, JOB), KEY)
        heard_all = heard()
    assert JOB.encode() not in heard_all


@contextmanager
def playing(tls: PeerTls | None) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Answer one connection as a holder would, and keep what it says."""
    said = bytearray()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.settimeout(DEADLINE_S)
        try:
            if tls is not None:
                sock = tls.wrap(sock, is_client=False)
                sock.do_handshake()  # type: ignore[attr-defined]
            sock.sendall(GREETING + bytes(32))
            while data := sock.recv(4096):
                said.extend(data)
        except OSError:
            pass
        finally:
            sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()

        def heard() -> bytes:
            thread.join(DEADLINE_S)
            return bytes(said)

        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join(DEADLINE_S)


def test_who_speaks_in_the_clear_is_not_heard(cluster: Cluster) -> None:
    with socket.create_connection(parse_endpoint(cluster.address), DEADLINE_S) as sock:
        line = Line(sock, is_client=True)
        sock.sendall(bytes(32) + b"\x00\x00\x00\x02{}" + bytes(32))
        with pytest.raises((OSError, PeerError)):
            line.ask(Request(ASK, JOB), KEY)
    push(cluster, cluster.of("n1"))


def test_a_certificate_that_was_issued_anew_is_used_without_a_restart(cluster: Cluster) -> None:
    ours = cluster.of("n1", days=1e-9)
    with pytest.raises(NotAuthorized):
        push(cluster, ours)
    cluster.of("n1")
    push(cluster, ours)
    (cluster.folder / "n1" / "tls.crt").write_text("-----BEGIN nothing\n")
    push(cluster, ours, MARK._replace(number=2))  # The one before, until it is whole.


def test_half_of_a_lock_is_refused_at_the_start(cluster: Cluster) -> None:
    assert PeerTls.of(None) is None
    assert PeerTls.of(find_tls(ca=str(cluster.folder / "ca.crt"))) is None
    (cluster.folder / "holder" / "tls.key").write_bytes(
        (cluster.folder / "coordinator" / "tls.key").read_bytes()
    )
    with pytest.raises(ConfigError, match="its own key"):
        peer_at(cluster.folder / "holder")


def test_a_node_that_is_locked_out_brings_and_takes_no_copies(cluster: Cluster) -> None:
    ours = cluster.of("n1")
    push(cluster, ours)
    other = cluster.of("n2")
    revoke_issued(cluster.folder, "n1", NOW)
    with pytest.raises((NotAuthorized, OSError)):
        fetch(cluster, ours)
    assert fetch(cluster, other) == BODY
    revoke_issued(cluster.folder, "holder", NOW)
    with pytest.raises(NotAuthorized, match="was revoked"):
        fetch(cluster, other)


GREETINGS = {
    "nothing": b"",
    "half of a hello": b"\x16\x03\x01\x02\x00\x01\x00",
    "garbage": bytes(range(256)) * 4,
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_crowd_that_shows_nothing_keeps_no_node_out(cluster: Cluster, greeting: str) -> None:
    ours, where = cluster.of("n1"), parse_endpoint(cluster.address)
    with ExitStack() as crowd:
        for number in range(3 * STRANGERS_MAX):
            sock = crowd.enter_context(socket.create_connection(where, DEADLINE_S))
            with suppress(OSError):  # It may have been told to go.
                sock.sendall(GREETINGS[greeting])
            if number % STRANGERS_MAX == 0:
                push(cluster, ours, MARK._replace(number=number + 1))
        push(cluster, ours, MARK._replace(number=9999))
    assert fetch(cluster, ours) == BODY


def test_one_who_sends_a_byte_at_a_time_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tls, "HANDSHAKE_S", 0.3)
    began = time.monotonic()
    with socket.create_connection(parse_endpoint(cluster.address), DEADLINE_S) as slow:
        slow.settimeout(0.05)
        while time.monotonic() < began + DEADLINE_S:
            try:
                slow.sendall(b"\x16\x03\x01\x02\x00"[:1])
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() < began + DEADLINE_S

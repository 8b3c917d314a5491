"""A stranger with every address of a running job, and no secret, on the workers' own ports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.coord.roles import Role
from elastic.core.view import JobView
from elastic.runtime import copy_wire, secret_connection
from elastic.testing.local_cluster import LocalCluster
from elastic.worker.group import store_wire
from elastic.worker.group.group_store import GroupStore, StoreAddress
from tests.chaos.shared import end, job_of, train_with
from tests.integration.locked import authority, certificate
from tests.patience import DEADLINE_S

Address = tuple[str, int]
CONNECT_S = 0.3
"""What is shut does not even refuse."""
CROWD = 400
TLS_ALERT = b"\x15\x03"
TOKEN = "a-long-random-word"
NOBODY = 65534


def sockets_of(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets of processes."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    return inodes


def listening(pids: list[int]) -> list[Address]:
    """Return where processes listen: what any user of a machine may read of all others."""
    inodes = sockets_of(pids)
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        host, _, port = fields[1].partition(":")
        if fields[3] == "0A" and fields[9] in inodes:
            packed = struct.pack("<I", int(host, 16))
            found.append((socket.inet_ntoa(packed), int(port, 16)))
    return sorted(found)


def probing(where: Address) -> socket.socket | None:
    """Return a connection, None if there is none to be had."""
    with contextlib.suppress(OSError):
        return socket.create_connection(where, CONNECT_S)
    return None


def say(where: Address, *words: bytes) -> bytes:
    """Say something on a connection; return what comes back."""
    received = b""
    sock = probing(where)
    if sock is not None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(CONNECT_S)
            for one in words:
                sock.sendall(one)
            while more := sock.recv(1 << 16):
                received += more
    return received


def gain(received: bytes) -> bytes:
    """Return what a stranger learns from this that is not for everybody.

    A greeting is a number that was drawn for him; a refusal and TLS's alert say nothing.
    """
    if received.startswith(TLS_ALERT):
        return b""
    if received.startswith(store_wire.MAGIC):
        return received[store_wire.GREETING_BYTES :]
    if received.startswith(copy_wire.GREETING):
        rest = received[len(copy_wire.GREETING) + secret_connection.NONCE_BYTES :]
        return b"" if b"nothing is held here under this key" in rest else rest
    return received


class Stranger:
    """The attacks; each returns what it has got hold of, b"" for nothing."""

    def __init__(self, ports: list[Address], leader: Address, job_id: str, generation: int) -> None:
        self.ports, self.leader = ports, leader
        self.job_id, self.generation = job_id, generation
        self.dice = random.Random(13)

    def attacks(self) -> Iterator[Callable[[], bytes]]:
        for name in sorted(vars(Stranger)):
            if name.startswith("to_"):
                yield getattr(self, name)

    def everywhere(self, *words: bytes) -> bytes:
        with ThreadPoolExecutor(len(self.ports)) as threads:
            return b"".join(threads.map(lambda port: gain(say(port, *words)), self.ports))

    def to_read_keys(self) -> bytes:
        """Use torch's own client, as anybody can."""
        with contextlib.suppress(Exception):
            limit = timedelta(seconds=CONNECT_S)
            store = dist.TCPStore(
                *self.leader, is_master=False, wait_for_workers=False, timeout=limit
            )
            return str(store.num_keys()).encode()
        return b""

    def to_guess_the_secret(self) -> bytes:
        received = b""
        for key in ("", "0", self.job_id, "a" * 64):
            for generation in (self.generation, self.generation + 1, 0, (1 << 64) - 1):
                where = StoreAddress(f"{self.leader[0]}:{self.leader[1]}", generation, key)
                with contextlib.suppress(Exception):
                    store = GroupStore.connect(where, lambda: CONNECT_S, lambda: True)
                    received += b"%d keys" % store.num_keys()
        return received

    def to_write_votes_and_parts_without_a_proof(self) -> bytes:
        key = f"{self.job_id}/{self.generation}/1/elastic/report/0/parts".encode()
        part = b'[0, "../../../precious", [], "x"]\n'
        frame = store_wire.packed(store_wire.StoreVerb.APPEND, (key, part))
        count = store_wire.packed(store_wire.StoreVerb.COUNT, ())
        return self.everywhere(bytes(store_wire.HELLO_BYTES), frame, count)

    def to_write_before_the_hello(self) -> bytes:
        frame = store_wire.packed(store_wire.StoreVerb.SET, (b"closed", b"1"))
        return self.everywhere(frame * 20, store_wire.packed(store_wire.StoreVerb.COUNT, ()))

    def to_poison_generations_to_come(self) -> bytes:
        received = b""
        for later in range(1, 40):
            key = f"{self.job_id}/{self.generation + later}/1/0//cpu//0/0".encode()
            hello = bytes(16) + store_wire.GENERATION.pack(self.generation + later) + bytes(32)
            frame = store_wire.packed(store_wire.StoreVerb.SET, (key, self.dice.randbytes(64)))
            received += say(self.leader, hello, frame)[store_wire.GREETING_BYTES :]
        return received

    def to_be_a_peer_of_gloo(self) -> bytes:
        """Say the number of a pair that it waits for, before its member does."""
        return b"".join(self.everywhere(struct.pack("<q", number)) for number in range(8))

    def to_be_a_member_of_the_mesh(self) -> bytes:
        return self.everywhere(struct.pack("<16sq", bytes(16), 1), struct.pack("<qq", 0, 8) * 9)

    def to_fetch_weights(self) -> bytes:
        request = b'{"verb": "list", "job": "' + self.job_id.encode() + b'", "mark": null}'
        body = struct.pack(">I", len(request)) + request
        return self.everywhere(bytes(32), body, bytes(32))

    def to_fill_the_memory(self) -> bytes:
        return self.everywhere(store_wire.LENGTH.pack(1 << 30), bytes(8 << 20))

    def to_exhaust_descriptors(self) -> bytes:
        crowd, ports = [], list(self.ports)
        for number in range(CROWD):
            port = ports[number % len(ports)]
            sock = probing(port)
            if sock is None:
                ports.remove(port)  # It lets nobody in any more.
                continue
            with contextlib.suppress(OSError):
                sock.sendall(self.dice.randbytes(8))
            crowd.append(sock)
        for sock in crowd:
            sock.close()
        return b""

    def to_hold_connections_open(self) -> bytes:
        with ThreadPoolExecutor(20) as threads:
            crowd = list(threads.map(probing, self.ports * 20))
        for sock in crowd:
            if sock is not None:
                sock.close()
        return b""

    def to_send_garbage(self) -> bytes:
        for _ in range(5):
            self.everywhere(self.dice.randbytes(self.dice.randrange(1, 5000)))
        return b""

    def to_send_a_pickle(self) -> bytes:
        pickled = b"cos\nsystem\n(S'touch /tmp/elastic-was-here'\ntR."
        return self.everywhere(struct.pack("<q", len(pickled)) + pickled)


def pids_of(view: JobView) -> list[int]:
    return [worker.report.pid for worker in view.workers if worker.report.pid]


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster with a token, or mutual TLS, which must make no difference at workers' ports.

    On one machine the stranger is another user of it: he sees every port.
    """
    locks: dict[str, Path]
    if request.param == "token":
        locks = {"token_file": tmp_path / "token"}
        locks["token_file"].touch(0o600)
        locks["token_file"].write_text(TOKEN)
    else:
        locks = {"tls_dir": authority(tmp_path / "pki")}
        for name in ("n1", "n2"):
            certificate(locks["tls_dir"], name, Role.NODE)
    with LocalCluster(nodes=2, directory=tmp_path / "cluster", **locks) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("guarded", ["token", "mutual TLS"], indirect=True)
def test_a_stranger_on_the_workers_ports_has_no_effect(
    guarded: LocalCluster, tmp_path: Path
) -> None:
    cluster = guarded
    job = job_of("guarded", tmp_path / "guarded", min_workers=2, max_workers=2)
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, lambda v: train_with(2, v), "two workers that train")
    generation, pids = view.record.generation, pids_of(view)
    leader = view.record.group.members[0].store_address  # type: ignore[union-attr]
    host, _, port = leader.rpartition(":")
    # The agents have the copies.
    attacked = [*pids, *(agent.pid for agent in cluster.agents.values())]
    before = {pid: (len(os.listdir(f"/proc/{pid}/fd")), rss_bytes(pid)) for pid in attacked}
    stranger = Stranger(listening(attacked), (host, int(port)), job_id, generation)
    assert (host, int(port)) in stranger.ports
    assert {where for where, _ in stranger.ports} == {host}, "an address that no agent was given"
    assert len([*stranger.attacks()]) == 13
    for attack in stranger.attacks():
        assert attack() == b"", f"{attack.__name__} has got something"
    view = cluster.job(job_id)
    assert (view.record.generation, view.record.failures, view.record.losses) == (generation, 0, 0)
    assert pids_of(view) == pids
    for pid in attacked:
        assert len(os.listdir(f"/proc/{pid}/fd")) <= before[pid][0] + 300
        assert rss_bytes(pid) - before[pid][1] < 64 << 20
    assert not Path("/tmp/elastic-was-here").exists()
    logs = [path.read_text(errors="replace") for path in cluster.directory.rglob("*.log")]
    assert any("stranger_turned_away" in log for log in logs)
    assert not any("Traceback" in log for log in logs)
    end(cluster, job, job_id)


def unix_sockets(pids: list[int]) -> list[str]:
    """Return the names of these processes' Unix sockets, as `connect` takes them."""
    inodes = sockets_of(pids)
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[6] in inodes:
            found.append(re.sub("^@", "\0", fields[7]))
    return found


def intrude(pids: list[int], names: list[str], folder: Path, secret: str) -> Iterator[str]:
    """Yield what another user of the machine may do to processes and read of their files."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            yield f"signal {pid}"
        for name in ("environ", "maps", "mem", "stack"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
                file.read(1)
                yield f"read /proc/{pid}/{name}"
        with contextlib.suppress(OSError):
            os.listdir(f"/proc/{pid}/fd")
            yield f"list the files of {pid}"
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if secret in command or re.search("[0-9a-f]{32}", command):
            yield f"read a secret in {command}"
    for name in names:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(name)
            yield f"connect to {name}"
    for path in (Path(root, name) for root, _, files in os.walk(folder) for name in files):
        with contextlib.suppress(OSError):
            if secret in path.read_text(errors="replace"):
                yield f"read the secret in {path}"
        if path.suffix in (".log", ".key", ".jsonl") and os.access(path, os.R_OK):
            yield f"read {path}"
        if os.access(path, os.W_OK):
            yield f"write {path}"


def as_another_user(
    stranger: Stranger, pids: list[int], names: list[str], folder: Path
) -> dict[str, Any]:
    """Attack as a user who has no rights here; return what was got hold of, by attack."""
    "".encode(
        "idna"
    )  # Loaded by sockets when first used, and this user may not read Python's files.
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    found = {attack.__name__: attack() for attack in stranger.attacks()}
    return {**found, "intrude": "; ".join(intrude(pids, names, folder, TOKEN))}


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("guarded", ["token"], indirect=True)
def test_another_user_of_the_machine_gets_hold_of_nothing(
    guarded: LocalCluster, tmp_path: Path
) -> None:
    for path in (tmp_path, *tmp_path.parents[:2]):  # pytest's own folders let nobody in.
        path.chmod(0o755)
    cluster = guarded
    job = job_of("guarded", tmp_path / "guarded", min_workers=2, max_workers=2)
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, lambda v: train_with(2, v), "two workers that train")
    workers = pids_of(view)
    assert cluster.coordinator is not None
    every = [cluster.coordinator.pid, *workers, *(agent.pid for agent in cluster.agents.values())]
    leader = view.record.group.members[0].store_address  # type: ignore[union-attr]
    host, _, port = leader.rpartition(":")
    address = (host, int(port))
    stranger = Stranger(listening(every[1:]), address, job_id, view.record.generation)
    sockets = unix_sockets(every)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        found = other.submit(as_another_user, stranger, every, sockets, cluster.directory).result(
            DEADLINE_S
        )
    assert len(found) == 14
    assert not any(found.values()), found
    view = cluster.job(job_id)
    assert (view.record.failures, view.record.losses, pids_of(view)) == (0, 0, workers)
    end(cluster, job, job_id)


@pytest.mark.slow
def test_a_stranger_who_attacks_while_groups_form_only_delays(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """On one machine he sees each new port at once, and may be faster than a member."""
    job = job_of("formed", tmp_path / "formed", min_workers=2, max_workers=2)
    job_id = cluster.submit(job.spec)
    view = cluster.wait(job_id, lambda v: train_with(2, v), "two workers that train")
    over = threading.Event()
    number, held = [0], deque[socket.socket](maxlen=200)

    def attack() -> None:
        while not over.is_set():
            for where in listening([pid for pid in pids_of(view) if Path(f"/proc/{pid}").exists()]):
                sock = probing(where)
                if sock is not None:
                    number[0] += 1
                    held.append(sock)  # Until it is one of too many.
                    with contextlib.suppress(OSError):
                        if number[0] % 2:
                            sock.sendall(struct.pack("<q", number[0] % 4))
                    if len(held) == held.maxlen:
                        held[0].close()

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()
    try:
        for _ in range(3):
            generation = view.record.generation
            os.kill(pids_of(view)[-1], 9)
            view = cluster.wait(
                job_id,
                lambda v, g=generation: v.record.generation > g and train_with(2, v),
                "two workers that train again",
            )
    finally:
        over.set()
        attacker.join()
        for sock in held:
            sock.close()
    assert number[0]
    end(cluster, job, job_id)

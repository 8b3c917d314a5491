"""Daemons that `elastic start` leaves running on this machine, and how others find them.

Rule: a record in a folder that only this user can write to lists the started processes. Readers
check that the processes are still alive, so an ended cluster is not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.client.embedded import START_TIMEOUT_S, last_words, start_daemon
from elastic.core.facts import NodePhase
from elastic.errors import Unavailable, UsageError
from elastic.runtime.access import find_access
from elastic.runtime.route import address_towards
from elastic.storage.run_record import RunOwner

if TYPE_CHECKING:
    from elastic.client.jobs import Client

RECORD = "started.json"
STOP_TIMEOUT_S = 60.0
"""Longer than an agent's time for its workers to leave."""
POLL_S = 0.05
ANYWHERE = "192.0.2.1"
"""An address that no network has, to which the default route leads."""
REFUSALS = (2, 78)
"""Exit codes of a daemon that does not take its command line: trying again is no use."""


@dataclass(frozen=True)
class StartedDaemon:
    """A started process: its part of a cluster, and the path of its output."""

    part: str
    process: RunOwner
    log: str


@dataclass(frozen=True)
class StartedCluster:
    """The daemons on this machine.

    Attributes:
        address: "host:port" of the coordinator, on this machine or another.
        token_file: the join token, "" for none.
        daemons: in the order of their start.
    """

    address: str
    token_file: str = ""
    daemons: tuple[StartedDaemon, ...] = ()

    @property
    def is_head(self) -> bool:
        return any(daemon.part == "coordinator" for daemon in self.daemons)

    def alive(self) -> tuple[StartedDaemon, ...]:
        return tuple(d for d in self.daemons if d.process.is_other_and_alive())


def folder() -> Path:
    """Return this user's folder for record, token and logs."""
    return Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}" / "started"


def find_started() -> StartedCluster | None:
    """Return the cluster that `elastic start` started here, None if nothing is alive."""
    path = folder() / RECORD
    try:
        found = path.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            return None  # Another user's: all users can write to /tmp.
        body = json.loads(path.read_text())
        daemons = tuple(
            StartedDaemon(d["part"], RunOwner(**d["process"]), d["log"]) for d in body["daemons"]
        )
        started = StartedCluster(body["address"], body["token_file"], daemons)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return started if started.alive() else None


def start_head(
    host: str, port: int, node: Sequence[str], *, token_file: str, store: str
) -> StartedCluster:
    """Start a coordinator and the agent of this machine.

    Args:
        host: address of this machine for other nodes; on loopback they cannot reach it.
        port: of the coordinator.
        node: flags of the agent: its resources.
        token_file: of the join token, "" to create one.
        store: of the coordinator.

    Raises:
        UsageError: something was started here before, and still runs; or a part refuses its flags.
        Unavailable: a part did not come up; its log is shown.
    """
    _check_none()
    if not token_file:
        token_file = str(folder() / "token")
        fd = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(24))
    listen = host if host.startswith("127.") else "0.0.0.0"  # With a token only.
    ready = folder() / "coordinator.ready"
    ready.unlink(missing_ok=True)
    address = f"{host}:{port}"
    started = StartedCluster(address, token_file)
    with _all_or_nothing():
        started, process = _spawn(
            started, "coordinator", "elastic.coord.cli", "serve", "--listen", f"{listen}:{port}",
            "--advertise", address, "--store", store, "--ready-file", str(ready),
            "--token-file", token_file,
        )  # fmt: skip
        _wait_until(started, process, ready.exists)
        return _with_agent(started, node)


def join(address: str, node: Sequence[str], *, token_file: str) -> StartedCluster:
    """Start an agent of this machine for a coordinator elsewhere.

    Raises:
        UsageError: something was started here before, and still runs; or it refuses its flags.
        Unavailable: it did not come up; its log is shown.
    """
    _check_none()
    with _all_or_nothing():
        return _with_agent(StartedCluster(address, token_file), node)


def stop_started(started: StartedCluster, *, force: bool = False) -> tuple[StartedDaemon, ...]:
    """End the daemons, the agent first: its workers leave at a boundary."""
    gone = started.alive()
    for daemon in reversed(gone):
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.process.pid, signal.SIGKILL if force else signal.SIGTERM)
        until = time.monotonic() + STOP_TIMEOUT_S
        while daemon.process.is_other_and_alive():
            if time.monotonic() > until:
                os.kill(daemon.process.pid, signal.SIGKILL)
            time.sleep(POLL_S)
    (folder() / RECORD).unlink(missing_ok=True)
    return gone


def own_address() -> str:
    """Return the address of this machine on its way to others, loopback if it has none."""
    try:
        return address_towards(ANYWHERE)
    except OSError:
        return "127.0.0.1"


def _check_none() -> None:
    there = find_started()
    if there is not None:
        parts = ", ".join(f"{d.part} (pid {d.process.pid})" for d in there.alive())
        raise UsageError(
            f"elastic start: {parts} of {there.address} runs here already; 'elastic stop' ends it"
        )
    for place in (folder().parent, folder()):  # The first one is the agent's, too.
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.stat()
        except OSError as error:
            raise UsageError(f"elastic start: cannot use {place}: {error}") from error
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise UsageError(f"elastic start: {place} is not this user's alone; remove it")


@contextlib.contextmanager
def _all_or_nothing() -> Iterator[None]:
    """End what was started if the block raises, also on Ctrl-C."""
    try:
        yield
    except BaseException:
        stop_started(find_started() or StartedCluster(""), force=True)
        raise


def _with_agent(started: StartedCluster, node: Sequence[str]) -> StartedCluster:
    from elastic.client.jobs import Client  # Not needed by scripts that only search for a cluster.

    access = ("--token-file", started.token_file) if started.token_file else ()
    log_dir = folder() / "logs"
    shutil.rmtree(log_dir, ignore_errors=True)
    started, process = _spawn(
        started, "agent", "elastic.agent.cli", "--coord", started.address, *access,
        "--node-id", socket.gethostname(), "--log-dir", str(log_dir), *node,
    )  # fmt: skip
    with Client(started.address, find_access(started.token_file)) as client:
        _wait_until(started, process, lambda: _has_this_node(client))
    return started


def _has_this_node(client: Client) -> bool:
    name = socket.gethostname()
    try:
        nodes = client.status().view.nodes
    except Unavailable:
        return False
    return any(n.node.node_id == name and n.phase is NodePhase.READY for n in nodes)


def _spawn(
    started: StartedCluster, part: str, *command: str
) -> tuple[StartedCluster, subprocess.Popen[bytes]]:
    path = folder() / f"{part}.log"
    process = start_daemon(path, *command)
    daemon = StartedDaemon(part, RunOwner.of(process.pid), str(path))
    started = StartedCluster(started.address, started.token_file, (*started.daemons, daemon))
    record = folder() / RECORD
    fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(started), file)
    return started, process


def _wait_until(
    started: StartedCluster, process: subprocess.Popen[bytes], is_there: Callable[[], bool]
) -> None:
    """Wait until the last started part is ready.

    Raises:
        Unavailable: it is not in time.
        UsageError: it refused its flags.
    """
    daemon = started.daemons[-1]
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        if is_there():
            return
        time.sleep(POLL_S)
    kind = UsageError if process.returncode in REFUSALS else Unavailable
    raise kind(f"the {daemon.part} did not come up; {last_words(Path(daemon.log))}")


def node_flags(
    *, num_cpus: int | None, num_gpus: int | None, resources: Mapping[str, float]
) -> list[str]:
    """Return an agent's flags for a node's resources; by default as many slots as CPUs."""
    amounts = dict(resources)
    if num_cpus is not None:
        amounts["CPU"] = num_cpus
    if num_gpus is not None:
        amounts["GPU"] = num_gpus
    slots = num_cpus if num_cpus is not None else len(os.sched_getaffinity(0))
    flags = ["--workers", str(max(1, slots, num_gpus or 0))]
    if amounts:
        flags += ["--resources", ",".join(f"{name}={n:g}" for name, n in amounts.items())]
    return flags

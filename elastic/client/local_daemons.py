"""Daemons that `elastic start` leaves running on this machine, and how others find them.

Rule: a record in a folder that only this user can write to lists the started processes. Readers
check that the processes are still alive, so an ended cluster is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
PRINTED_AFTER_S = 1.0
"""An end that takes longer is printed; an agent without a coordinator is asked again."""
ANYWHERE = "192.0.2.1"
"""An address that no network has, to which the default route leads."""
REFUSALS = (2, 78)
"""Exit codes of a daemon that does not take its command line: trying again is no use."""

PrintLine = Callable[[str], None]


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

    def runs(self, part: str) -> bool:
        return any(daemon.part == part for daemon in self.alive())

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
    host: str, port: int, node: Sequence[str], *, token_file: str, store: str, print_line: PrintLine
) -> StartedCluster:
    """Start a coordinator and the agent of this machine, or which of them is gone.

    Args:
        host: address of this machine for other nodes; on loopback they cannot reach it.
        port: of the coordinator.
        node: flags of the agent: its resources.
        token_file: of the join token, "" to create one.
        store: of the coordinator.
        print_line: takes a line about what is waited for.

    Raises:
        UsageError: both, or parts of another cluster, run here; or a part refuses its flags.
        Unavailable: a part did not come up; its log is shown.
    """
    address = f"{host}:{port}"
    with _one_at_a_time():
        there = started = _what_is_left(("coordinator", "agent"), address, token_file)
        if not started.token_file:
            started = replace(started, token_file=_create_token())
        with _all_or_nothing(there):
            if not started.runs("coordinator"):
                started = _with_coordinator(started, host, port, store)
            if not started.runs("agent"):
                started = _with_agent(started, node, print_line)
    return started


def join(
    address: str, node: Sequence[str], *, token_file: str, print_line: PrintLine
) -> StartedCluster:
    """Start an agent of this machine for a coordinator elsewhere, or for one whose agent is gone.

    `print_line` takes a line about what is waited for.

    Raises:
        UsageError: there is one, or a part of another cluster, here; or it refuses its flags.
        Unavailable: it did not come up; its log is shown.
    """
    with _one_at_a_time():
        there = _what_is_left(("agent",), address, token_file)
        with _all_or_nothing(there):
            return _with_agent(there, node, print_line)


def stop_started(
    started: StartedCluster, *, force: bool = False, print_line: PrintLine = lambda _: None
) -> tuple[StartedDaemon, ...]:
    """End the daemons, the agent first: its workers leave at a boundary.

    An agent whose coordinator has ended does not wait for that, because nothing can be saved.

    Args:
        started: the cluster.
        force: kill them.
        print_line: takes a line about what is waited for.
    """
    gone = started.alive()
    is_cut = started.is_head and not started.runs("coordinator")
    for daemon in reversed(gone):
        _signal(daemon, signal.SIGKILL if force else signal.SIGTERM)
        if not _has_ended(daemon, PRINTED_AFTER_S) and not force:
            print_line(_why_it_lasts(daemon, is_cut=is_cut))
            if is_cut:
                _signal(daemon, signal.SIGTERM)
        if not _has_ended(daemon, STOP_TIMEOUT_S):
            _signal(daemon, signal.SIGKILL)
            _has_ended(daemon, STOP_TIMEOUT_S)
    (folder() / RECORD).unlink(missing_ok=True)
    return gone


def _why_it_lasts(daemon: StartedDaemon, *, is_cut: bool) -> str:
    who = f"{daemon.part} (pid {daemon.process.pid})"
    if daemon.part != "agent":
        return f"{who} ends"
    if is_cut:
        return f"{who} ends its workers unsaved: their coordinator is gone"
    return f"{who} waits for its workers to leave at a step boundary; at once: elastic stop --now"


def _signal(daemon: StartedDaemon, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(daemon.process.pid, number)


def _has_ended(daemon: StartedDaemon, within_s: float) -> bool:
    """Wait for the end of a process; return whether it came in time."""
    until = time.monotonic() + within_s
    while daemon.process.is_other_and_alive():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def own_address() -> str:
    """Return the address of this machine on its way to others, loopback if it has none."""
    try:
        return address_towards(ANYWHERE)
    except OSError:
        return "127.0.0.1"


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for another start by this user: the record would list the processes of one of them."""
    _make_folder()
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _what_is_left(parts: Collection[str], address: str, token_file: str) -> StartedCluster:
    """Return the cluster that is to be started, with what there is of it already.

    Raises:
        UsageError: all of these parts run, or parts of another cluster.
    """
    there = find_started()
    if there is None:
        shutil.rmtree(_log_dir(), ignore_errors=True)
        return StartedCluster(address, token_file)
    names = ", ".join(f"{d.part} (pid {d.process.pid})" for d in there.alive())
    text = f"elastic start: {names} of {there.address} runs here already; 'elastic stop' ends it"
    if all(map(there.runs, parts)):
        raise UsageError(text)
    if address != there.address or token_file not in ("", there.token_file):
        raise UsageError(
            f"{text}; with the same address and token, 'elastic start' starts what it lacks"
        )
    return there


def _make_folder() -> None:
    for place in (folder().parent, folder()):  # The first one is the agent's, too.
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.stat()
        except OSError as error:
            raise UsageError(f"elastic start: cannot use {place}: {error}") from error
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise UsageError(f"elastic start: {place} is not this user's alone; remove it")


def _log_dir() -> Path:
    return folder() / "logs"


def _create_token() -> str:
    token_file = str(folder() / "token")
    fd = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(24))
    return token_file


@contextlib.contextmanager
def _all_or_nothing(there: StartedCluster) -> Iterator[None]:
    """End what was started if the block raises, also on Ctrl-C; not what was `there` before."""
    try:
        yield
    except BaseException:
        found = find_started() or there
        new = tuple(daemon for daemon in found.daemons if daemon not in there.daemons)
        stop_started(replace(found, daemons=new), force=True)
        if there.daemons:
            _write(there)
        raise


def _with_coordinator(started: StartedCluster, host: str, port: int, store: str) -> StartedCluster:
    listen = host if host.startswith("127.") else "0.0.0.0"  # With a token only.
    ready = folder() / "coordinator.ready"
    ready.unlink(missing_ok=True)
    flags = {
        "--listen": f"{listen}:{port}",
        "--advertise": started.address,
        "--store": store,
        "--ready-file": str(ready),
        "--token-file": started.token_file,
    }
    return _spawn(started, "coordinator", ("elastic.coord.cli", "serve"), flags, (), ready.exists)


def _with_agent(
    started: StartedCluster, node: Sequence[str], print_line: PrintLine
) -> StartedCluster:
    from elastic.client.jobs import Client  # Not needed by scripts that only search for a cluster.

    flags = {
        "--coord": started.address,
        "--node-id": socket.gethostname(),
        "--log-dir": str(_log_dir()),
    }
    if started.token_file:
        flags["--token-file"] = started.token_file
    is_printed = False
    with Client(started.address, find_access(started.token_file)) as client:

        def is_there() -> bool:
            nonlocal is_printed
            try:
                return _has_this_node(client)
            except Unavailable as error:
                if not is_printed:
                    print_line(f"waits {START_TIMEOUT_S:g} s at most: {error}")
                is_printed = True
                return False

        return _spawn(started, "agent", ("elastic.agent.cli",), flags, node, is_there)


def _has_this_node(client: Client) -> bool:
    name, nodes = socket.gethostname(), client.status().view.nodes
    return any(n.node.node_id == name and n.phase is NodePhase.READY for n in nodes)


def _spawn(
    started: StartedCluster,
    part: str,
    command: Sequence[str],
    flags: Mapping[str, str],
    more: Sequence[str],
    is_there: Callable[[], bool],
) -> StartedCluster:
    """Start a part, and wait until it is ready.

    Raises:
        Unavailable: it is not in time.
        UsageError: it refused its flags.
    """
    path = folder() / f"{part}.log"
    process = start_daemon(path, *command, *itertools.chain(*flags.items()), *more)
    daemon = StartedDaemon(part, RunOwner.of(process.pid), str(path))
    others = [one for one in started.daemons if one.part != part]
    # The coordinator is first, also where it was started again.
    daemons = sorted((*others, daemon), key=lambda one: one.part != "coordinator")
    started = replace(started, daemons=tuple(daemons))
    _write(started)
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        if is_there():
            return started
        time.sleep(POLL_S)
    kind = UsageError if process.returncode in REFUSALS else Unavailable
    raise kind(f"the {part} did not come up; {last_words(path)}")


def _write(started: StartedCluster) -> None:
    record = folder() / RECORD
    fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(started), file)


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

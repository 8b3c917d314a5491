"""An embedded cluster: a coordinator and an agent on loopback that end with this process.

Rule: nothing outlives the process that started it: a pipe ties the daemons to it, and when that
closes, however the process ended, they end themselves and all workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import Unavailable
from elastic.runtime.access import Access
from elastic.runtime.eventlog import for_owner
from elastic.runtime.ready import address_in

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.01
PARTS = ("coordinator", "agent")
"""The processes in the order of their start; each writes a log of this name."""
LAST_WORDS_MAX = 2000
FIRST_FD = 3
"""Lower numbers are for standard streams, even if one is closed: a child gets its own there."""
NOT_FOR_US = frozenset({
    "ELASTIC_ACCELERATOR_TYPE", "ELASTIC_ADVERTISE", "ELASTIC_COORD_FILE",
    "ELASTIC_DRAIN_TIMEOUT", "ELASTIC_EVENT_LOG",
    "ELASTIC_HOST", "ELASTIC_HTTP", "ELASTIC_LABELS", "ELASTIC_LISTEN", "ELASTIC_LOG_DIR",
    "ELASTIC_METRICS", "ELASTIC_NODE_ID",
    "ELASTIC_NOTICES", "ELASTIC_REMOVES_RUN_DIR", "ELASTIC_RESOURCES", "ELASTIC_RUN_DIR",
    "ELASTIC_SPARES", "ELASTIC_STORE", "ELASTIC_STORE_CA", "ELASTIC_STORE_CERT",
    "ELASTIC_STORE_KEY", "ELASTIC_STORE_USER", "ELASTIC_STUDIES", "ELASTIC_TETHER_FD",
    "ELASTIC_TLS_CA", "ELASTIC_TLS_CERT", "ELASTIC_TLS_DIR", "ELASTIC_TLS_KEY", "ELASTIC_TOKENS",
    "ELASTIC_TOKEN_FILE", "ELASTIC_VERSION", "ELASTIC_WORKERS", "ELASTIC_WORKER_PORTS",
})  # fmt: skip
"""Variables of the two commands; they are meant for other daemons and not passed to these."""


@dataclass
class ClusterConnection:
    """The cluster of a driver or of `elastic run`.

    Attributes:
        address: "host:port" of the coordinator.
        access: credentials for it.
        processes: started for this script, in order; empty for a named cluster.
        directory: their files; deleted in the end.
        tether_fd: our end of the pipe whose closing ends them.
        num_workers: slots of the embedded agent, 0 if it counted them itself.
        by_itself: its size was not chosen explicitly: if a run needs more, another cluster
            replaces it.
        env: of all workers of what this script submits.
    """

    address: str
    access: Access = field(default_factory=Access)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    directory: Path | None = None
    tether_fd: int = -1
    num_workers: int = 0
    by_itself: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_embedded(self) -> bool:
        return bool(self.processes)

    def log_of(self, name: str) -> Path:
        """Return the path of a part's output."""
        return (self.directory or Path()) / f"{name}.log"

    def start(self, name: str, tether_fd: int, *command: str) -> None:
        """Start a part, tied to this process by the pipe of `tether_fd`."""
        tether = ("--tether-fd", str(tether_fd))
        log = self.log_of(name)
        self.processes.append(start_daemon(log, *command, *tether, fds=[tether_fd]))

    def check(self) -> None:
        """Check that the embedded processes still run; any thread.

        Raises:
            Unavailable: one has ended, and is not restarted; the text has its log.
        """
        for name, process in zip(PARTS, self.processes, strict=False):
            if process.poll() is not None:
                raise Unavailable(
                    f"the embedded {name} (pid {process.pid}) {_how(process)} while a job ran, "
                    f"which ends with it: nothing here starts another one; run the script again "
                    f"to resume from its newest checkpoint; {last_words(self.log_of(name))}"
                )


def start_cluster(
    num_workers: int | None, *, resources: Mapping[str, float] | None = None
) -> ClusterConnection:
    """Start a coordinator, then an agent, tied to this process by a pipe.

    Args:
        num_workers: workers that the agent may run at once, None for its own default.
        resources: of the node, in place of those that the agent detects; no more GPUs than exist.

    Raises:
        Unavailable: a part did not start; the text has its log.
    """
    directory = Path(tempfile.mkdtemp(prefix="elastic-"))
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token = secrets.token_urlsafe(24)
    token_file.write_text(token)
    theirs, ours = _pipe()
    cluster = ClusterConnection("", Access(token), directory=directory, tether_fd=ours)
    cluster.num_workers = num_workers or 0
    ready = directory / "coordinator.ready"
    try:
        workers = "auto" if num_workers is None else str(num_workers)
        # Both at once, so that their imports run in parallel.
        cluster.start(
            "coordinator", theirs, "elastic.coord.cli", "serve", "--listen", "127.0.0.1:0",
            "--store", "memory:", "--ready-file", str(ready), "--token-file", str(token_file),
        )  # fmt: skip
        amounts = ",".join(f"{name}={amount:g}" for name, amount in (resources or {}).items())
        cluster.start(
            "agent", theirs, "elastic.agent.cli", "--coord-file", str(ready),
            "--workers", workers, "--resources", amounts or "auto",
            "--token-file", str(token_file), "--node-id", "local",
            "--run-dir", str(directory), "--log-dir", str(directory / "logs"),
            "--removes-run-dir",
        )  # fmt: skip
        cluster.address = _wait_ready(cluster, ready)
        _wait_node(cluster)
    except BaseException:
        stop_cluster(cluster)
        raise
    finally:
        os.close(theirs)
    return cluster


def _pipe() -> tuple[int, int]:
    """Return a pipe for reading and writing."""
    low = os.pipe()
    try:
        first, second = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD) for fd in low)
    finally:
        for fd in low:
            os.close(fd)
    return first, second


def start_daemon(log: Path, *command: str, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start the module of a daemon, in a session of its own; `log` receives its output."""
    with open(log, "wb", opener=for_owner) as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={name: value for name, value in os.environ.items() if name not in NOT_FOR_US},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            start_new_session=True,
        )


def last_words(log: Path) -> str:
    """Return the end of a daemon's output, as the end of a message."""
    text = log.read_text(errors="replace")[-LAST_WORDS_MAX:] if log.exists() else ""
    return f"its log ends:\n{text}"


def _wait_ready(cluster: ClusterConnection, ready: Path) -> str:
    """Return the coordinator's address once it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    coordinator = cluster.processes[0]
    while time.monotonic() < deadline:
        if ready.exists() and (text := ready.read_text().strip()):
            return address_in(text)
        if coordinator.poll() is not None:
            break
        time.sleep(POLL_S)
    raise Unavailable(_startup_failure(cluster, "coordinator", coordinator))


def _wait_node(cluster: ClusterConnection) -> None:
    """Wait until the agent has registered: before that a job would seem to lack nodes."""
    from elastic.client.jobs import Client

    deadline = time.monotonic() + START_TIMEOUT_S
    agent = cluster.processes[-1]
    with Client(cluster.address, cluster.access) as client:
        while time.monotonic() < deadline and agent.poll() is None:
            if client.status().view.nodes:
                return
            time.sleep(POLL_S)
    raise Unavailable(_startup_failure(cluster, "agent", agent))


def _startup_failure(
    cluster: ClusterConnection, name: str, process: subprocess.Popen[bytes]
) -> str:
    """Return the text for a part of the embedded cluster that did not start."""
    is_slow = process.poll() is None
    how = f"within {START_TIMEOUT_S:g} s" if is_slow else f"and {_how(process)}"
    return f"the embedded {name} did not come up {how}; {last_words(cluster.log_of(name))}"


def _how(process: subprocess.Popen[bytes]) -> str:
    """Return how a part ended, as the end of a sentence."""
    code = process.returncode
    if code >= 0:
        return f"ended with exit code {code}"
    names = {int(one): one.name for one in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def stop_cluster(cluster: ClusterConnection) -> None:
    """End the processes: the agent first, so that it ends its workers.

    If this is interrupted (Ctrl-C again), all of them are killed, and the files still removed.
    """
    try:
        for process in reversed(cluster.processes):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
    finally:
        for process in reversed(cluster.processes):
            process.kill()
            process.wait()
        tether_fd, cluster.tether_fd = cluster.tether_fd, -1
        if tether_fd >= 0:
            os.close(tether_fd)
        if cluster.directory is not None:
            shutil.rmtree(cluster.directory, ignore_errors=True)

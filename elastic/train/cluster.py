"""The cluster that a driver script uses: a named one, or one started for the script.

`init()` without an address starts a coordinator and an agent as child processes on loopback and
stops them with the script: when the script ends, however it ends, the pipe that ties them to it
closes, and they end themselves and all workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import ConfigError, CoordinatorUnreachable, Unavailable, UsageError
from elastic.runtime.rpc import read_token_file

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.01


@dataclass
class Cluster:
    """What the driver is connected to.

    Attributes:
        address: "host:port" of the coordinator.
        token: for every call, "" for none.
        processes: what was started for this script, in order; empty for a named cluster.
        directory: their files; deleted in the end.
        tether_fd: our end of the pipe whose closing ends them.
        num_workers: slots of the embedded agent, 0 if it counted them itself.
        by_itself: nobody called `init`: it was started for `TorchTrainer.fit`.
    """

    address: str
    token: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    directory: Path | None = None
    tether_fd: int = -1
    num_workers: int = 0
    by_itself: bool = False

    @property
    def is_embedded(self) -> bool:
        """Return whether this script started it."""
        return bool(self.processes)


_cluster: Cluster | None = None


def _forget_in_fork() -> None:
    """Let a fork of this process neither stop the cluster nor keep it alive."""
    global _cluster
    cluster, _cluster = _cluster, None
    if cluster is not None and cluster.tether_fd >= 0:
        os.close(cluster.tether_fd)


os.register_at_fork(after_in_child=_forget_in_fork)


def init(
    address: str | None = None,
    *,
    token_file: str | Path | None = None,
    num_workers: int | None = None,
) -> None:
    """Connect to a cluster, or start one for this script.

    A script that a worker runs (`elastic submit`) is in its cluster already: there it does nothing.

    Args:
        address: "host:port" of a coordinator, or several with commas. None takes the environment
            variable ELASTIC_COORD, and without it starts a coordinator and an agent.
        token_file: file with the join token; None takes ELASTIC_TOKEN_FILE, if set.
        num_workers: workers that the started agent may run at once; by default one per GPU, or
            one per CPU core. Not for a named cluster.

    Raises:
        UsageError: called twice without `shutdown`, or arguments that contradict each other.
        CoordinatorUnreachable: nobody answers at the address.
        NotAuthorized: the token is missing or wrong.
        Unavailable: the embedded cluster did not come up; its log is shown.
    """
    global _cluster
    if _is_worker():
        return
    if _cluster is not None:
        raise UsageError(
            f"elastic.init was called already (coordinator {_cluster.address}): call "
            f"elastic.shutdown() first"
        )
    address = address or os.environ.get("ELASTIC_COORD") or None
    if address is not None:
        if num_workers is not None:
            raise UsageError(
                f"elastic.init(num_workers={num_workers}) is for a cluster of this script's own; "
                f"the agents of {address} have their own --workers"
            )
        named = token_file or os.environ.get("ELASTIC_TOKEN_FILE")
        token = read_token_file(named) if named else ""
        _check_reachable(address, token)
        _cluster = Cluster(address, token)
        return
    if token_file is not None:
        raise UsageError(
            f"elastic.init(token_file={str(token_file)!r}) without an address: a cluster of this "
            f"script's own has its own token; pass address=... or set ELASTIC_COORD"
        )
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"elastic.init(num_workers={num_workers}): expected >= 1")
    _cluster = _start_embedded(num_workers)
    atexit.register(shutdown)


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    return _cluster is not None


def shutdown() -> None:
    """Disconnect; a cluster that `init` started is stopped, with everything that it runs."""
    global _cluster
    cluster, _cluster = _cluster, None
    if cluster is None or not cluster.is_embedded:
        return
    atexit.unregister(shutdown)
    _stop(cluster)


def require_cluster(min_workers: int, max_workers: int) -> Cluster:
    """Return the cluster; start one with so many workers if there is none, or one too small.

    Raises:
        UsageError: this script has started a cluster in which the job would wait for ever.
        Unavailable: the cluster did not come up, or is gone.
    """
    if _cluster is not None and 0 < _cluster.num_workers < min_workers:
        if not _cluster.by_itself:
            raise UsageError(
                f"the run needs {min_workers} workers and elastic.init(num_workers="
                f"{_cluster.num_workers}) started a cluster with room for fewer: ask init for "
                f"more, or the run for less"
            )
        shutdown()
    if _cluster is None:
        count = max(max_workers, os.cpu_count() or 1)
        init(num_workers=None if os.environ.get("ELASTIC_COORD") else count)
        if _cluster is not None:
            _cluster.by_itself = True
    if _cluster is None:
        raise UsageError("this process is a worker: only the script that started it has a cluster")
    for process in _cluster.processes:
        if process.poll() is not None:
            raise Unavailable(
                f"the cluster of this script is gone (pid {process.pid} ended with code "
                f"{process.returncode}): call elastic.shutdown(), then elastic.init()"
            )
    return _cluster


def _is_worker() -> bool:
    """Return whether a train function runs in this process; loads nothing to find out."""
    context = sys.modules.get("elastic.worker.context")
    return context is not None and context.current() is not None


def _check_reachable(address: str, token: str) -> None:
    from elastic.client.jobs import Client

    with contextlib.closing(Client(address, token)) as client:
        client.status()


def _start_embedded(num_workers: int | None) -> Cluster:
    """Start a coordinator, then an agent, tied to this process by a pipe."""
    directory = Path(tempfile.mkdtemp(prefix="elastic-"))
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token = secrets.token_urlsafe(24)
    token_file.write_text(token)
    theirs, ours = os.pipe()
    cluster = Cluster("", token, directory=directory, tether_fd=ours)
    cluster.num_workers = num_workers or 0
    ready = directory / "coordinator.ready"
    try:
        _spawn(
            cluster, theirs, "coordinator", "elastic.coord.cli", "serve",
            "--listen", "127.0.0.1:0", "--store", "memory:", "--ready-file", str(ready),
            "--token-file", str(token_file),
        )  # fmt: skip
        cluster.address = _wait_ready(cluster, ready)
        workers = "auto" if num_workers is None else str(num_workers)
        _spawn(
            cluster, theirs, "agent", "elastic.agent.cli", "--coord", cluster.address,
            "--workers", workers, "--token-file", str(token_file), "--node-id", "local",
            "--run-dir", str(directory), "--log-dir", str(directory / "logs"),
        )  # fmt: skip
        _wait_node(cluster)
    except BaseException:
        _stop(cluster)
        raise
    finally:
        os.close(theirs)
    return cluster


def _spawn(cluster: Cluster, tether_fd: int, name: str, module: str, *args: str) -> None:
    directory = cluster.directory or Path()
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args, "--tether-fd", str(tether_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(tether_fd,),
            start_new_session=True,
        )
    cluster.processes.append(process)


def _wait_ready(cluster: Cluster, ready: Path) -> str:
    """Return the coordinator's address once it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    coordinator = cluster.processes[0]
    while time.monotonic() < deadline:
        if ready.exists() and (text := ready.read_text().strip()):
            return _address_in(text)
        if coordinator.poll() is not None:
            break
        time.sleep(POLL_S)
    raise Unavailable(_story(cluster, "coordinator", coordinator))


def _wait_node(cluster: Cluster) -> None:
    """Wait until the agent has registered: before that a job would seem to lack nodes."""
    from elastic.client.jobs import Client

    deadline = time.monotonic() + START_TIMEOUT_S
    agent = cluster.processes[-1]
    with Client(cluster.address, cluster.token) as client:
        while time.monotonic() < deadline and agent.poll() is None:
            if client.status().view.nodes:
                return
            time.sleep(POLL_S)
    raise Unavailable(_story(cluster, "agent", agent))


def _story(cluster: Cluster, name: str, process: subprocess.Popen[bytes]) -> str:
    """Return why a part of the embedded cluster did not come up."""
    log = (cluster.directory or Path()) / f"{name}.log"
    said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    code = process.poll()
    how = f"within {START_TIMEOUT_S:g} s" if code is None else f"and ended with exit code {code}"
    return f"the embedded {name} did not come up {how}; it said:\n{said}"


def _address_in(text: str) -> str:
    """Return the address of a ready line: "... address=HOST:PORT ..."."""
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "address":
            return value
    raise CoordinatorUnreachable("(unknown)", f"the ready file says {text!r}")


def _stop(cluster: Cluster) -> None:
    """End what was started: agent first, so that it takes its workers with it."""
    for process in reversed(cluster.processes):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if cluster.tether_fd >= 0:
        os.close(cluster.tether_fd)
    if cluster.directory is not None:
        shutil.rmtree(cluster.directory, ignore_errors=True)

"""The cluster that a driver script uses: a named one, or one started for the script.

`init()` without an address starts a coordinator and an agent as child processes on loopback and
stops them with the script: when the script ends, however it ends, the pipe that ties them to it
closes, and they end themselves and all workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic.client.embedded import Cluster, start_cluster, stop_cluster
from elastic.core.config import JobSpec
from elastic.core.policy.placement import explain_misfit
from elastic.core.world import Node
from elastic.errors import ConfigError, Unavailable, UsageError
from elastic.runtime.access import Access, find_access

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
    tls_dir: str | Path | None = None,
    num_workers: int | None = None,
) -> None:
    """Connect to a cluster, or start one for this script.

    A script that a worker runs (`elastic submit`) is in its cluster already: there it does nothing.

    Args:
        address: "host:port" of a coordinator, or several with commas. None takes the environment
            variable ELASTIC_COORD, and without it starts a coordinator and an agent.
        token_file: file with the join token; None takes ELASTIC_TOKEN_FILE, if set.
        tls_dir: folder with ca.crt, and tls.crt and tls.key if this script has a certificate;
            None takes ELASTIC_TLS_DIR, and ELASTIC_TLS_CERT, _KEY and _CA for single files.
        num_workers: workers that the started agent may run at once; by default one per GPU, or
            one per CPU core. Not for a named cluster.

    Raises:
        UsageError: called twice without `shutdown`, or arguments that contradict each other.
        CoordinatorUnreachable: nobody answers at the address.
        NotAuthorized: the token or certificate is missing or wrong.
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
        access = _find_access(token_file, tls_dir)
        _check_reachable(address, access)
        _cluster = Cluster(address, access)
        return
    if token_file is not None or tls_dir is not None:
        name, value = ("token_file", token_file) if token_file else ("tls_dir", tls_dir)
        raise UsageError(
            f"elastic.init({name}={str(value)!r}) without an address: a cluster of this "
            f"script's own has its own token; pass address=... or set ELASTIC_COORD"
        )
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"elastic.init(num_workers={num_workers}): expected >= 1")
    _cluster = start_cluster(num_workers)
    atexit.register(shutdown)


def _find_access(token_file: str | Path | None, tls_dir: str | Path | None) -> Access:
    """Return what arguments and environment name; an argument wins over its variable."""
    given = {"cert": "ELASTIC_TLS_CERT", "key": "ELASTIC_TLS_KEY", "ca": "ELASTIC_TLS_CA"}
    single = {name: os.environ.get(variable, "") for name, variable in given.items()}
    return find_access(
        str(token_file or os.environ.get("ELASTIC_TOKEN_FILE", "")),
        folder=str(tls_dir or os.environ.get("ELASTIC_TLS_DIR", "")),
        **({} if tls_dir else single),
    )


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
    stop_cluster(cluster)


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


def check_fits(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """Refuse a run that would wait for ever on a cluster of this script's own, which cannot grow.

    Args:
        spec: the run.
        nodes: of the cluster; without one, such as while its agent comes back, nothing is known.

    Raises:
        UsageError: with what is missing.
    """
    if reason := explain_misfit(spec, nodes):
        raise UsageError(
            f"run {spec.name}: this script's own cluster is this machine only, and the run would "
            f"wait for ever: {reason}; leave out of its ScalingConfig what keeps it from "
            f"running here, or name a cluster: elastic.init(address), or ELASTIC_COORD"
        )


def _is_worker() -> bool:
    """Return whether a train function runs in this process; loads nothing to find out."""
    context = sys.modules.get("elastic.worker.context")
    return context is not None and context.current() is not None


def _check_reachable(address: str, access: Access) -> None:
    from elastic.client.jobs import Client

    with contextlib.closing(Client(address, access)) as client:
        client.status()

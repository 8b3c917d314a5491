"""The cluster that a driver script uses: a named one, or one started for the script.

`init()` without an address starts a coordinator and an agent as child processes on loopback and
stops them with the script: when the script ends, however it ends, a pipe to them closes, and
they end themselves and all workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.client.embedded import ClusterConnection, start_cluster, stop_cluster
from elastic.client.local_daemons import find_started
from elastic.core.config import JobSpec
from elastic.core.facts import Node, NodePhase, WorkerPhase
from elastic.core.policy.placement import explain_misfit
from elastic.core.view import ClusterView
from elastic.errors import ConfigError, Unavailable, UsageError
from elastic.runtime.access import Access, find_access
from elastic.train.cluster_options import check_unknown, offered, slots, worker_env
from elastic.train.config_checks import is_whole

_cluster: ClusterConnection | None = None


def _forget_in_fork() -> None:
    """Keep a fork of this process from stopping the cluster or keeping it alive."""
    global _cluster
    cluster, _cluster = _cluster, None
    if cluster is not None and cluster.tether_fd >= 0:
        os.close(cluster.tether_fd)


os.register_at_fork(after_in_child=_forget_in_fork)


@dataclass(frozen=True)
class ClusterContext:
    """What `init` returns; a context manager that shuts down at its end.

    Attributes:
        address: "host:port" of the coordinator, "" in a worker.
    """

    address: str

    @property
    def address_info(self) -> dict[str, str]:
        """Return the addresses by Ray's names."""
        return {"address": self.address, "gcs_address": self.address}

    @property
    def dashboard_url(self) -> str:
        """Return "": there is no dashboard; see `elastic status` and the coordinator's metrics."""
        return ""

    def __getitem__(self, name: str) -> str:
        """Return an address by Ray's name."""
        return self.address_info[name]

    def disconnect(self) -> None:
        """Do as `shutdown`."""
        shutdown()

    def __enter__(self) -> ClusterContext:
        """Return the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Shut down."""
        shutdown()


def init(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    ignore_reinit_error: bool = False,
    token_file: str | Path | None = None,
    tls_dir: str | Path | None = None,
    num_workers: int | None = None,
    **rest: Any,
) -> ClusterContext:
    """Connect to a cluster, or start one for this script.

    In a script that a worker runs (`elastic submit`) it does nothing: that is in a cluster already.

    Args:
        address: "host:port" of a coordinator, or several with commas; "auto" for an existing one:
            that of the environment variable ELASTIC_COORD, or one that `elastic start` has
            started on this machine; "local" for a new one. None takes an existing one, else
            starts a coordinator and an agent.
        num_cpus: CPUs that the started agent offers, and workers that it runs at once, if not
            `num_workers`; by default one for each processor. This and the next two are not for an
            existing cluster.
        num_gpus: GPUs that it offers, of those on this machine.
        resources: other resources that it offers, by name.
        runtime_env: {"env_vars": {...}} for all workers of this script's runs.
        ignore_reinit_error: a second call does nothing.
        token_file: file with the join token; None takes ELASTIC_TOKEN_FILE, if set.
        tls_dir: folder with ca.crt, and tls.crt and tls.key if this script has a certificate;
            None takes ELASTIC_TLS_DIR, and ELASTIC_TLS_CERT, _KEY and _CA for single files.
        num_workers: workers that the started agent may run at once, in place of `num_cpus`.
        rest: other arguments of `ray.init` (logging, the dashboard, the object store), which are
            ignored.

    Raises:
        UsageError: called twice without `shutdown`, or arguments that contradict each other, or
            a `runtime_env` with more than variables.
        CoordinatorUnreachable: no reply from the address.
        NotAuthorized: the token or certificate is missing or wrong.
        Unavailable: the embedded cluster did not start; its log is shown.
    """
    global _cluster
    check_unknown(rest)
    env = worker_env(runtime_env)
    amounts = offered(num_cpus, num_gpus, resources)
    if num_workers is not None and (not is_whole(num_workers) or num_workers < 1):
        raise ConfigError(f"elastic.init(num_workers={num_workers}): expected >= 1")
    if _is_worker():
        return ClusterContext("")
    if _cluster is not None:
        if ignore_reinit_error:
            return ClusterContext(_cluster.address)
        raise UsageError(
            f"elastic.init was called already (coordinator {_cluster.address}): call "
            f"elastic.shutdown() first, or pass ignore_reinit_error=True"
        )
    address, access = _there(address, token_file, tls_dir)
    if address:
        asked = {"num_workers": num_workers, **amounts}
        if any(value is not None for value in asked.values()):
            raise UsageError(
                f"elastic.init: {', '.join(name for name in asked if asked[name] is not None)} are "
                f"for a cluster of this script's own; the agents of {address} have their own "
                f"(address='local' starts one)"
            )
        _check_reachable(address, access)
        _cluster = ClusterConnection(address, access, env=env)
        return ClusterContext(address)
    if token_file is not None or tls_dir is not None:
        name, value = ("token_file", token_file) if token_file else ("tls_dir", tls_dir)
        raise UsageError(
            f"elastic.init({name}={str(value)!r}) without an address: a cluster of this "
            f"script's own has its own token; pass address=... or set ELASTIC_COORD"
        )
    _cluster = start_cluster(slots(num_workers, amounts), resources=amounts)
    _cluster.env = env
    _cluster.by_itself = num_workers is None and num_cpus is None
    atexit.register(shutdown)
    return ClusterContext(_cluster.address)


def _there(
    address: str | None, token_file: str | Path | None, tls_dir: str | Path | None
) -> tuple[str, Access]:
    """Return address and access of an existing cluster, "" for a new one.

    Raises:
        UsageError: one is requested, and none is known.
    """
    if address == "local":
        return "", Access()
    named = os.environ.get("ELASTIC_COORD", "") if address in (None, "auto") else address
    if named:
        return named, _find_access(token_file, tls_dir)
    started = find_started()
    if started is not None:
        is_reported = token_file or os.environ.get("ELASTIC_TOKEN_FILE")
        return started.address, _find_access(
            token_file if is_reported else started.token_file, tls_dir
        )
    if address == "auto":
        raise UsageError(
            "elastic.init('auto'): no cluster is there: ELASTIC_COORD is not set, and 'elastic "
            "start --head' has started none on this machine"
        )
    return "", Access()


def _find_access(token_file: str | Path | None, tls_dir: str | Path | None) -> Access:
    """Return the access from arguments and environment; an argument overrides its variable."""
    single = {
        name: os.environ.get(f"ELASTIC_{name.upper()}", "")
        for name in ("tls_cert", "tls_key", "tls_ca")
    }
    return find_access(
        str(token_file or os.environ.get("ELASTIC_TOKEN_FILE", "")),
        tls_dir=str(tls_dir or os.environ.get("ELASTIC_TLS_DIR", "")),
        **({} if tls_dir else single),
    )


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    return _cluster is not None


def shutdown() -> None:
    """Disconnect; stop a cluster that `init` started, with everything that it runs."""
    global _cluster
    cluster, _cluster = _cluster, None
    if cluster is None or not cluster.is_embedded:
        return
    atexit.unregister(shutdown)
    stop_cluster(cluster)


def connected() -> ClusterConnection:
    """Return the cluster that this process is connected to.

    Raises:
        UsageError: it is connected to none, or is a worker.
    """
    if _cluster is None:
        raise UsageError("no cluster is connected: call elastic.init() first, in the script")
    return _cluster


def cluster_resources() -> dict[str, float]:
    """Return the resources of all nodes together, by name; "slots" is how many workers may run.

    Raises:
        UsageError: no cluster is connected.
    """
    return _total(_view())


def available_resources() -> dict[str, float]:
    """Return the resources that no worker holds now; raises as `cluster_resources`."""
    view = _view()
    left = _total(view)
    for job in view.jobs:
        for worker in job.workers:
            if worker.report.phase is not WorkerPhase.EXITED:
                for name, amount in job.record.spec.resources_per_worker.as_dict().items():
                    left[name] = left.get(name, 0.0) - amount
    left["slots"] = float(sum(node.free_slots for node in view.nodes))
    return left


def nodes() -> list[dict[str, Any]]:
    """Return the nodes by Ray's names; raises as `cluster_resources`."""
    return [
        {
            "NodeID": node.node.node_id,
            "NodeManagerAddress": node.node.host,
            "Alive": node.phase in (NodePhase.READY, NodePhase.DRAINING),
            "Resources": node.node.resources.as_dict(),
            "Labels": dict(node.node.labels),
        }
        for node in _view().nodes
    ]


def _view() -> ClusterView:
    from elastic.client.jobs import Client

    cluster = connected()
    with Client(cluster.address, cluster.access) as client:
        return client.status().view


def _total(view: ClusterView) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in view.nodes:
        if node.phase is NodePhase.READY:
            has = {**node.node.resources.as_dict(), "slots": float(node.node.num_slots)}
            for name, amount in has.items():
                total[name] = total.get(name, 0.0) + amount
    return total


def require_cluster(min_workers: int, max_workers: int) -> ClusterConnection:
    """Return the cluster; start one with enough workers if there is none, or it is too small.

    Raises:
        UsageError: this script has started a cluster in which the job would wait for ever.
        Unavailable: the cluster did not start, or has ended.
    """
    env: Mapping[str, str] = {}
    if _cluster is not None and 0 < _cluster.num_workers < min_workers:
        if not _cluster.by_itself or _runs_something(_cluster):
            raise UsageError(
                f"the run needs {min_workers} workers and elastic.init started a cluster with "
                f"room for {_cluster.num_workers}: ask init for more (num_cpus=), or the run for "
                f"less"
            )
        env = _cluster.env
        shutdown()
    if _cluster is None:
        room = max(max_workers, len(os.sched_getaffinity(0)))
        is_there = bool(_there(None, None, None)[0])
        init(num_workers=None if is_there else room)
        if _cluster is not None:
            _cluster.by_itself, _cluster.env = True, env
    if _cluster is None:
        raise UsageError("this process is a worker: only the script that started it has a cluster")
    for process in _cluster.processes:
        if process.poll() is not None:
            raise Unavailable(
                f"the cluster of this script is gone (pid {process.pid} ended with code "
                f"{process.returncode}): call elastic.shutdown(), then elastic.init()"
            )
    return _cluster


def _runs_something(cluster: ClusterConnection) -> bool:
    """Return whether a job runs or waits there, which replacing the cluster would end."""
    from elastic.client.jobs import Client

    with Client(cluster.address, cluster.access) as client:
        return bool(client.list(include_ended=False))


def check_fits(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """Refuse a run that would wait for ever on this script's own cluster, whose size is fixed.

    Args:
        spec: the run.
        nodes: of the cluster; empty, as while its agent reconnects, means unknown.

    Raises:
        UsageError: names what is missing.
    """
    if reason := explain_misfit(spec, nodes):
        raise UsageError(
            f"run {spec.name}: this script's own cluster is this machine only, and the run would "
            f"wait for ever: {reason}; leave out of its ScalingConfig what keeps it from "
            f"running here, or name a cluster: elastic.init(address), or ELASTIC_COORD"
        )


def _is_worker() -> bool:
    """Return whether a train function runs in this process, without importing anything."""
    call = sys.modules.get("elastic.worker.engine.train_call")
    return call is not None and call.current() is not None


def _check_reachable(address: str, access: Access) -> None:
    from elastic.client.jobs import Client

    with contextlib.closing(Client(address, access)) as client:
        client.status()

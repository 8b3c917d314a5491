"""Translates torchrun's command line to a job: the number of workers and their entry point.

Rule: pure functions. A flag of torchrun is either followed or listed in `IGNORED`, with what
happens instead; none is ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.client.job_options import JobOptions
from elastic.client.submission import entry_of, plain_name, run_path_of
from elastic.core.config import VIRTUAL_LOCAL_RANK, JobSpec, check_name
from elastic.core.facts import Entry, EntryKind, JobId, Node, sorted_pairs
from elastic.core.policy.placement import explain_misfit
from elastic.errors import ConfigError, UsageError

PROGRAM = "elastic.worker.process.program"
AS_MANY = ("auto", "cpu", "gpu")
THREADS = "OMP_NUM_THREADS"

IGNORED: Mapping[str, str] = {
    "rdzv-backend": "workers meet through the coordinator",
    "rdzv-endpoint": "workers meet through the coordinator; name it with --coord",
    "rdzv-conf": "workers meet through the coordinator, which waits for them without a limit",
    "monitor-interval": "an agent notices the end of a worker at once",
    "start-method": "workers are forked from a process that has imported torch",
    "event-log-handler": "what happens is in the agent's event log",
    "duplicate-stdout-filters": "use grep on what --tee writes",
    "duplicate-stderr-filters": "use grep on what --tee writes",
    "node-rank": "the coordinator gives the ranks; start this once, not on each node",
    "master-addr": "rank 0's worker listens at an address of its node",
    "master-port": "rank 0's worker listens at a port that the system picks",
    "local-addr": "where others reach a node is an option of its agent: elastic-agent --host",
    "logs-specs": "--tee, --redirects and --local-ranks-filter select where output goes",
    "numa-binding": "workers are bound to no CPU; start the agent under numactl for that",
    "print-completion": "_ELASTIC_COMPLETE=bash_source elastic prints one, for zsh and fish too",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP end the job, and call no handler of a script",
}
"""Flags that are accepted without effect, and what happens instead."""


@dataclass(frozen=True, kw_only=True)
class RunCommandLine:
    """The command line of `elastic run`, as far as the job depends on it.

    Attributes:
        script: path of the script, name of the module, or of the program.
        is_module: `-m`.
        no_python: the script is a program of its own.
        virtual_local_rank: a worker sees its own GPU only, and LOCAL_RANK is 0.
        nodes: (min, max) of --nnodes.
        nproc_per_node: a number, or one of `AS_MANY`.
        num_workers: (min, max) of --min and --max, None for torchrun's way of counting.
        max_restarts: how often the script may fail.
        shutdown_timeout: seconds that a script's handler of SIGTERM has.
        threads: OMP_NUM_THREADS in this command's environment, "" if unset.
        working_dir: where workers run it, "" for the current directory.
        shared: options that `elastic submit` has as well.
    """

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    no_python: bool = False
    virtual_local_rank: bool = False
    nodes: tuple[int, int] = (1, 1)
    nproc_per_node: str = "1"
    num_workers: tuple[int, int] | None = None
    max_restarts: int = 0
    shutdown_timeout: float = 30.0
    rdzv_id: str = ""
    role: str = "default"
    name: str = ""
    storage: str = ""
    threads: str = ""
    working_dir: str = ""
    shared: JobOptions = field(default_factory=JobOptions)


@dataclass(frozen=True)
class JobSize:
    """The number of workers of a job, and of GPUs per worker.

    Attributes:
        low, high: workers.
        per_node: workers of a node as torchrun counts them; the group is a multiple of it.
        gpus: of each worker; below 1 where workers share one.
    """

    low: int
    high: int
    per_node: int = 1
    gpus: float = 0.0


def per_node(launch: RunCommandLine, nodes: Sequence[Node]) -> int:
    """Return --nproc-per-node as a number; "auto" and the like use the smallest node.

    Raises:
        UsageError: no node is connected, or none has a GPU.
    """
    wanted = launch.nproc_per_node
    if wanted not in AS_MANY:
        return int(wanted)
    if not nodes:
        raise UsageError(
            f"--nproc-per-node {wanted}: no node is connected that could be counted; start an "
            f"elastic-agent, or give a number"
        )
    gpus = [int(node.resources.amount("GPU")) for node in nodes]
    if wanted == "gpu" and not max(gpus):
        raise UsageError(f"--nproc-per-node gpu: none of {len(nodes)} nodes has a GPU; try cpu")
    if wanted != "cpu" and max(gpus):
        return min(count for count in gpus if count)
    return max(1, min(int(node.resources.amount("CPU")) for node in nodes))


def size_on(launch: RunCommandLine, nodes: Sequence[Node]) -> JobSize:
    """Return the job's size on a cluster with these nodes."""
    counts = [int(node.resources.amount("GPU")) for node in nodes]
    gpus = min((count for count in counts if count), default=0)
    if launch.num_workers is not None:
        low, high = launch.num_workers
        return JobSize(low, high, gpus=min(1.0, gpus))
    count = per_node(launch, nodes)
    low, high = (number * count for number in launch.nodes)
    return JobSize(low, high, count, _share(count, gpus))


def size_here(launch: RunCommandLine, node: Node) -> JobSize:
    """Return the job's size if this machine is the only node: it cannot grow."""
    size = size_on(launch, (node,))
    high = size.high if launch.num_workers is not None else size.low
    return replace(size, high=high, gpus=_share(high, int(node.resources.amount("GPU"))))


def _share(workers: int, gpus: int) -> float:
    """Return the share of a GPU for each worker; as under torchrun, they may share one."""
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


def check_alone(launch: RunCommandLine) -> None:
    """Check that the job can run on this machine alone.

    Raises:
        UsageError: more than one node is needed.
    """
    low, _ = launch.nodes
    if low > 1:
        raise UsageError(
            f"--nnodes needs {low} nodes and no coordinator is named, so that this machine is the "
            f"only one: start elastic-coord once and elastic-agent on each node, then give "
            f"--coord HOST:PORT (or ELASTIC_COORD)"
        )


def check_fits(spec: JobSpec, node: Node) -> None:
    """Check that a job fits on this node, the only one: otherwise it would wait for ever.

    Raises:
        UsageError: it does not; names what is missing.
    """
    if reason := explain_misfit(spec, (node,)):
        raise UsageError(
            f"no coordinator is named, so that this machine is the only node, and the job would "
            f"wait for ever: {reason}; leave out what keeps it from running here, or give "
            f"--coord HOST:PORT (or ELASTIC_COORD)"
        )


def job_spec(launch: RunCommandLine, size: JobSize, *, job_id: str, stamp: str) -> JobSpec:
    """Return the job.

    Raises:
        ConfigError: values that cannot work.
        UsageError: the script is not on this machine.
    """
    stem = plain_name(launch.rdzv_id) if launch.rdzv_id else _stem(launch)
    name = launch.name or f"{stem}-{stamp}-{job_id.rpartition('-')[2]}"
    check_name("job", name)
    if launch.max_restarts < 0:
        raise ConfigError(f"--max-restarts {launch.max_restarts}: expected >= 0")
    spec = JobSpec(
        job_id=JobId(job_id),
        name=name,
        entry=_entry(launch, size),
        min_workers=size.low,
        max_workers=size.high,
        workers_per_replica=size.per_node,
        own_steps=True,
        # A separate program forms its own group; the worker around it computes nothing.
        backend="gloo" if launch.no_python else "auto",
        max_failures=launch.max_restarts,
        grace_s=launch.shutdown_timeout,
        run_path=run_path_of(launch.storage, name),
    )
    return launch.shared.apply(spec, {"GPU": size.gpus} if size.gpus else {})


def _stem(launch: RunCommandLine) -> str:
    name = launch.script
    if launch.is_module:
        return plain_name(name.rpartition(".")[2])
    return plain_name(name.rpartition("/")[2].removesuffix(".py"))


def _entry(launch: RunCommandLine, size: JobSize) -> Entry:
    is_path = not (launch.is_module or launch.no_python)
    entry = entry_of(launch.script, is_module=not is_path, working_dir=launch.working_dir)
    args = launch.args
    if launch.no_python:
        args = (launch.script, *args)
        entry = replace(entry, kind=EntryKind.MODULE, target=PROGRAM)
    ours = {"ROLE_NAME": launch.role} if launch.role != "default" else {}
    if launch.rdzv_id:
        ours["TORCHELASTIC_RUN_ID"] = launch.rdzv_id
    if launch.virtual_local_rank:
        ours[VIRTUAL_LOCAL_RANK] = "1"
    if threads := launch.threads or default_threads(size):
        ours[THREADS] = threads
    return replace(entry, args=args, env=sorted_pairs(ours))


def default_threads(size: JobSize) -> str:
    """Return OMP_NUM_THREADS if several workers share a node, "" to leave it unset."""
    return "1" if size.per_node > 1 else ""

"""`elastic run`: torchrun's command line, for scripts that do not use this library.

Rule: all flags and variables (PET_*) of torchrun are accepted; those without effect here are
listed once, before anything starts. It runs in the foreground, like torchrun: when the command
ends, the job has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from elastic.client.attempts import RunPlan, attempt, note_end
from elastic.client.embedded import ClusterConnection, start_cluster, stop_cluster
from elastic.client.job_follower import follow
from elastic.client.job_options import AMONG_JOBS, take_job_options
from elastic.client.jobs import Client, new_job_id
from elastic.client.output_router import LogOptions, OutputRouter, parse_streams
from elastic.client.printer import JobPrinter
from elastic.client.run_options import run_options
from elastic.client.stopping import stop_saved
from elastic.client.submission import plain_name
from elastic.client.terminal import (
    EXIT_INTERRUPTED,
    ClusterTarget,
    exit_as,
)
from elastic.client.text_format import where_it_goes_on, workers
from elastic.client.torchrun import (
    IGNORED,
    THREADS,
    JobSize,
    RunCommandLine,
    check_alone,
    check_fits,
    default_threads,
    job_spec,
    size_here,
    size_on,
)
from elastic.core.config import JobSpec
from elastic.core.facts import JobPhase, Node, NodePhase
from elastic.core.view import JobView
from elastic.errors import ElasticError, Unavailable, UsageError
from elastic.storage.run_record import RunOwner

STOP_WAIT_S = 15.0
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
GPU_DRIVER = "/dev/nvidiactl"


@click.command(
    "run",
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "PET",
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 100,
    },
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@run_options
@click.pass_obj
def run(target: ClusterTarget, /, detach: bool, standalone: bool, **given: Any) -> None:
    """Run SCRIPT as torchrun does, with its flags; what stands behind SCRIPT goes to it.

    Nodes are the agents of a coordinator (--coord, ELASTIC_COORD). Without one this machine is
    the only node: a coordinator and an agent are started for the script, and end with it. When
    workers are lost, all run the script again, in new processes that form a new group.

    Ctrl-C, SIGTERM and SIGHUP stop the job: a loop over train.epochs() is saved and ends between
    two steps, another script has its own handler of SIGTERM called and --grace to end in. A second
    Ctrl-C ends it at once. Other signals, such as SIGUSR1, are not passed on: send them to workers.
    """
    context = click.get_current_context()
    launch, options = _launch(context, given), _log_request(given)
    cluster = _named(context, target, standalone=standalone, coord=given["coord"])
    if detach and cluster is None:
        raise UsageError(
            "--detach, but no coordinator is named: the cluster of this command's own ends with "
            "it; give --coord HOST:PORT (or ELASTIC_COORD)"
        )
    if detach and (options.redirects or options.tee):
        raise UsageError("--detach, and --tee or --redirects: no process is left to write output")
    job_spec(launch, JobSize(1, 1), job_id="j-", stamp="")  # Raises for errors in the options.
    if cluster is None:
        check_alone(launch)
    _warn_ignored(context, standalone=standalone)
    if cluster is None:
        _print_alone(context)
    logs = _with_directory(options, given)
    with _ending_signals() as came:
        try:
            if cluster is None:
                _run_here(launch, logs, came)
            else:
                _run_there(launch, logs, cluster, came, detach=detach)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(128 + came[0] if came else EXIT_INTERRUPTED) from None


# ------------------------------------------------------------------------------ the command line


def _launch(context: click.Context, given: dict[str, Any]) -> RunCommandLine:
    """Return the command line as one object; contradictions are refused."""
    bounds = (given["min_workers"], given["max_workers"])
    ours = [flag for flag, bound in zip(("--min", "--max"), bounds, strict=True) if bound]
    theirs = [
        "--" + name.replace("_", "-")
        for name in ("nnodes", "nproc_per_node")
        if _is_given(context, name)
    ]
    if ours and theirs:
        _misused(
            f"{ours[0]} counts workers, {theirs[0]} counts as torchrun does: give one of the two"
        )
    num_workers = None
    if ours:
        low, high = bounds[0] or 1, bounds[1] or bounds[0]
        if low > high:
            _misused(f"--min {low} and --max {high}: expected min <= max")
        num_workers = (low, high)
    if given["no_python"] and given["is_module"]:
        _misused("--no-python and --module: a module needs Python; give one of the two")
    if given["run_path"]:
        if not os.path.isabs(given["script"]):
            _misused(f"--run-path needs an absolute path, {given['script']} is none")
        given = {**given, "no_python": False}
    if given["args"][:1] == ("--",):  # It ends torchrun's own flags in torchrun, too.
        given = {**given, "args": given["args"][1:]}
    shared = take_job_options(dict(given))
    names = {field.name for field in fields(RunCommandLine)} - {"nodes", "num_workers", "shared"}
    taken = {name: value for name, value in given.items() if name in names}
    return RunCommandLine(**taken, nodes=given["nnodes"], num_workers=num_workers, shared=shared)


def _log_request(given: dict[str, Any]) -> LogOptions:
    return LogOptions(
        redirects=parse_streams("--redirects", given["redirects"]),
        tee=parse_streams("--tee", given["tee"]),
        local_ranks=given["local_ranks_filter"],
        role=given["role"],
        prefix=given["log_line_prefix"],
    )


def _with_directory(options: LogOptions, given: dict[str, Any]) -> LogOptions:
    """Create the directory for output, if output is written to files."""
    if not (options.redirects or options.tee):
        return options
    stem = plain_name(given["rdzv_id"]) if given["rdzv_id"] else "elastic"
    parent = given["log_dir"] or tempfile.gettempdir()
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=f"{stem}_", dir=parent)
    except OSError as error:
        raise UsageError(
            f"no directory for output can be made in {parent} ({error.strerror or error}): give "
            f"--log-dir one that you may write to"
        ) from error
    _notice(f"output of workers, stdout and stderr together, is written below {directory}")
    return replace(options, directory=directory)


def _named(
    context: click.Context, target: ClusterTarget, *, standalone: bool, coord: str
) -> ClusterTarget | None:
    """Return the cluster that is named, None if this command must start its own."""
    source = context.find_root().get_parameter_source("coord")
    named_before = source is not None and source is not ParameterSource.DEFAULT
    if coord:
        target = replace(target, coord=coord, flags=("--coord", coord, *target.flags))
    elif not named_before or (standalone and source is not ParameterSource.COMMANDLINE):
        return None
    if standalone:
        _misused(f"--standalone is without a coordinator, and --coord {target.coord} names one")
    return target


def _warn_ignored(context: click.Context, *, standalone: bool) -> None:
    for flag, instead in IGNORED.items():
        is_silent = standalone and flag.startswith("rdzv-")  # As torchrun has it.
        if _is_given(context, flag.replace("-", "_")) and not is_silent:
            value = context.params[flag.replace("-", "_")]
            _notice(f"--{flag}{'' if value is True else f' {value}'} has no effect: {instead}")


def _print_alone(context: click.Context) -> None:
    """Print the flags that have an effect only on a shared cluster."""
    for option in context.command.params:
        name = option.name or ""
        if name in AMONG_JOBS and _is_given(context, name):
            flag = (option.opts if context.params[name] else option.secondary_opts or option.opts)[
                0
            ]
            _notice(
                f"{flag} has no effect: the cluster that is started for this job has no other; "
                f"--coord HOST:PORT names one that is shared"
            )


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) in (
        ParameterSource.COMMANDLINE,
        ParameterSource.ENVIRONMENT,
    )


def _misused(text: str) -> None:
    raise click.UsageError(text)


def _notice(text: str) -> None:
    click.echo(f"elastic run: {text}", err=True)


# ----------------------------------------------------------------------------------- own or shared


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A job to follow.

    Attributes:
        is_named: the user has chosen its name.
        came: signals received, other than Ctrl-C, that end this command.
    """

    spec: JobSpec
    logs: LogOptions
    is_named: bool
    came: list[int]


def _run_here(launch: RunCommandLine, logs: LogOptions, came: list[int]) -> None:
    """Run on a cluster that is started for this job."""
    cluster, node = _start(launch)
    try:
        size = size_here(launch, node)
        _print_size(launch, size)
        with Client(cluster.address, cluster.access) as client:
            spec = _submit(client, launch, size, only=node)
            job = _Job(spec=spec, logs=logs, is_named=bool(launch.name), came=came)
            _follow(client, job, check=cluster.check)
    finally:
        stop_cluster(cluster)


def _start(launch: RunCommandLine) -> tuple[ClusterConnection, Node]:
    """Start a coordinator and an agent with as many slots as the job needs."""
    slots: int | None = None
    if launch.num_workers is not None:
        slots = launch.num_workers[1]
    elif launch.nproc_per_node.isdecimal():
        slots = int(launch.nproc_per_node)
    elif launch.nproc_per_node == "cpu" or not os.path.exists(GPU_DRIVER):
        slots = len(os.sched_getaffinity(0))
    cluster = start_cluster(slots)
    try:
        with Client(cluster.address, cluster.access) as client:
            node = client.status().view.nodes[0].node
        is_short = size_here(launch, node).high > node.num_slots
    except BaseException:
        stop_cluster(cluster)
        raise
    if is_short:  # There is a driver and no GPU, so count CPUs instead of GPUs.
        stop_cluster(cluster)
        return _start(replace(launch, nproc_per_node="cpu"))
    return cluster, node


def _run_there(
    launch: RunCommandLine,
    logs: LogOptions,
    target: ClusterTarget,
    came: list[int],
    *,
    detach: bool,
) -> None:
    with target.connect() as client:
        nodes = [n.node for n in client.status().view.nodes if n.phase is NodePhase.READY]
        size = size_on(launch, nodes)
        _print_size(launch, size)
        spec = _submit(client, launch, size)
        if detach:
            click.echo(f"follow it: {target.command('logs', '-f', spec.job_id)}", err=True)
            click.echo(spec.job_id)
            return
        _follow(client, _Job(spec=spec, logs=logs, is_named=bool(launch.name), came=came))


def _print_size(launch: RunCommandLine, size: JobSize) -> None:
    if default_threads(size) and not launch.threads and THREADS not in launch.shared.env:
        _notice(f"{THREADS}=1 for each of {size.per_node} workers of a node; set it to choose")


def _submit(
    client: Client, launch: RunCommandLine, size: JobSize, *, only: Node | None = None
) -> JobSpec:
    """Submit the job; `only` is the node of a cluster that is this process's own."""
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    spec = job_spec(launch, size, job_id=new_job_id(), stamp=stamp)
    if only is not None:
        check_fits(spec, only)
    owner = RunOwner.this_process() if only is not None else None
    plan = RunPlan(run_path=spec.run_path, name=spec.name, job_id=spec.job_id, owner=owner)
    with attempt(plan, job_of=client.record_of) as begun:
        for line in begun.lines:
            click.echo(line, err=True)
        spec = replace(spec, resume_from=begun.resume_from, resumes=begun.resumes)
        try:
            client.submit(spec)
        except KeyboardInterrupt:
            _stop(client, spec)  # It may have been accepted by now.
            raise
    bounds = workers(size.high) if size.low == size.high else f"{size.low} to {size.high} workers"
    _notice(f"job {spec.name} ({spec.job_id}) with {bounds}, results in {spec.run_path}")
    return spec


def _follow(client: Client, job: _Job, *, check: Callable[[], None] | None = None) -> None:
    """Show the output until the job ends, and exit as it does; an interrupt stops the job."""
    spec = job.spec
    has_come = False

    def interrupted() -> float | None:
        nonlocal has_come
        has_come = True
        limit_s = spec.grace_s if job.came else None
        return stop_saved(client, spec, "interrupted", limit_s=limit_s)

    printer = JobPrinter(ranks=(), router=OutputRouter(job.logs))
    try:
        view = follow(client, spec.job_id, printer, on_interrupt=interrupted, check=check)
    except Unavailable:
        raise  # There is no coordinator to stop the job.
    except BaseException:  # For example an interrupt, or a file or pipe that cannot be written.
        _print_going_on(job, _stop(client, spec))
        raise
    record = view.record
    note_end(spec.run_path, spec.job_id, record.phase, record.reason)
    _print_going_on(job, view)
    if has_come:
        raise KeyboardInterrupt
    exit_as(view)


def _print_going_on(job: _Job, view: JobView | None) -> None:
    if view is not None and view.record.phase is JobPhase.STOPPED:
        named = "again" if job.is_named else f"with --name {job.spec.name}"
        _notice(where_it_goes_on(view, f"the same command {named}"))


def _stop(client: Client, spec: JobSpec) -> JobView | None:
    """Stop a job at once, and wait for its workers for a limited time; None if that was over."""
    with contextlib.suppress(ElasticError, TimeoutError):
        client.stop(spec.job_id, "interrupted", now=True)
        view = follow(client, spec.job_id, JobPrinter(ranks=None), timeout_s=STOP_WAIT_S)
        note_end(spec.run_path, spec.job_id, view.record.phase, view.record.reason)
        return view
    return None


@contextlib.contextmanager
def _ending_signals() -> Iterator[list[int]]:
    """Make SIGTERM and SIGHUP act like Ctrl-C; yields the list of those received."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # Not by raising the signal: a shell without job control has us ignore it.
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before: dict[signal.Signals, Any] = {}
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP.
            before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

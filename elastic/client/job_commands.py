"""The commands that change something: submit, stop, drain.

Rule: each prints what it has begun before it waits for it, and what continues when the wait ends
early; an interrupt or a time limit ends only the wait.
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import click

from elastic.client.attempts import RunPlan, attempt, note_end
from elastic.client.daemons import stop_machine
from elastic.client.job_follower import follow
from elastic.client.job_options import job_options, take_job_options
from elastic.client.jobs import Client, new_job_id
from elastic.client.polling import wait_until
from elastic.client.printer import JobPrinter
from elastic.client.show import job_as_dict
from elastic.client.submission import DEFAULT_STORAGE, SubmitOptions, job_spec
from elastic.client.terminal import (
    EXIT_INTERRUPTED,
    EXIT_TIMEOUT,
    ClusterTarget,
    exit_as,
    fail,
    output_option,
    print_json,
)
from elastic.client.text_format import duration, where_it_goes_on, workers
from elastic.client.values import parse_duration, parse_num_workers
from elastic.core.config import DRAIN_TIMEOUT_S_MAX, JobSpec, ns
from elastic.core.facts import JobPhase, NodePhase, host_of
from elastic.errors import Refused
from elastic.runtime.clock import SystemClock
from elastic.runtime.rpc import is_loopback, parse_endpoints

DEADLINE_S = 30.0
"""Default deadline of a drain."""
GONE = (NodePhase.LEFT, NodePhase.LOST)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Longest wait; then exit 124 (the job continues).",
)

# ------------------------------------------------------------------------------------------ submit


class SubmitCommand(click.Command):
    """`elastic submit`, with a hint where a script's own options belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual; add the hint, as torchrun's users put options right behind the script."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"what is for the script stands behind --: submit SCRIPT -- {error.option_name}"
            raise click.UsageError(f"{error.format_message()} ({hint})", ctx) from error


@click.command(cls=SubmitCommand, context_settings={"show_default": True})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option(
    "--name", default="", show_default="script and time", help="Unique among jobs that run."
)
@click.option(
    "--num-workers", default="1", callback=parse_num_workers, metavar="N|MIN:MAX",
    help="Workers; with MIN:MAX the job trains with what there is.",
)  # fmt: skip
@click.option("--use-gpu", is_flag=True, help="One GPU for each worker.")
@job_options
@click.option("--backend", default="auto", type=click.Choice(["auto", "gloo", "nccl"]))
@click.option(
    "--max-failures", default=0, help="How often the script may fail; -1 for ever. Lost nodes, "
    "kills and drains do not count.",
)  # fmt: skip
@click.option(
    "--grace", default=30.0, type=click.FloatRange(min=0), metavar="SECONDS",
    help="When the job is stopped, a script's own handler of SIGTERM has so long.",
)  # fmt: skip
@click.option("--num-to-keep", default=-1, help="Checkpoints that are kept; -1 for all.")
@click.option(
    "--storage-path", default=DEFAULT_STORAGE, metavar="PATH|URL",
    help="Parent of the run directory; all nodes must reach it.",
)  # fmt: skip
@click.option(
    "--working-dir", default="", show_default="here", metavar="PATH", help="Where workers run."
)
@click.option("--wait/--no-wait", default=True, help="Follow rank 0 and exit as the job ends.")
@timeout_option
@output_option
@click.pass_obj
def submit(
    target: ClusterTarget, /, wait: bool, timeout_s: float | None, output: str, **options: Any
) -> None:
    """Run SCRIPT on the cluster; what stands behind -- goes to it.

    Nodes read the script from the same path as this machine. A name whose run did not succeed is
    resumed from its newest reported checkpoint. Ctrl-C ends the following, not the job. With
    --no-wait the job's id is all that is printed on stdout.
    """
    shared = take_job_options(options)
    spec = job_spec(SubmitOptions(**options, shared=shared), now=datetime.datetime.now())
    job_id = new_job_id()
    plan = RunPlan(run_path=spec.run_path, name=spec.name, job_id=job_id)
    with target.connect() as client:
        with attempt(plan, job_of=client.record_of) as begun:
            for line in begun.lines:
                click.echo(line, err=True)
            spec = replace(spec, resume_from=begun.resume_from, resumes=begun.resumes)
            client.submit(replace(spec, job_id=job_id))
        click.echo(_next_steps(target, spec, job_id), err=True)
        if wait:
            _wait_for_end(client, job_id, target, timeout_s=timeout_s, output=output)
        elif output == "json":
            print_json({"job_id": job_id, "name": spec.name, "run_path": spec.run_path})
        else:
            click.echo(job_id)


def _next_steps(target: ClusterTarget, spec: JobSpec, job_id: str) -> str:
    steps = [
        ("state", target.command("status", job_id)),
        ("output", target.command("logs", "-f", job_id)),
        ("stop", target.command("stop", job_id)),
        ("results", spec.run_path),
    ]
    lines = [f"job {spec.name} submitted as {job_id}; next steps:"]
    lines += [f"  {what:<9}{how}" for what, how in steps]
    if not all(is_loopback(host_of(address)) for address in parse_endpoints(target.coord)):
        lines.append(f"nodes read {spec.entry.target} from that path, and write results there too")
    return "\n".join(lines)


def _wait_for_end(
    client: Client, job_id: str, target: ClusterTarget, *, timeout_s: float | None, output: str
) -> None:
    """Follow a submitted job, and exit with the code of its end."""
    is_json = output == "json"
    printer = JobPrinter(ranks=None if is_json else (0,))
    try:
        view = follow(client, job_id, printer, timeout_s=timeout_s)
    except KeyboardInterrupt:
        stop, again = target.command("stop", job_id), target.command("logs", "-f", job_id)
        click.echo(f"\ndetached: job {job_id} continues; stop: {stop}; follow: {again}", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    except TimeoutError as error:
        fail(f"{error}; stop it: {target.command('stop', job_id)}", EXIT_TIMEOUT)
    record = view.record
    note_end(record.spec.run_path, job_id, record.phase, record.reason)
    if is_json:
        print_json(job_as_dict(view, SystemClock().monotonic_ns()))
    exit_as(view)


# ------------------------------------------------------------------------------------ stop, drain


@click.command()
@click.argument("job", default="")
@click.option("--reason", default="", help="Shown with the job.")
@click.option(
    "--now", "--force", is_flag=True, help="Where it stands: nothing is saved, no handler called."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until its workers ended.")
@timeout_option
@click.pass_obj
def stop(
    target: ClusterTarget, job: str, reason: str, timeout_s: float | None, *, now: bool, wait: bool
) -> None:
    """Stop JOB (id or name) and its workers; exit 0 once that is done.

    A loop over train.epochs() that has a run directory is saved first, and ends between two steps.
    Other scripts have their own handlers of SIGTERM called, and --grace to end in.

    Without JOB: end what 'elastic start' has started on this machine, as 'ray stop' does.
    """
    if not job:
        stop_machine(force=now)
        return
    with target.connect() as client:
        client.call_timeout_s = timeout_s
        job_id = client.get(job).record.spec.job_id
        client.stop(job_id, reason, now=now)
        at_once = target.command("stop", "--now", job_id)
        if not wait:
            click.echo(f"job {job} stops" + ("" if now else f"; at once: {at_once}"), err=True)
            return
        if not (now or client.get(job_id).has_ended()):
            click.echo(f"job {job} stops once it is saved; at once: {at_once}", err=True)
        try:
            view = follow(client, job_id, JobPrinter(ranks=None), timeout_s=timeout_s)
        except KeyboardInterrupt:
            click.echo(f"\ndetached: the stop of job {job} continues; at once: {at_once}", err=True)
            raise
    record = view.record
    note_end(record.spec.run_path, job_id, record.phase, record.reason)
    if record.phase is JobPhase.STOPPED:
        how = f"submit it again under the name {record.spec.name}"
        click.echo(where_it_goes_on(view, how), err=True)


@click.command(context_settings={"show_default": True})
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option(
    "--deadline", "deadline_s", callback=parse_duration, metavar="TIME", show_default="30s",
    help="By when they are gone: workers that are still there in the last quarter of it, 5 s at "
    "most, are ended where they stand. A node that drains already keeps its deadline, unless this "
    "is sooner.",
)  # fmt: skip
@click.option("--reason", default="", show_default=False, help="Shown with the node.")
@click.option("--wait/--no-wait", default=False, help="Until the nodes are gone.")
@timeout_option
@click.pass_obj
def drain(
    target: ClusterTarget,
    nodes: tuple[str, ...],
    deadline_s: float | None,
    reason: str,
    *,
    wait: bool,
    timeout_s: float | None,
) -> None:
    """Let nodes go: their workers leave at a boundary, then their agents end."""
    with target.connect() as client:
        client.call_timeout_s = timeout_s
        refusals: list[Refused] = []
        draining: list[str] = []
        already = _draining(client) if deadline_s is None else frozenset()
        for node in nodes:
            request_s = deadline_s if deadline_s is not None else DEADLINE_S
            left_s = DRAIN_TIMEOUT_S_MAX
            try:
                if node in already:
                    # The sooner deadline counts, so a drain with the largest one only queries it.
                    left_s = client.drain(node, timeout_s=DRAIN_TIMEOUT_S_MAX, reason=reason)
                if left_s >= DRAIN_TIMEOUT_S_MAX:
                    left_s = client.drain(node, timeout_s=request_s, reason=reason)
            except Refused as error:
                refusals.append(error)
            else:
                draining.append(node)
                more = " already" if node in already or left_s < request_s else ""
                click.echo(f"node {node} drains{more}, within {duration(ns(left_s))}", err=True)
        if wait:
            _wait_until_gone(client, draining, timeout_s)
        for refusal in refusals[1:]:
            click.echo(f"elastic: {refusal}", err=True)
        if refusals:
            raise refusals[0]


def _draining(client: Client) -> frozenset[str]:
    nodes = client.status().view.nodes
    return frozenset(view.node.node_id for view in nodes if view.phase is NodePhase.DRAINING)


def _wait_until_gone(client: Client, nodes: list[str], timeout_s: float | None) -> None:
    """Poll until none of these nodes is there; print which still are.

    Raises:
        TimeoutError: some still are at the end of the time.
        Unavailable: see `wait_until`.
    """

    def check() -> str:
        view = client.status().view
        left = [n for n in view.nodes if n.node.node_id in nodes and n.phase not in GONE]
        busy = sum(w.node_id in nodes for job in view.jobs for w in job.workers)
        names = ", ".join(n.node.node_id for n in left)
        return f"{names} still there, with {workers(busy)}" if left else ""

    wait_until(client, check, timeout_s, "the drain continues")

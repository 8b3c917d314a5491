"""The commands that only ask: ps, status, nodes, logs, version.

Rule: each answer is available as a table and as JSON, with the same contents.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import click

from elastic.client.jobs import Client
from elastic.client.output import LineCutter
from elastic.client.plain import plain_output
from elastic.client.printer import JobPrinter
from elastic.client.show import (
    failure_text,
    job_as_dict,
    node_as_dict,
    print_cluster,
    print_job,
    print_jobs,
    print_nodes,
    status_as_dict,
)
from elastic.client.terminal import (
    ClusterTarget,
    output_option,
    print_json,
    stdout_console,
)
from elastic.client.text_format import waiting_line
from elastic.client.values import parse_pattern, parse_ranks, parse_since
from elastic.core.messages import PROTOCOL
from elastic.core.view import JobView
from elastic.errors import NotFound
from elastic.runtime.clock import SystemClock
from elastic.version import __version__
from elastic.wire.codec_jobs import LogChunk

_clock = SystemClock()


@click.command()
@click.option("-a", "--all", "include_ended", is_flag=True, help="Jobs that have ended too.")
@output_option
@click.pass_obj
def ps(target: ClusterTarget, include_ended: bool, output: str) -> None:
    """List jobs, with what each one waits for."""
    with target.connect() as client:
        jobs = client.list(include_ended=include_ended, stale_ok=True)
        # Jobs of a standby's answer state their age; without jobs, get it from the status.
        standby = "" if jobs else client.status(stale_ok=True).standby
    if standby:
        click.echo(f"elastic: {standby}", err=True)
    now_ns = _clock.monotonic_ns()
    if output == "json":
        print_json([job_as_dict(job, now_ns) for job in jobs])
    elif jobs or include_ended:
        print_jobs(jobs, now_ns, stdout_console())
    else:
        click.echo(f"no job runs or waits; ended ones: {target.command('ps', '--all')}")


@click.command()
@click.argument("job", default="")
@output_option
@click.pass_obj
def status(target: ClusterTarget, job: str, output: str) -> None:
    """Show JOB (id or name), or the whole cluster."""
    with target.connect() as client:
        view = client.get(job, stale_ok=True) if job else None
        cluster = None if job else client.status(stale_ok=True)
    now_ns = _clock.monotonic_ns()
    if cluster is not None and output == "json":
        print_json(status_as_dict(cluster))
    elif cluster is not None:
        print_cluster(cluster, stdout_console())
    elif view is not None and output == "json":
        print_json(job_as_dict(view, now_ns))
    elif view is not None:
        print_job(view, now_ns, stdout_console())
        if failure := failure_text(view):
            click.echo(failure)


@click.command()
@output_option
@click.pass_obj
def nodes(target: ClusterTarget, output: str) -> None:
    """List nodes and what is free on them."""
    with target.connect() as client:
        view = client.status().view
    if output == "json":
        print_json([node_as_dict(node, view.now_ns) for node in view.nodes])
    else:
        print_nodes(view.nodes, view.now_ns, stdout_console())


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Follow the job until it has ended.")
@click.option(
    "--rank", "ranks", default="", callback=parse_ranks, metavar="R,...",
    help="Only these ranks of the newest group.",
)  # fmt: skip
@click.option(
    "--tail", default=-1, type=click.IntRange(min=-1, max=2**31 - 1), metavar="N",
    help="Only the last N lines of each worker, before what follows.",
)  # fmt: skip
@click.option(
    "--grep", default=None, callback=parse_pattern, metavar="PATTERN",
    help="Only lines in which this regular expression is found.",
)  # fmt: skip
@click.option(
    "--since", "since_ns", default="", callback=parse_since, metavar="WHEN",
    help="Only lines that are not older: 90s, 5m, 2h, 1d, or a moment such as 2026-11-25T10:00.",
)  # fmt: skip
@output_option
@click.pass_obj
def logs(target: ClusterTarget, job: str, follow: bool, output: str, **wanted: Any) -> None:
    """Print what the workers of JOB (id or name) printed, all of them together by time.

    Also of workers that were killed and of jobs that have ended. Lines begin with generation, rank
    and node, unless one rank is asked for. JSON is one object for each piece of output.
    """
    query = LogQuery(follow=follow, **wanted)
    with target.connect() as client:
        view = client.get(job)
        if follow:
            _print_wait(view)
        _print_logs(client, view, query, output=output)


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Selects lines of output.

    Attributes:
        ranks: of the workers, () for all.
        tail: number of existing lines of each worker; -1 for all.
        grep: pattern that each line must contain, None for all.
        since_ns: earliest time, Unix nanoseconds; 0 for all.
    """

    follow: bool
    ranks: tuple[int, ...]
    tail: int
    grep: re.Pattern[str] | None
    since_ns: int

    def of(self, chunk: LogChunk) -> LogChunk | None:
        """Return the selected lines of a piece of output, None if there are none."""
        if chunk.unix_ns and chunk.unix_ns < self.since_ns:
            return None
        if self.grep is None:
            return chunk
        lines = chunk.text.splitlines(keepends=True)
        text = "".join(line for line in lines if self.grep.search(line))
        return replace(chunk, text=text) if text else None


def _print_wait(view: JobView) -> None:
    line = waiting_line(view, _clock.monotonic_ns())
    if line:
        JobPrinter().print_line(f"job {view.record.spec.name} {line}")


def _print_logs(
    client: Client,
    view: JobView,
    query: LogQuery,
    *,
    output: str,
) -> None:
    shown_ranks = set[int]()
    lines = LineCutter(shows_prefix=len(query.ranks) != 1, holds_tracebacks=False)
    shown = plain_output if sys.stdout.isatty() else str
    job_id = view.record.spec.job_id
    with client.logs(job_id, ranks=query.ranks, tail=query.tail, follow=query.follow) as chunks:
        for received in chunks:
            shown_ranks.add(received.rank)
            chunk = query.of(received)
            if chunk is None:
                continue
            if output == "json":
                fields = {
                    "worker_id": chunk.worker_id,
                    "rank": chunk.rank,
                    "generation": chunk.generation,
                    "node": chunk.node_id,
                    "unix_ns": chunk.unix_ns,
                    "text": chunk.text,
                }
                click.echo(json.dumps(fields))
            else:
                click.echo(shown(lines.take(chunk, _clock.monotonic_ns())), nl=False)
    click.echo(shown(lines.flush("")), nl=False)
    if silent := set(query.ranks) - shown_ranks:
        _check_ranks(client.get(job_id), silent)


def _check_ranks(view: JobView, silent: set[int]) -> None:
    """Raise NotFound for ranks that printed nothing, if the job has had others and not these."""
    record = view.record
    known = {worker.rank for worker in view.workers} | {former.rank for former in record.former}
    known |= {member.rank for member in record.group.members} if record.group is not None else set()
    known.discard(-1)
    unknown = sorted(silent - known)
    if known and unknown:
        raise NotFound(
            f"logs {record.spec.name}: no worker has had rank {', '.join(map(str, unknown))}; "
            f"there were {min(known)} to {max(known)}"
        )


@click.command()
@output_option
def version(output: str) -> None:
    """Print the version of this command; that of a coordinator is in `elastic status`."""
    facts = {"version": __version__, "protocol": PROTOCOL, "python": platform.python_version()}
    if output == "json":
        print_json(facts)
    else:
        click.echo(f"elastic {__version__}, protocol {PROTOCOL}, Python {facts['python']}")

"""The command `elastic top`: jobs and their workers, their pace, and stragglers.

Rule: on a terminal it is redrawn each second; in a pipe, and with --once, it is printed once.
"""

from __future__ import annotations

import sys
import time

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from elastic.client.jobs import Client
from elastic.client.pace import (
    STEP_COLUMNS,
    eta_ns,
    position_line,
    step_columns,
    straggler_line,
)
from elastic.client.show import (
    bounds,
    coloured,
    job_as_dict,
    new_table,
    status_as_dict,
)
from elastic.client.terminal import (
    ClusterTarget,
    output_option,
    print_json,
    stdout_console,
)
from elastic.client.text_format import duration, world_size
from elastic.core.view import JobView
from elastic.wire.codec_jobs import ClusterStatus

EVERY_S = 1.0
WORKERS_MAX = 40
"""Workers shown; more do not fit on a screen."""


@click.command()
@click.argument("job", default="")
@click.option("--once", is_flag=True, help="Print it once, and end.")
@click.option("-a", "--all", "include_ended", is_flag=True, help="Jobs that have ended too.")
@output_option
@click.pass_obj
def top(target: ClusterTarget, job: str, once: bool, include_ended: bool, output: str) -> None:
    """Show all jobs, or JOB (id or name), as they train; Ctrl-C ends it."""
    with target.connect() as client:
        if output == "json":
            print_json(_as_dict(client, job))
        elif once or not sys.stdout.isatty():
            stdout_console().print(_picture(client, job, include_ended))
        else:
            _live(client, job, include_ended)


def _as_dict(client: Client, job: str) -> object:
    if not job:
        return status_as_dict(client.status(stale_ok=True))
    return job_as_dict(client.get(job, stale_ok=True), time.monotonic_ns())


def _live(client: Client, job: str, include_ended: bool) -> None:
    console = stdout_console()
    with Live(
        _picture(client, job, include_ended), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(EVERY_S)
            live.update(_picture(client, job, include_ended), refresh=True)


def _picture(client: Client, job: str, include_ended: bool) -> RenderableType:
    """Return the present tables."""
    if job:
        view = client.get(job, stale_ok=True)
        return Group(jobs_table([view], time.monotonic_ns()), Text(""), workers_table(view))
    status = client.status(stale_ok=True)
    jobs = [one for one in status.view.jobs if include_ended or not one.has_ended()]
    if not jobs:
        return Group(_headline(status), Text("no job runs or waits"))
    parts: list[RenderableType] = [_headline(status), jobs_table(jobs, status.view.now_ns)]
    for one in jobs:
        if one.workers:
            parts += [Text(f"\n{one.record.spec.name}", style="bold"), workers_table(one)]
    return Group(*parts)


def _headline(status: ClusterStatus) -> Text:
    nodes = status.view.nodes
    slots, free = sum(n.node.num_slots for n in nodes), sum(n.free_slots for n in nodes)
    return Text(f"{len(nodes)} nodes, {slots - free} of {slots} slots taken; {status.coordinator}")


def jobs_table(jobs: list[JobView], now_ns: int) -> RenderableType:
    table = new_table(
        "job", "phase", "since", "workers", "gen", "position", "steps/s", "samples/s", "goodput",
        "left", "waits for",
    )  # fmt: skip
    for view in jobs:
        telemetry, record = view.telemetry, view.record
        is_over = view.has_ended()
        left_ns = None if is_over else eta_ns(telemetry)
        waits = straggler_line(telemetry) if world_size(view) else view.reason.partition("\n")[0]
        table.add_row(
            escape(record.spec.name),
            coloured(record.phase.value),
            duration(now_ns - view.since_ns),
            f"{world_size(view)} of {bounds(view)}",
            str(record.generation),
            "-" if is_over else position_line(telemetry) or "-",
            f"{telemetry.per_second(telemetry.steps):.3g}"
            if telemetry.steps and not is_over
            else "-",
            f"{telemetry.per_second(telemetry.samples):,.0f}"
            if telemetry.samples and not is_over
            else "-",
            f"{record.goodput.ratio:.1%}" if record.goodput.allocated_ns else "-",
            duration(left_ns, digits=0) if left_ns is not None else "-",
            escape(waits) or "-",
        )
    return table


def workers_table(view: JobView) -> RenderableType:
    """Return a table with a line for each worker; the straggler is marked."""
    table = new_table("rank", "worker", "phase", "steps", *STEP_COLUMNS, "pid")
    late = view.telemetry.straggler
    ordered = sorted(view.workers, key=lambda w: (w.rank < 0, w.rank, w.report.worker_id))
    for worker in ordered[:WORKERS_MAX]:
        is_late = late >= 0 and worker.rank == late
        rank = str(worker.rank) if worker.rank >= 0 else "-"
        table.add_row(
            f"[yellow]{rank} slowest[/yellow]" if is_late else rank,
            worker.report.worker_id,
            coloured(worker.report.phase.value),
            str(worker.steps),
            *step_columns(worker.telemetry),
            str(worker.report.pid or "-"),
        )
    if len(ordered) > WORKERS_MAX:
        table.add_row("", f"and {len(ordered) - WORKERS_MAX} more")
    return table

"""Jobs and nodes, as tables for people and as JSON for programs.

Rule: both have the same contents; ages are in seconds, and waits are shown with reason and start.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic.client.pace import (
    STEP_COLUMNS,
    job_goodput,
    pace_line,
    position_line,
    step_columns,
    step_line,
)
from elastic.client.plain import plain
from elastic.client.text_format import (
    duration,
    ending_line,
    metrics_line,
    parsed_metrics,
    waiting_line,
    world_size,
)
from elastic.core.config import NS_PER_S
from elastic.core.view import JobView, NodeView
from elastic.wire.codec_jobs import ClusterStatus

COPIES_SHOWN = 4
"""Maximum number of a job's copies in a line; a sharded model has one for each node."""
PHASE_COLOURS = {
    "ready": "green", "running": "green", "succeeded": "green", "training": "green",
    "finished": "green", "pending": "yellow", "draining": "yellow", "disconnected": "yellow",
    "stopping": "yellow", "stopped": "yellow", "paused": "yellow",
    "failed": "red", "lost": "red", "broken": "red", "whole": "green", "damaged": "red",
}  # fmt: skip

# ------------------------------------------------------------------------------------ for programs


def status_as_dict(status: ClusterStatus) -> dict[str, Any]:
    """Return a coordinator with its nodes and jobs."""
    now_ns = status.view.now_ns
    return {
        "coordinator": status.coordinator,
        "version": status.version,
        "protocol": status.protocol,
        "store": status.store,
        "uptime_s": round(status.uptime_ns / NS_PER_S, 3),
        "standby": status.standby,
        "coordinators": list(status.coordinators),
        "cordons": [{"node": c.node_id, "reason": c.reason} for c in status.view.cordons],
        "nodes": [node_as_dict(node, now_ns) for node in status.view.nodes],
        "jobs": [job_as_dict(job, now_ns) for job in status.view.jobs],
    }


def node_as_dict(view: NodeView, now_ns: int) -> dict[str, Any]:
    node = view.node
    return {
        "node": node.node_id,
        "phase": view.phase.value,
        "since_s": _age_s(now_ns, view.since_ns),
        "reason": view.reason,
        "host": node.host,
        "cordoned": view.cordoned,
        "slots": node.num_slots,
        "free_slots": view.free_slots,
        "resources": node.resources.as_dict(),
        "labels": dict(node.labels),
        "accelerator_type": node.accelerator_type,
        "version": node.version,
    }


def job_as_dict(view: JobView, now_ns: int) -> dict[str, Any]:
    record, spec = view.record, view.record.spec
    failure = record.failure
    return {
        "job_id": spec.job_id,
        "name": spec.name,
        "phase": record.phase.value,
        "since_s": _age_s(now_ns, view.since_ns),
        "reason": view.reason,
        "generation": record.generation,
        "world_size": world_size(view),
        "min_workers": record.bounds[0],
        "max_workers": record.bounds[1],
        "priority": spec.priority,
        "submitter": record.submitter,
        "failures": record.failures,
        "losses": record.losses,
        "preemptions": record.preemptions,
        "preemptible": not spec.non_preemptible,
        "preempted_by": record.preempted_by,
        "checkpoints": len(record.checkpoints),
        "latest_checkpoint": record.checkpoints[-1].path if record.checkpoints else "",
        "run_path": spec.run_path,
        "feeds": spec.feeds,
        "entry": spec.entry.target,
        "metrics": parsed_metrics(record.metrics),
        "goodput": record.goodput.as_dict()
        | {"unreported_s": round(view.unreported_ns / NS_PER_S, 6)},
        "telemetry": view.telemetry.as_dict(),
        "failed_worker": record.failed_worker,
        "failure": None
        if failure is None
        else {
            "error_type": failure.error_type,
            "message": failure.message,
            "traceback": failure.traceback,
            "position": failure.position,
        },
        "workers": [
            {
                "worker_id": worker.report.worker_id,
                "node": worker.node_id,
                "rank": worker.rank,
                "phase": worker.report.phase.value,
                "generation": worker.report.generation,
                "pid": worker.report.pid,
                "steps": worker.steps,
                "since_s": _age_s(now_ns, worker.since_ns),
                "telemetry": worker.telemetry.as_dict(),
            }
            for worker in view.workers
        ],
        "copies": [
            {
                "node": copy.node_id,
                "source": copy.source,
                "generation": copy.generation,
                "step": copy.steps,
                "since_s": _age_s(now_ns, copy.since_ns),
            }
            for copy in view.copies
        ],
    }


# -------------------------------------------------------------------------------------- for people


def print_cluster(status: ClusterStatus, console: Console) -> None:
    console.print(
        f"coordinator {escape(status.coordinator)}, version {status.version}, up "
        f"{duration(status.uptime_ns)}, store {escape(status.store)}"
    )
    if len(status.coordinators) > 1:
        console.print(f"coordinators: {', '.join(map(escape, status.coordinators))}")
    if status.standby:
        console.print(escape(status.standby))
    else:
        print_nodes(status.view.nodes, status.view.now_ns, console)
    shown = {view.node.node_id for view in status.view.nodes}
    absent = [cordon for cordon in status.view.cordons if cordon.node_id not in shown]
    if absent:
        cordoned = (f"{each.node_id} ({each.reason or 'by an operator'})" for each in absent)
        console.print(escape(f"cordoned: {', '.join(cordoned)}"))
    print_jobs(status.view.jobs, status.view.now_ns, console)
    for job in status.view.jobs:
        if line := copies_line(job, status.view.now_ns):
            console.print(escape(f"copies of {job.record.spec.name}: {line}"))


def print_nodes(nodes: tuple[NodeView, ...], now_ns: int, console: Console) -> None:
    if not nodes:
        console.print("no nodes: start elastic-agent on a machine")
        return
    labelled = ("labels",) if any(view.node.labels for view in nodes) else ()
    # While a cluster is upgraded.
    versions = ("version",) if len({view.node.version for view in nodes}) > 1 else ()
    more = ("free slots", "resources", *labelled, *versions)
    table = new_table("node", "phase", "since", *more, "host", "reason")
    for view in nodes:
        node = view.node
        amounts = [f"{name}={amount:g}" for name, amount in node.resources.as_dict().items()]
        table.add_row(
            node.node_id,
            coloured(view.phase.value) + (" cordoned" if view.cordoned else ""),
            duration(now_ns - view.since_ns),
            f"{view.free_slots}/{node.num_slots}",
            " ".join([*amounts, node.accelerator_type]).strip() or "-",
            *((_labels(view),) if labelled else ()),
            *((escape(node.version) or "-",) if versions else ()),
            node.host or "-",
            escape(view.reason) or "-",
        )
    console.print(table)


def _labels(view: NodeView) -> str:
    return escape(" ".join(f"{name}={value}" for name, value in view.node.labels)) or "-"


def print_jobs(jobs: tuple[JobView, ...], now_ns: int, console: Console) -> None:
    if not jobs:
        console.print("no jobs")
        return
    with_priority = any(view.record.spec.priority for view in jobs)
    turn = ("priority",) if with_priority else ()
    table = new_table("job", "name", *turn, "phase", "since", "workers", "generation", "reason")
    for view in jobs:
        spec = view.record.spec
        table.add_row(
            spec.job_id,
            spec.name,
            *((str(spec.priority),) if with_priority else ()),
            coloured(view.record.phase.value),
            duration(now_ns - view.since_ns),
            f"{world_size(view)} of {bounds(view)}",
            str(view.record.generation),
            escape(view.reason.partition("\n")[0]) or "-",
        )
    console.print(table)


def print_job(view: JobView, now_ns: int, console: Console) -> None:
    """Print all about one job, except the traceback of its failure."""
    record, spec = view.record, view.record.spec
    console.print(
        f"[bold]{spec.name}[/bold] ({spec.job_id})  {coloured(record.phase.value)} since "
        f"{duration(now_ns - view.since_ns)}  generation {record.generation}  "
        f"workers {world_size(view)} of {bounds(view)}"
    )
    state = waiting_line(view, now_ns) or (ending_line(view) if view.has_ended() else view.reason)
    facts = [
        ("state", state),
        ("entry", " ".join((spec.entry.target, *spec.entry.args))),
        ("run", spec.run_path),
        ("submitter", record.submitter),
        ("priority", _priority(view)),
        ("metrics", metrics_line(parsed_metrics(record.metrics))),
        ("position", "" if view.has_ended() else position_line(view.telemetry)),
        ("pace", pace_line(view.telemetry)),
        ("step", step_line(view.telemetry)),
        ("goodput", job_goodput(view)),
        ("checkpoint", record.checkpoints[-1].path if record.checkpoints else ""),
        ("copies", copies_line(view, now_ns)),
        (
            "failures",
            f"{record.failures}, max_failures={spec.max_failures}" if record.failures else "",
        ),
        ("preempted", _preempted(view)),
        ("lost", f"{record.losses} workers in a row" if record.losses else ""),
    ]
    for name, text in facts:
        if text:
            console.print(f"  {name:<11}{escape(text)}")
    if not view.workers:
        return
    table = new_table(
        "worker", "node", "rank", "phase", "since", "generation", "steps", *STEP_COLUMNS, "pid"
    )
    for worker in view.workers:
        report = worker.report
        table.add_row(
            report.worker_id,
            worker.node_id,
            str(worker.rank) if worker.rank >= 0 else "-",
            coloured(report.phase.value),
            duration(now_ns - worker.since_ns),
            str(report.generation),
            str(worker.steps),
            *step_columns(worker.telemetry),
            str(report.pid or "-"),
        )
    console.print(table)


def copies_line(view: JobView, now_ns: int) -> str:
    """Return the copies of a job's state, "" for none: "n1 → n2 step 400 (3.0 s ago)"."""
    copies = [
        f"{copy.source} → {copy.node_id} step {copy.steps} ({duration(now_ns - copy.since_ns)} ago)"
        if copy.source
        else f"{copy.node_id} step {copy.steps} ({duration(now_ns - copy.since_ns)} ago)"
        for copy in view.copies
    ]
    more = len(copies) - COPIES_SHOWN
    return ", ".join(copies[:COPIES_SHOWN]) + (f", and {more} more" if more > 0 else "")


def failure_text(view: JobView) -> str:
    """Return the first failed worker and its traceback, "" for none; to be shown last."""
    record = view.record
    if record.failure is None:
        return ""
    where = f"first failure in worker {record.failed_worker}" if record.failed_worker else ""
    traceback = record.failure.traceback.rstrip()
    detail = traceback or f"{record.failure.error_type}: {record.failure.message}"
    return plain(f"{where}:\n{detail}" if where else detail)


def _preempted(view: JobView) -> str:
    """Return how many nodes were taken by announced drains, and how many may be."""
    taken, limit = view.record.preemptions, view.record.spec.max_preemptions
    if not taken:
        return ""
    text = f"{taken} node{'s' if taken > 1 else ''} by announced drains"
    return f"{text}, max_preemptions={limit}" if limit != -1 else text


def _priority(view: JobView) -> str:
    spec = view.record.spec
    text = str(spec.priority) if spec.priority or spec.non_preemptible else ""
    return f"{text}, not preemptible" if spec.non_preemptible else text


def bounds(view: JobView) -> str:
    """Return the minimum and maximum number of a job's workers: "2-3"."""
    low, high = view.record.bounds
    return str(low) if low == high else f"{low}-{high}"


def coloured(phase: str) -> str:
    colour = PHASE_COLOURS.get(phase, "")
    return f"[{colour}]{phase}[/{colour}]" if colour else phase


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _age_s(now_ns: int, since_ns: int) -> float:
    return round(max(0, now_ns - since_ns) / NS_PER_S, 3)

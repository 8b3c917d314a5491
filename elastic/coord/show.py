"""A cluster's status, as tables for people and as JSON for programs.

Rule: both say the same; ages are seconds, and a job that waits says for what and since when.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from elastic.core.view import JobView, NodeView
from elastic.core.world import JobPhase
from elastic.wire.codec_jobs import ClusterStatus

NS_PER_S = 1e9


def status_as_dict(status: ClusterStatus) -> dict[str, Any]:
    """Return what `-o json` prints."""
    now_ns = status.view.now_ns
    return {
        "coordinator": status.coordinator,
        "version": status.version,
        "protocol": status.protocol,
        "store": status.store,
        "uptime_s": round(status.uptime_ns / NS_PER_S, 3),
        "nodes": [_node_as_dict(node, now_ns) for node in status.view.nodes],
        "jobs": [_job_as_dict(job, now_ns) for job in status.view.jobs],
    }


def print_status(status: ClusterStatus, console: Console) -> None:
    """Print one line about the coordinator, a table of nodes and one of jobs."""
    now_ns = status.view.now_ns
    console.print(
        f"coordinator {status.coordinator}, version {status.version}, up "
        f"{duration(status.uptime_ns)}, store {status.store}",
        highlight=False,
        soft_wrap=True,
    )
    nodes = _table("node", "phase", "since", "free slots", "resources", "host", "reason")
    for node in status.view.nodes:
        fact = node.node
        amounts = [f"{name}={amount:g}" for name, amount in fact.resources.as_dict().items()]
        nodes.add_row(
            fact.node_id,
            node.phase.value,
            duration(now_ns - node.since_ns),
            f"{node.free_slots}/{fact.num_slots}",
            " ".join([*amounts, fact.accelerator_type]).strip() or "-",
            fact.host,
            node.reason or "-",
        )
    console.print(nodes if status.view.nodes else "no nodes: start elastic-agent on a machine")
    jobs = _table("job", "name", "phase", "since", "workers", "generation", "reason")
    for job in status.view.jobs:
        spec = job.record.spec
        jobs.add_row(
            spec.job_id,
            spec.name,
            job.record.phase.value,
            duration(now_ns - job.since_ns),
            f"{world_size(job)} of {spec.min_workers}-{spec.max_workers}",
            str(job.record.generation),
            job.reason or "-",
        )
    console.print(jobs if status.view.jobs else "no jobs")


def world_size(job: JobView) -> int:
    """Return how many workers train together now, 0 when none do."""
    group = job.record.group
    return len(group.members) if group and job.record.phase is JobPhase.RUNNING else 0


def duration(length_ns: int) -> str:
    """Return a length of time as people say it: "3.2s", "4m 10s", "2h 5m", "3d 4h"."""
    seconds = max(0, length_ns) / NS_PER_S
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours < 24 else f"{hours // 24}d {hours % 24}h"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _node_as_dict(node: NodeView, now_ns: int) -> dict[str, Any]:
    fact = node.node
    return {
        "node": fact.node_id,
        "phase": node.phase.value,
        "since_s": _age_s(now_ns, node.since_ns),
        "reason": node.reason,
        "host": fact.host,
        "slots": fact.num_slots,
        "free_slots": node.free_slots,
        "resources": fact.resources.as_dict(),
        "labels": dict(fact.labels),
        "accelerator_type": fact.accelerator_type,
        "version": fact.version,
    }


def _job_as_dict(job: JobView, now_ns: int) -> dict[str, Any]:
    record = job.record
    return {
        "job_id": record.spec.job_id,
        "name": record.spec.name,
        "phase": record.phase.value,
        "since_s": _age_s(now_ns, job.since_ns),
        "reason": job.reason,
        "generation": record.generation,
        "world_size": world_size(job),
        "min_workers": record.spec.min_workers,
        "max_workers": record.spec.max_workers,
        "failures": record.failures,
        "losses": record.losses,
        "checkpoints": len(record.checkpoints),
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
            }
            for worker in job.workers
        ],
    }


def _age_s(now_ns: int, since_ns: int) -> float:
    return round(max(0, now_ns - since_ns) / NS_PER_S, 3)

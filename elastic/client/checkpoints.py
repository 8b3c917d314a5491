"""The commands about checkpoints: checkpoint, checkpoints, verify.

Rule: the coordinator's records and the contents of storage may differ; each command states which of
them it shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from elastic.client.jobs import Client
from elastic.client.show import coloured, new_table
from elastic.client.terminal import (
    EXIT_FAILED,
    ClusterTarget,
    output_option,
    print_json,
    stdout_console,
)
from elastic.client.text_format import (
    duration,
    ending_line,
    metrics_line,
    num_bytes,
    parsed_metrics,
    waiting_line,
)
from elastic.core.facts import CheckpointRecord, CheckpointStatus
from elastic.core.view import JobView
from elastic.errors import Refused, StorageError, Unavailable
from elastic.runtime.clock import SystemClock
from elastic.storage.files import Files
from elastic.storage.marker import MARKER, CheckpointMarker
from elastic.storage.verify import VerifyResult, checkpoints_at
from elastic.storage.verify import verify as verify_one

POLL_S = 0.1
VALIDATION = {
    CheckpointStatus.PENDING_VALIDATION.value: "to be validated",
    CheckpointStatus.VALIDATED.value: "validated",
    CheckpointStatus.VALIDATION_TIMEOUT.value: "validation took too long",
    CheckpointStatus.VALIDATION_FAILED.value: "validation failed",
}
PLACE = ("epoch", "step")
"""Metrics with the position in the run at which a checkpoint was taken."""


@click.command()
@click.argument("job")
@output_option
@click.pass_obj
def checkpoints(target: ClusterTarget, job: str, output: str) -> None:
    """List the recorded checkpoints of JOB (id or name), oldest first.

    Age and size are read from the checkpoint itself, where this machine can reach it. Whether its
    files are what was written: elastic verify PATH.
    """
    with target.connect() as client:
        record = client.get(job, stale_ok=True).record
    rows = [_row(one) for one in record.checkpoints]
    if output == "json":
        print_json(rows)
    elif rows:
        _print_checkpoints(rows, stdout_console())
    else:
        click.echo(f"job {record.spec.name} has no recorded checkpoint")


@click.command()
@click.argument("path")
@output_option
def verify(path: str, output: str) -> None:
    """Read all of the checkpoint PATH, or of every one in the run directory PATH.

    Holds each file against size and checksum in the commit marker. Exits 0 if all is as it was
    written, 1 if something is damaged, 2 if there is no such thing. No coordinator is asked.
    """
    if not path:  # Which Files takes for the folder that one is in.
        raise click.UsageError("PATH is empty; expected that of a checkpoint or of a run directory")
    verdicts = [verify_one(one) for one in checkpoints_at(path)]
    if output == "json":
        print_json([_verdict_as_dict(one) for one in verdicts])
    elif verdicts:
        _print_verdicts(verdicts, stdout_console())
    else:
        click.echo(f"run directory {path} has no checkpoints")
    if not all(one.is_whole for one in verdicts):
        raise click.exceptions.Exit(EXIT_FAILED)


@click.command()
@click.argument("job")
@click.option(
    "--timeout", "timeout_s", default=60.0, type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS", show_default=True, help="Longest wait; then exit 124.",
)  # fmt: skip
@output_option
@click.pass_obj
def checkpoint(target: ClusterTarget, job: str, timeout_s: float, output: str) -> None:
    """Have JOB (id or name) take a checkpoint now, and print its path once it counts.

    It is taken at the end of a step, beside training. The job must have a run directory and train
    in a loop over train.epochs().
    """
    began = time.monotonic()
    with target.connect() as client:
        view = client.get(job)
        job_id = view.record.spec.job_id
        request = client.checkpoint(job_id)
        click.echo(f"job {view.record.spec.name} takes a checkpoint", err=True)
        path = _wait_recorded(client, job_id, request, began + timeout_s)
    _wait_committed(path, began + timeout_s)
    seconds = time.monotonic() - began
    if output == "json":
        print_json({"path": path, "seconds": round(seconds, 3)})
    else:
        click.echo(path)
        click.echo(f"after {seconds:.1f} s", err=True)


def _wait_recorded(client: Client, job_id: str, request: int, deadline: float) -> str:
    """Return the path of an automatic checkpoint that was taken after a request.

    Raises:
        Refused: the job has ended without one.
        TimeoutError: none came in time; the text has the likely reason.
    """
    is_lost = False
    while True:
        try:
            if is_lost:
                # A restarted coordinator does not know earlier requests.
                request = client.checkpoint(job_id)
                is_lost = False
            view = client.get(job_id)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            is_lost = True
            time.sleep(POLL_S)
            continue
        # A greater number is a newer request: a checkpoint for another user's request will do.
        new = [c.path for c in view.record.checkpoints if c.automatic and c.request >= request]
        if new:
            return new[-1]
        if view.has_ended():
            raise Refused(f"no checkpoint was taken before the end: {ending_line(view)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {job_id} has recorded no checkpoint in time: {_why_not(view)}")
        time.sleep(POLL_S)


def _why_not(view: JobView) -> str:
    """Return the likely reason why a job takes no checkpoint."""
    if waits := waiting_line(view, SystemClock().monotonic_ns()):
        return waits
    if refused := next((w.telemetry.unsaved for w in view.workers if w.telemetry.unsaved), ""):
        return f"storage refuses it: {refused}"
    if not any(worker.report.in_place for worker in view.workers):
        return (
            "its train function is not in a loop over train.epochs() with prepared objects, which "
            "checkpoints that are taken by themselves need; elsewhere the script takes them, with "
            "train.report(..., checkpoint=...)"
        )
    return (
        f"a step may take longer than that, or storage may be slow or away; its workers' output "
        f"shows it: elastic logs {view.record.spec.job_id}"
    )


def _wait_committed(path: str, deadline: float) -> None:
    """Wait for the marker, which is written after the record, if this machine can read it.

    Raises:
        TimeoutError: it was not written in time.
    """
    while _marker_of(path) is None:
        try:
            is_seen = Files(path, patience_s=0).exists("")
        except StorageError:
            is_seen = False
        if not is_seen:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"checkpoint {path} is recorded, but was not committed in time")
        time.sleep(POLL_S)


def _row(record: CheckpointRecord) -> dict[str, Any]:
    marker = _marker_of(record.path)
    metrics = parsed_metrics(record.metrics)
    return {
        "name": record.path.rpartition("/")[2],
        "path": record.path,
        "kind": "automatic" if record.automatic else "reported",
        "status": record.status.value,
        "generation": record.generation,
        "index": record.index,
        "epoch": metrics.get("epoch"),
        "step": metrics.get("step"),
        "age_s": None if marker is None else round(max(0.0, time.time() - marker.unix_ns / 1e9), 3),
        "bytes": None if marker is None else marker.num_bytes,
        "metrics": metrics,
    }


def _marker_of(path: str) -> CheckpointMarker | None:
    """Return a checkpoint's marker, None if it cannot be read from here."""
    try:
        return CheckpointMarker.from_json(Files(path, patience_s=0).read(MARKER).decode())
    except (StorageError, ValueError):
        return None


def _print_checkpoints(rows: Sequence[dict[str, Any]], console: Console) -> None:
    shown = new_table("checkpoint", "kind", "generation", "epoch", "step", "age", "size", "metrics")
    for row in rows:
        age_s, size = row["age_s"], row["bytes"]
        logged = {name: value for name, value in row["metrics"].items() if name not in PLACE}
        metrics = escape(metrics_line(logged))
        if row["status"] != CheckpointStatus.COMMITTED.value:
            metrics = f"{metrics} [{VALIDATION[row['status']]}]".strip()
        shown.add_row(
            escape(row["path"]),
            row["kind"],
            str(row["generation"]),
            *("-" if row[name] is None else escape(str(row[name])) for name in PLACE),
            "-" if age_s is None else duration(round(age_s * 1e9)),
            "-" if size is None else num_bytes(size),
            metrics or "-",
        )
    console.print(shown)


def _verdict_as_dict(verdict: VerifyResult) -> dict[str, Any]:
    marker = verdict.marker
    return {
        "path": verdict.path,
        "whole": verdict.is_whole,
        "files": None if marker is None else len(marker.files),
        "bytes": None if marker is None else marker.num_bytes,
        "damages": [{"file": file, "how": how} for file, how in verdict.damages],
        "unchecked": list(verdict.unchecked),
    }


def _print_verdicts(verdicts: Sequence[VerifyResult], console: Console) -> None:
    shown = new_table("checkpoint", "state", "files", "size", "damage")
    for verdict in verdicts:
        marker = verdict.marker
        remark = f"no checksum was written for {', '.join(verdict.unchecked)}"
        damage = "; ".join(f"{file}: {how}" for file, how in verdict.damages)
        shown.add_row(
            escape(verdict.path),
            coloured("whole" if verdict.is_whole else "damaged"),
            "-" if marker is None else str(len(marker.files)),
            "-" if marker is None else num_bytes(marker.num_bytes),
            escape(damage or (remark if verdict.unchecked else "")) or "-",
        )
    console.print(shown)

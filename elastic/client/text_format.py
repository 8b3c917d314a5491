"""One-line texts about the state of a job, for the command line and the library.

Rule: the text of a waiting job has the reason and the start; no colours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic.core.config import NS_PER_S
from elastic.core.facts import JobPhase, WorkerPhase
from elastic.core.view import JobView

WAITING = "waiting: "
METRICS_CHARS_MAX = 120


def duration(length_ns: int, *, digits: int = 1) -> str:
    """Return a duration for people: "3.2 s", "4m 10s", "2h 5m", "3d 4h"."""
    seconds = max(0, length_ns) / NS_PER_S
    if seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours < 24 else f"{hours // 24}d {hours % 24}h"


def steps_again(fields: Mapping[str, str]) -> str:
    """Return the end of a line about a first step: where the run goes back to, if it does."""
    if "was_at" not in fields:
        return ""
    return f"; it was at {fields['was_at']} and goes on at {fields.get('at')}"


def num_bytes(size: int) -> str:
    """Return a number of bytes for people: "17 B", "3.2 MB"."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def world_size(view: JobView) -> int:
    """Return how many workers train together now, 0 when none do."""
    group = view.record.group
    return len(group.members) if group and view.record.phase is JobPhase.RUNNING else 0


def workers(count: int) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{count} worker{'' if count == 1 else 's'}"


def trains_outside(view: JobView) -> bool:
    """Return whether a group trains outside of `train.epochs()`: it leaves at reports only."""
    members = [worker for worker in view.workers if worker.rank >= 0]
    is_training = any(worker.report.phase is WorkerPhase.TRAINING for worker in members)
    return is_training and not any(worker.report.in_place for worker in members)


def missing(view: JobView) -> str:
    """Return what a job waits for, "" if it does not wait."""
    if view.record.phase is JobPhase.PENDING:
        return view.reason.removeprefix(WAITING) or "its turn"
    if view.record.phase is JobPhase.PAUSED:
        return view.reason
    if view.record.phase is JobPhase.STOPPING:
        return f"{workers(len(view.workers))} to end"
    return ""


def leaving(view: JobView) -> str:
    """Return when a job that trains is going to stop or pause, "" if it is not."""
    record = view.record
    is_leaving = record.phase is JobPhase.RUNNING and (record.stopping or record.paused)
    return view.reason if is_leaving else ""


def waiting_line(view: JobView, now_ns: int) -> str:
    """Return "waits since 12.0 s: needs 1 more workers ...", or when a job is going to leave."""
    what = missing(view)
    return f"waits since {duration(now_ns - view.since_ns)}: {what}" if what else leaving(view)


def ending_line(view: JobView) -> str:
    """Return how a job ended: "job digits failed: ValueError: ..."."""
    record = view.record
    why = view.reason or record.reason
    return f"job {record.spec.name} {record.phase.value}{': ' if why else ''}{why}"


def where_it_goes_on(view: JobView, how: str) -> str:
    """Return the line from where a stopped job continues, for the end of the output."""
    record = view.record
    newest = record.checkpoints[-1].path if record.checkpoints else ""
    if newest:
        return f"resume from {newest}: {how}"
    if record.spec.own_steps and record.spec.run_path:
        return f"it resumes from what its script has saved: {how}"
    return "no checkpoint was recorded: it would begin anew"


def parsed_metrics(text: str) -> dict[str, Any]:
    """Return reported metrics, {} if there are none or the text is no JSON object."""
    try:
        metrics = json.loads(text) if text else {}
    except ValueError:
        return {}
    return metrics if isinstance(metrics, dict) else {}


def metrics_line(metrics: dict[str, Any]) -> str:
    """Return the plain values as "epoch=3 loss=0.1234", cut when they are many."""
    parts = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in metrics.items()
        if isinstance(value, (bool, int, float, str))
    ]
    line = " ".join(parts)
    return line if len(line) <= METRICS_CHARS_MAX else line[: METRICS_CHARS_MAX - 3] + "..."

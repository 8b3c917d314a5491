"""Texts about training: steps per second, time by category, stragglers.

Rule: pure functions, with the same words in `status`, `top` and the line of a followed job.
"""

from __future__ import annotations

from elastic.client.text_format import (
    duration,
    metrics_line,
    num_bytes,
    parsed_metrics,
)
from elastic.core.config import NS_PER_S
from elastic.core.telemetry import Goodput, Telemetry
from elastic.core.view import JobView

SHOWN_PART = 0.001
"""A smaller share of the time is not shown."""
STEP_COLUMNS = ("step time", "data", "exchange", "commit")
"""What `status` and `top` show of each worker's steps."""


def position_line(telemetry: Telemetry) -> str:
    """Return "epoch 3/10 step 45/100", "" before a loop over epochs has reported."""
    if not (telemetry.num_epochs or any(telemetry.position)):
        return ""
    epochs = f"/{telemetry.num_epochs}" if telemetry.num_epochs else ""
    steps = f"/{telemetry.num_steps}" if telemetry.num_steps else ""
    return f"epoch {telemetry.epoch}{epochs} step {telemetry.step}{steps}"


def eta_ns(telemetry: Telemetry) -> int | None:
    """Return how long the loop over epochs still takes at this pace, None if unknown."""
    if not (telemetry.num_epochs and telemetry.num_steps and telemetry.steps and telemetry.wall_ns):
        return None
    left = telemetry.num_steps * (telemetry.num_epochs - telemetry.epoch) - telemetry.step
    return max(0, left) * telemetry.wall_ns // telemetry.steps


def progress_line(telemetry: Telemetry) -> str:
    """Return position and pace: "epoch 3/10 step 4/9, 12.3 steps/s, 4m left"."""
    if not telemetry.steps:
        return ""
    left_ns = eta_ns(telemetry)
    parts = [position_line(telemetry), f"{telemetry.per_second(telemetry.steps):.3g} steps/s"]
    if left_ns is not None:
        parts.append(f"{duration(left_ns, digits=0)} left")
    return ", ".join(filter(None, parts))


def logged_line(telemetry: Telemetry) -> str:
    """Return the newest logged averages: "loss=0.1234"; names that begin with "_" are omitted."""
    known = parsed_metrics(telemetry.logged)
    return metrics_line({name: value for name, value in known.items() if not name.startswith("_")})


def pace_line(telemetry: Telemetry) -> str:
    """Return "12.3 steps/s, 1574 samples/s", "" before the first second of steps."""
    if not telemetry.steps:
        return ""
    parts = [f"{telemetry.per_second(telemetry.steps):.3g} steps/s"]
    if telemetry.samples:
        parts.append(f"{telemetry.per_second(telemetry.samples):,.0f} samples/s")
    if telemetry.tokens:
        parts.append(f"{telemetry.per_second(telemetry.tokens):,.0f} tokens/s")
    if telemetry.bytes_sent:
        parts.append(
            f"{num_bytes(round(telemetry.per_second(telemetry.bytes_sent)))}/s sent by a rank"
        )
    return ", ".join(parts)


def step_line(telemetry: Telemetry) -> str:
    """Return the parts of a step: "81 ms: compute 62, exchange 14, data 3, commit 2"."""
    if not telemetry.steps:
        return ""
    named = (
        ("compute", telemetry.compute_ns),
        ("exchange", telemetry.exchange_ns),
        ("data", telemetry.data_wait_ns),
        ("commit", telemetry.commit_ns),
    )
    parts = ", ".join(f"{name} {ns / telemetry.steps / 1e6:.3g}" for name, ns in named)
    late = straggler_line(telemetry)
    return f"{telemetry.step_s * 1e3:.3g} ms: {parts}{f'; {late}' if late else ''}"


def step_columns(telemetry: Telemetry) -> list[str]:
    """Return the time of a step, and the shares of it, for `STEP_COLUMNS`."""
    if not telemetry.steps:
        return ["-"] * len(STEP_COLUMNS)
    parts = (telemetry.data_wait_ns, telemetry.exchange_ns, telemetry.commit_ns)
    return [f"{telemetry.step_s * 1e3:.3g} ms", *(f"{ns / telemetry.wall_ns:.0%}" for ns in parts)]


def straggler_line(telemetry: Telemetry) -> str:
    """Return "rank 3 is waited for, 18% of the time", "" if no rank is."""
    if telemetry.straggler < 0:
        return ""
    part = telemetry.straggler_wait_ns / telemetry.wall_ns if telemetry.wall_ns else 0.0
    much = f", {part:.0%} of the time" if part >= SHOWN_PART else ""
    return f"rank {telemetry.straggler} is waited for{much}"


def goodput_line(goodput: Goodput, unreported_ns: int = 0) -> str:
    """Return "93.1% of 12m 4s of workers: productive 11m 14s, ...", "" before any time."""
    if not goodput.allocated_ns:
        return ""
    parts = sorted(goodput.seconds().items(), key=lambda pair: -pair[1])
    least = SHOWN_PART * goodput.allocated_ns / NS_PER_S
    shown = [f"{name} {duration(round(s * NS_PER_S))}" for name, s in parts if s > least]
    more = f"; {duration(unreported_ns)} not reported yet" if unreported_ns > NS_PER_S else ""
    held = duration(goodput.allocated_ns + unreported_ns)
    return f"{goodput.ratio:.1%} of {held} of workers: {', '.join(shown)}{more}"


def job_goodput(view: JobView) -> str:
    return goodput_line(view.record.goodput, view.unreported_ns)

"""How many feeders a job may have: one more while the workers that they feed wait for data.

Rule: it only grows, and only when all that it may have already run. What is free at that moment is
the queue's: these workers are the first to go when another job needs their slots.
"""

from __future__ import annotations

from elastic.core.config import JobSpec, ns
from elastic.core.policy.decision import Decision

WAIT_SHARE = 0.05
"""Of the time of steps that waits for data: above this, one more feeder is worth its slot."""
SETTLE_S = 5.0
"""After a change: a new feeder has started, and the newest telemetry was measured with it."""


def decide(
    limits: JobSpec,
    *,
    highest: int,
    running: int,
    since_ns: int | None,
    measured_ns: int,
    data_wait_ns: int,
    wall_ns: int,
    share_before: float | None,
    now_ns: int,
) -> Decision[float | None]:
    """Decide whether there may be one more feeder.

    Args:
        limits: the present bounds.
        highest: the largest maximum.
        running: how many run now.
        since_ns: since when; None before all of them do.
        measured_ns: when the oldest of the telemetry came, 0 if one does not train.
        data_wait_ns: of the newest steps of the workers that they feed, waited for data.
        wall_ns: duration of these steps.
        share_before: of the steps that waited before there was the newest feeder, None if not
            known for the newest group.
        now_ns: on the clock of `since_ns`.

    Returns:
        The share of the steps that waits if there may be one more, else None; when to decide again.
    """
    most = limits.max_workers
    if most >= highest or running < most or since_ns is None:
        return Decision(None, f"{running} of {most} feeders run")
    settled_ns = since_ns + ns(SETTLE_S)
    wake_ns = now_ns + ns(SETTLE_S)
    if measured_ns < settled_ns:
        return Decision(None, "nothing was measured with the newest feeder yet", wake_ns)
    share = data_wait_ns / wall_ns if wall_ns else 0.0
    reason = f"{share:.0%} of the steps is spent waiting for data"
    if share_before is not None and share >= share_before:
        return Decision(None, f"{reason}, no less than without the newest feeder", wake_ns)
    if share > WAIT_SHARE:
        return Decision(share, reason)
    return Decision(None, reason, wake_ns)

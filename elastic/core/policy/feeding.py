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
    data_wait_ns: int,
    wall_ns: int,
    now_ns: int,
) -> Decision[int]:
    """Decide the maximum number of feeders.

    Args:
        limits: the present bounds.
        highest: the largest maximum.
        running: how many run now.
        since_ns: since when; None before all of them do.
        data_wait_ns: of the newest steps of the workers that they feed, waited for data.
        wall_ns: duration of these steps.
        now_ns: on the clock of `since_ns`.

    Returns:
        The new maximum; when to decide again.
    """
    most = limits.max_workers
    if most >= highest or running < most or since_ns is None:
        return Decision(most, f"{running} of {most} feeders run")
    if now_ns < since_ns + ns(SETTLE_S):
        return Decision(most, "the newest feeder has just begun", since_ns + ns(SETTLE_S))
    share = data_wait_ns / wall_ns if wall_ns else 0.0
    reason = f"{share:.0%} of the steps is spent waiting for data"
    if share > WAIT_SHARE:
        return Decision(most + 1, reason)
    return Decision(most, reason, now_ns + ns(SETTLE_S))

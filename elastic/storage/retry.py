"""Retries of storage operations after transient faults, with a timeout.

Rule: only idempotent operations are retried. Pauses increase and are random, because all workers of
a run meet the same fault at the same moment. A pause sleeps in short slices, so that an exception
that another thread raises in this one is delivered.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from elastic.storage.faults import is_passing, reason_of

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 30.0
"""Default time for which a transient fault is retried."""
FIRST_PAUSE_S = 0.2
PAUSE_S_MAX = 5.0
SLICE_S = 0.02


def with_timeout(action: Callable[[], T], patience_s: float, what: str) -> T:
    """Run an action, and retry it after transient faults.

    Args:
        action: an idempotent operation.
        patience_s: no attempt starts later than this after the first; 0 for one attempt.
        what: describes the action in the log.

    Raises:
        Exception: that of the last attempt.
    """
    if patience_s <= 0:
        return action()
    # Not the global generator: the user's functions draw from that. Nor one that forks share.
    dice = random.Random()

    def log_retry(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning(
            "storage_retries what=%r attempt=%d pause_s=%.1f reason=%r",
            what, state.attempt_number, state.upcoming_sleep, reason_of(error) if error else "",
        )  # fmt: skip

    longest = tenacity.wait_exponential(multiplier=FIRST_PAUSE_S, max=PAUSE_S_MAX)
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        wait=lambda state: dice.uniform(0, longest(state)),
        stop=tenacity.stop_before_delay(patience_s),
        sleep=_pause,
        before_sleep=log_retry,
        reraise=True,
    )
    return attempts(action)


def _pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, SLICE_S))

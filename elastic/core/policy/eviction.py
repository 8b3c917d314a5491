"""Preemption: which training jobs release all workers, so that one of higher priority can start.

Rule: strictly lower priority only, and as few jobs as possible. A job that could not continue later
is not preempted. A job leaves with a new checkpoint, or with an older one once its time is over;
one that has none, and cannot be saved by then, is passed over for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.policy.decision import Decision

Fits = Callable[[tuple[int, ...]], bool]
"""Returns whether the job fits if these were preempted; has no side effects."""

DEADLINES_PASSED_OVER = 2
"""A job that could not be saved by its deadline is preempted again after so many of them."""


def why_it_stays(spec: JobSpec, *, in_place: bool, num_checkpoints: int) -> str:
    """Return why a training job keeps its min, whatever waits; "" if it can be preempted."""
    if spec.non_preemptible:
        return "was submitted as not preemptible"
    if spec.feeds:
        return ""
    if not spec.run_path:
        return "has no run directory to continue from"
    if not in_place and not num_checkpoints:
        return "has no checkpoint to continue from yet"
    return ""


def retry_ns(config: CoordinatorConfig) -> int:
    """Return the time between a save that did not come and the next request."""
    return DEADLINES_PASSED_OVER * ns(config.preemption_deadline_s)


def passed_over_until(
    config: CoordinatorConfig, *, until_ns: int, num_checkpoints: int
) -> Decision[int]:
    """Decide until when a job is not preempted, because it could not be saved.

    Args:
        config: times for the reason.
        until_ns: `retry_ns` after its time was over, 0 if it never was.
        num_checkpoints: recorded so far; with one it can always continue.

    Returns:
        The moment, on the clock of `until_ns`; 0 for a job that is not passed over.
    """
    if num_checkpoints or not until_ns:
        return Decision(0, "")
    deadline_s = config.preemption_deadline_s
    return Decision(
        until_ns,
        f"wrote no checkpoint within {deadline_s:g} s and has none to continue from: it is asked "
        f"again after {DEADLINES_PASSED_OVER * deadline_s:g} s, or once it has one",
    )


class EvictionSave(Enum):
    """The state of the checkpoint of a job that must release its workers."""

    AWAITED = "awaited"
    """Its members continue until one is written."""
    OVER = "over"
    """It may leave: there is a checkpoint to continue from."""
    IN_VAIN = "in vain"
    """None came in time, and there is no older one: it is not preempted."""


def judge_saving(
    *, in_place: bool, is_saved: bool, num_checkpoints: int, save_by_ns: int | None, now_ns: int
) -> Decision[EvictionSave]:
    """Decide whether a job that must release its workers is saved first.

    Args:
        in_place: its loop can be saved at any step; other code is saved by its reports.
        is_saved: it was saved since the request.
        num_checkpoints: recorded so far.
        save_by_ns: when its time is over, None for never.
        now_ns: on the same clock.
    """
    if is_saved or not in_place:
        return Decision(EvictionSave.OVER, "saved" if is_saved else "its code saves by itself")
    if save_by_ns is None or now_ns < save_by_ns:
        return Decision(EvictionSave.AWAITED, "a checkpoint is being written", save_by_ns)
    if num_checkpoints:
        return Decision(EvictionSave.OVER, "its newest checkpoint must do")
    return Decision(EvictionSave.IN_VAIN, "no checkpoint came in time, and it has no older one")


def fewest(count: int, fits: Fits) -> tuple[int, ...]:
    """Return which of `count` jobs must be preempted, () if all of them together are not enough.

    Args:
        count: jobs 0 to count - 1, in the order of preference.
        fits: monotonic: if it returns True for some of them, it does for any superset.

    Returns:
        A minimal choice: none of them can be omitted. Of several, the one that spares the later
        jobs: the last one chosen is the first with which the earlier ones are enough.
    """
    if not count or not fits(tuple(range(count))):
        return ()
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        if fits(tuple(range(middle))):
            high = middle
        else:
            low = middle + 1
    chosen = list(range(low))
    for index in range(low - 2, -1, -1):
        fewer = tuple(i for i in chosen if i != index)
        if fits(fewer):
            chosen = list(fewer)
    return tuple(chosen)

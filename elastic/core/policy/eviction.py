"""Which of the jobs that train give way as a whole, so that one of higher priority can start.

Rule: strictly lower priority only, and no more of them than it takes. One that could not go on from
where it stood is not touched at all. A job leaves saved, or with an older checkpoint once its time
is over; one that has none, and cannot be saved by then, is passed over for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.policy.decision import Decision

Fits = Callable[[tuple[int, ...]], bool]
"""Says whether the job fits if these gave way, and leaves everything as it was."""

DEADLINES_PASSED_OVER = 2
"""A job that could not be saved by its deadline is asked again after so many of them."""


def why_it_stays(spec: JobSpec, *, in_place: bool, num_checkpoints: int) -> str:
    """Return why a job that trains keeps its min, whoever waits; "" if it may give way.

    Args:
        spec: of the job that trains.
        in_place: its loop can be saved at any step.
        num_checkpoints: recorded so far.
    """
    if spec.non_preemptible:
        return "was submitted as not preemptible"
    if not spec.run_path:
        return "has no run directory to go on from"
    if not in_place and not num_checkpoints:
        return "has no checkpoint to go on from yet"
    return ""


def retry_ns(config: CoordinatorConfig) -> int:
    """Return how long after a save that did not come the next one is asked for."""
    return DEADLINES_PASSED_OVER * ns(config.preemption_deadline_s)


def passed_over_until(
    config: CoordinatorConfig, *, until_ns: int, num_checkpoints: int
) -> Decision[int]:
    """Decide until when a job that may give way is left alone, because it could not be saved.

    Args:
        config: times for the reason.
        until_ns: `retry_ns` after its time was over, 0 if it never was.
        num_checkpoints: recorded so far; with one it can always go on.

    Returns:
        The moment, on the clock of `until_ns`; 0 for a job that is not passed over.
    """
    if num_checkpoints or not until_ns:
        return Decision(0, "")
    deadline_s = config.preemption_deadline_s
    return Decision(
        until_ns,
        f"wrote no checkpoint within {deadline_s:g} s and has none to go on from: it is asked "
        f"again after {DEADLINES_PASSED_OVER * deadline_s:g} s, or once it has one",
    )


class EvictionSave(Enum):
    """How far a job that is to hold no workers has come with its checkpoint."""

    AWAITED = "awaited"
    """Its members go on until one is written."""
    OVER = "over"
    """It may leave: what it goes on from later is there."""
    IN_VAIN = "in vain"
    """None came in time, and there is no older one: it is not taken down."""


def judge_saving(
    *, in_place: bool, is_saved: bool, num_checkpoints: int, save_by_ns: int | None, now_ns: int
) -> Decision[EvictionSave]:
    """Decide whether a job that is to hold no workers is still to be saved first.

    Args:
        in_place: its loop can be saved at any step; other code is saved by its reports.
        is_saved: it was, since it was to leave.
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
    """Return which of `count` jobs must give way, () if all of them together are not enough.

    Args:
        count: jobs 0 to count - 1, in the order in which they would go.
        fits: if it says yes for some of them, it says so for more of them as well.

    Returns:
        None of them can be left out. Of two such choices, the one that spares the later jobs: the
        last one that goes is the first with which the earlier ones are enough.
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

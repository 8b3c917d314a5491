"""Which of the jobs that train give way as a whole, so that one of higher priority can start.

Rule: strictly lower priority only, never for fairness alone; and no more of them than it takes. A
job that has just begun is left alone for a while, and one that could not go on from where it stood
is not touched at all.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.config import PREEMPT_WHOLE, JobSpec

Fits = Callable[[tuple[int, ...]], bool]
"""Says whether the job fits if these gave way, and leaves everything as it was."""


def why_it_stays(spec: JobSpec, mode: str, *, in_place: bool, num_checkpoints: int) -> str:
    """Return why a job that trains keeps its min, whoever waits; "" if it may give way.

    Args:
        spec: of the job that trains.
        mode: `CoordinatorConfig.preemption`.
        in_place: its loop can be saved at any step.
        num_checkpoints: recorded so far.
    """
    if mode != PREEMPT_WHOLE:
        return "no job is taken down for another one here (elastic-coord serve --preemption)"
    if spec.non_preemptible:
        return "was submitted as not preemptible"
    if not spec.run_path:
        return "has no run directory to go on from"
    if not in_place and not num_checkpoints:
        return "has no checkpoint to go on from yet"
    return ""


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

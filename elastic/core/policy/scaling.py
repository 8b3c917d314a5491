"""Which bounds a user may set for a submitted job.

Rule: no group may be larger than the number of micro-batches of a step, V, because a worker without
one would have nothing to compute. V is fixed for a run and known once its loop has begun; code with
its own loop has none, and any number of workers may share its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from elastic.core.config import JobSpec
from elastic.core.policy.decision import Decision
from elastic.errors import ConfigError


class StepShares(Enum):
    """How a job's steps are divided among workers, as far as known."""

    IDLE = "idle"
    """It does not train, and has reported nothing in this term."""
    UNKNOWN = "unknown"
    """It trains, and has not shown yet which loop it has."""
    CUT = "cut"
    """In V micro-batches."""
    ITS_OWN = "its own"
    """By the code itself."""


@dataclass(frozen=True)
class JobBounds:
    """A job as far as its bounds are concerned.

    Attributes:
        high: its largest group now.
        micro_batches: V, 0 while it is not known.
        steps: see `StepShares`.
    """

    spec: JobSpec
    high: int
    micro_batches: int
    steps: StepShares


def judge_bounds(shape: JobBounds, low: int, high: int) -> Decision[bool]:
    """Decide whether a job may have these bounds; the reason is why not, and what to do."""
    most = largest(shape)
    if most is not None and high > max(most, shape.high):
        return Decision(False, f"job {shape.spec.job_id}: max {high}: {_why_no_more(shape, most)}")
    try:
        replace(shape.spec, min_workers=low, max_workers=high)
    except ConfigError as error:
        return Decision(False, str(error))
    return Decision(True, f"{low} to {high} workers")


def largest(shape: JobBounds) -> int | None:
    """Return the maximum number of workers of a job, None if only the cluster limits it.

    The submitted maximum is always permitted: V is chosen for that.
    """
    if shape.steps is StepShares.ITS_OWN:
        return None
    return max(shape.spec.max_workers, shape.micro_batches)


def within(shape: JobBounds, low: int, high: int) -> tuple[int, int]:
    """Return these bounds, reduced to what the job may have, in whole replicas."""
    most = largest(shape)
    if most is None or high <= most:
        return low, high
    replica = shape.spec.workers_per_replica
    most = most // replica * replica
    return min(low, most), most


def _why_no_more(shape: JobBounds, most: int) -> str:
    if shape.steps is StepShares.CUT:
        return (
            f"a step of this run is shared out in {shape.micro_batches} micro-batches, so that no "
            f"more than {most} workers have one, and their number is fixed for the run; for more, "
            f"submit it again with a greater maximum or "
            f"prepare_data_loader(global_batch_size=...), as a new run"
        )
    if shape.steps is StepShares.IDLE:
        unknown = (
            "does not train now, so that nobody can say whether more can share its steps; that is "
            "known while it trains"
        )
    else:
        unknown = (
            "has not shown yet whether more can share its steps: a loop over train.epochs() says "
            "in how many micro-batches a step is cut, and code without one shows it by reporting "
            "a checkpoint"
        )
    return (
        f"it was submitted with max_workers={most}, and {unknown}; scale it then, or submit it "
        f"again with a greater maximum"
    )

"""Which bounds a job may be given, by what is known of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.config import JobSpec
from elastic.core.policy.scaling import Shape, Steps, judge_bounds, largest, within
from elastic.core.world import JobId
from tests.strategies import SCRIPT


def shape(steps: Steps, *, v: int = 0, high: int = 4, **changes: Any) -> Shape:
    """A job that was submitted with at most four workers."""
    facts = {"min_workers": 2, "max_workers": 4, **changes}
    return Shape(JobSpec(job_id=JobId("a"), name="a", entry=SCRIPT, **facts), high, v, steps)


@pytest.mark.parametrize(
    ("steps", "v", "high", "says"),
    [
        (Steps.IDLE, 0, 4, ""),
        (Steps.IDLE, 0, 5, "max 5: it was submitted with max_workers=4, and does not train now"),
        (Steps.UNKNOWN, 0, 5, "has not shown yet whether more can share its steps"),
        (Steps.CUT, 8, 8, ""),
        (Steps.CUT, 8, 9, "max 9: a step of this run is shared out in 8 micro-batches"),
        (Steps.CUT, 2, 4, ""),
        (Steps.ITS_OWN, 0, 9000, ""),
    ],
)
def test_a_group_grows_up_to_what_can_share_a_step(
    steps: Steps, v: int, high: int, says: str
) -> None:
    decision = judge_bounds(shape(steps, v=v), 2, high)
    assert decision.value is not bool(says)
    assert says in decision.reason


def test_what_it_may_have_already_is_not_refused() -> None:
    assert judge_bounds(shape(Steps.IDLE, high=8), 2, 8).value
    assert not judge_bounds(shape(Steps.IDLE, high=8), 2, 9).value


def test_bounds_that_no_job_can_have_are_refused_whatever_is_known() -> None:
    assert "expected 1 <= min <= max" in judge_bounds(shape(Steps.ITS_OWN), 3, 2).reason
    pairs = shape(Steps.ITS_OWN, workers_per_replica=2)
    assert "workers_per_replica=2 must" in judge_bounds(pairs, 2, 5).reason
    assert judge_bounds(pairs, 2, 6).value


def test_bounds_are_cut_to_what_a_job_may_have_in_whole_replicas() -> None:
    assert largest(shape(Steps.ITS_OWN)) is None
    assert within(shape(Steps.ITS_OWN), 5, 9) == (5, 9)
    assert within(shape(Steps.CUT, v=7), 5, 9) == (5, 7)
    assert within(shape(Steps.CUT, v=7, workers_per_replica=2), 8, 10) == (6, 6)
    assert within(shape(Steps.CUT, v=2), 1, 9) == (1, 4), "as it was submitted"

"""What a scheduler says of a trial, and what it may look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

Curve = Sequence[tuple[int, float]]
"""(resource, value) of each report, oldest first; greater values are better."""


class TrialAction(Enum):
    """What is done with a trial."""

    GO_ON = "go on"
    STOP = "stop"
    PAUSE = "pause"
    EXPLOIT = "exploit"
    """It takes over the newest checkpoint of a better one, with another config."""


@dataclass(frozen=True)
class TrialDecision:
    """What is done, and what is remembered of the judgement.

    Attributes:
        rungs: resource -> value that the trial is remembered with there.
        donor: of `EXPLOIT`: number of the trial whose checkpoint is taken.
    """

    act: TrialAction
    rungs: Mapping[int, float] = field(default_factory=dict)
    donor: int = -1


GO_ON = TrialDecision(TrialAction.GO_ON)


@dataclass(frozen=True)
class TrialProgress:
    """One trial, as schedulers see it.

    Attributes:
        curve: its reports.
        rungs: what was remembered of it.
        is_over: it has ended, however that was.
        is_complete: it has ended by itself, as a success.
        is_paused: it waits for its scheduler.
    """

    number: int
    curve: Curve = ()
    rungs: Mapping[int, float] = field(default_factory=dict)
    is_over: bool = False
    is_complete: bool = False
    is_paused: bool = False


def rank_of(value: float) -> float:
    """Return what to sort by: NaN is worse than everything."""
    return -math.inf if math.isnan(value) else value

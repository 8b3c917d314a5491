"""The decision of a scheduler about a trial, and the facts that it may use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

Curve = Sequence[tuple[int, float]]
"""(resource, value) of each report, oldest first; greater values are better."""


class TrialAction(Enum):
    """The action for a trial."""

    GO_ON = "go on"
    STOP = "stop"
    PAUSE = "pause"
    EXPLOIT = "exploit"
    """It takes over the newest checkpoint of a better one, with another config."""


@dataclass(frozen=True)
class TrialDecision:
    """The action, and the values recorded with it.

    Attributes:
        rungs: resource -> value to record for the trial.
        donor: of `EXPLOIT`: number of the trial whose checkpoint is used.
    """

    action: TrialAction
    rungs: Mapping[int, float] = field(default_factory=dict)
    donor: int = -1


GO_ON = TrialDecision(TrialAction.GO_ON)


@dataclass(frozen=True)
class TrialProgress:
    """One trial, as schedulers see it.

    Attributes:
        curve: its reports.
        rungs: its recorded values, by resource.
        is_over: it has ended, in any way.
        is_complete: it has ended by itself, with success.
        is_paused: it waits for its scheduler.
    """

    number: int
    curve: Curve = ()
    rungs: Mapping[int, float] = field(default_factory=dict)
    is_over: bool = False
    is_complete: bool = False
    is_paused: bool = False


def rank_of(value: float) -> float:
    """Return the sort key: NaN is worse than everything."""
    return -math.inf if math.isnan(value) else value

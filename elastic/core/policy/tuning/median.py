"""Median stopping: a trial whose best is worse than the median of the others at the same place.

Source: Golovin et al., Google Vizier, KDD 2017, in the form of Optuna's `MedianPruner`, which the
tests compare it to: the others are those that ran to their end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.decision import GO_ON, TrialAction, TrialDecision, TrialProgress


@dataclass(frozen=True)
class Median:
    """When trials are compared.

    Attributes:
        grace: below this resource no trial is stopped.
        min_samples: nor before so many trials ran to their end.
        sign: see `Asha`.
    """

    grace: int = 1
    min_samples: int = 3
    sign: float = 1.0

    def judge(
        self, trial: TrialProgress, others: Sequence[TrialProgress]
    ) -> Decision[TrialDecision]:
        """Judge a trial by its newest report; see `Asha.judge`."""
        at, _ = trial.curve[-1]
        complete = [other for other in others if other.is_complete]
        if at < self.grace:
            return Decision(GO_ON, f"before grace_period={self.grace}")
        if not complete or len(complete) < self.min_samples:
            return Decision(GO_ON, f"{len(complete)} of {self.min_samples} trials to compare with")
        finite = [value for _, value in trial.curve if not math.isnan(value)]
        if not finite:
            return Decision(TrialDecision(TrialAction.STOP), "nothing but NaN so far")
        # Reports of two trials rarely come in the same second: the newest one until then counts.
        there = [
            [value for t, value in other.curve if t <= at][-1:]
            for other in complete
            if other.curve and other.curve[-1][0] >= at
        ]
        known = sorted(value for last in there for value in last if not math.isnan(value))
        if not known:
            return Decision(GO_ON, f"no trial to compare with at {at}")
        middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
        if max(finite) < middle:
            reason = (
                f"its best {max(finite) * self.sign:.4g} is behind {middle * self.sign:.4g}, the "
                f"median of {len(known)} at {at}"
            )
            return Decision(TrialDecision(TrialAction.STOP), reason)
        return Decision(GO_ON, f"not behind the median at {at}")

"""Population based training: the worst of a population continue from the best ones' checkpoints.

Source: Jaderberg et al., arXiv 1711.09846. How the config is changed is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.decision import (
    GO_ON,
    TrialAction,
    TrialDecision,
    TrialProgress,
    rank_of,
)


@dataclass(frozen=True)
class Pbt:
    """When trials are compared, and which count as good or bad.

    Attributes:
        interval: resource between two comparisons of a trial.
        burn_in: no comparison before.
        quantile: share of the population that is good, and that is bad; at most a half.
        sign: see `Asha`.
    """

    interval: int = 60
    burn_in: int = 0
    quantile: float = 0.25
    sign: float = 1.0

    def judge(
        self, trial: TrialProgress, others: Sequence[TrialProgress], draw: float
    ) -> Decision[TrialDecision]:
        """Judge a trial by its newest report.

        Args:
            trial: with its newest report.
            others: all other trials.
            draw: in [0, 1); chooses the donor.
        """
        at, value = trial.curve[-1]
        if at < self.burn_in or at - max(trial.rungs, default=0) < self.interval:
            return Decision(GO_ON, "not due for a comparison")
        passed = {at: value}
        scores = [(rank_of(value), -trial.number)]
        scores += [
            (rank_of(one.rungs[max(one.rungs)]), -one.number)
            for one in others
            if one.rungs and not one.is_over
        ]
        scores.sort()
        count = min(math.ceil(len(scores) * self.quantile), len(scores) // 2)
        worst, best = scores[:count], scores[len(scores) - count :]
        shown = f"{value * self.sign:.4g}"
        if scores[0][0] == scores[-1][0] or (rank_of(value), -trial.number) not in worst:
            reason = f"{shown} at {at} is not of the worst {count} of {len(scores)}"
            return Decision(TrialDecision(TrialAction.GO_ON, passed), reason)
        score, donor = best[int(draw * len(best))]
        reason = (
            f"{shown} at {at} is of the worst {count} of {len(scores)}: continues from trial "
            f"{-donor}, with {score * self.sign:.4g}"
        )
        return Decision(TrialDecision(TrialAction.EXPLOIT, passed, donor=-donor), reason)

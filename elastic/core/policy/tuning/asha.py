"""Asynchronous successive halving: at each rung the best share of the trials so far continues.

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, arXiv 1810.05934; the rule
for few competitors is that of Optuna's `SuccessiveHalvingPruner`, to which the tests compare it:
while fewer than `reduction_factor` have reached a rung, only the best of them continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.decision import GO_ON, TrialAction, TrialDecision, TrialProgress


@dataclass(frozen=True)
class Asha:
    """The rungs: grace * reduction ** (bracket + 0, 1, 2, ...), below max_t.

    Attributes:
        grace: resource of the first rung.
        reduction: of so many at a rung one continues.
        max_t: a trial with this resource is past all rungs; 0 for no limit.
        stops_last: such a trial is stopped.
        brackets: trials are dealt to so many brackets in turn; each begins one rung later.
        sign: what values were turned with so that greater is better; reasons turn them back.
    """

    grace: int = 1
    reduction: int = 4
    max_t: int = 100
    brackets: int = 1
    sign: float = 1.0
    stops_last: bool = True

    def judge(
        self, trial: TrialProgress, others: Sequence[TrialProgress]
    ) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        at, value = trial.curve[-1]
        passed: dict[int, float] = {}
        rung = self._first(trial.number)
        while rung <= at and not (self.max_t and rung >= self.max_t):
            if rung in trial.rungs:
                rung *= self.reduction
                continue
            if math.isnan(value):
                return Decision(TrialDecision(TrialAction.STOP, passed), f"NaN at rung {rung}")
            passed[rung] = value
            known = [other.rungs[rung] for other in others if rung in other.rungs]
            cut = cut_of([*known, value], self.reduction)
            if value < cut:
                reason = (
                    f"{value * self.sign:.4g} at rung {rung} is behind {cut * self.sign:.4g}, of "
                    f"the best 1/{self.reduction} of {len(known) + 1}"
                )
                return Decision(TrialDecision(TrialAction.STOP, passed), reason)
            rung *= self.reduction
        if self.stops_last and self.max_t and at >= self.max_t:
            return Decision(TrialDecision(TrialAction.STOP, passed), f"reached max_t={self.max_t}")
        if not passed:
            return Decision(GO_ON, "between rungs")
        return Decision(
            TrialDecision(TrialAction.GO_ON, passed), f"among the best at rung {max(passed)}"
        )

    def _first(self, number: int) -> int:
        return self.grace * int(self.reduction ** (number % self.brackets))


def cut_of(values: Sequence[float], reduction: int) -> float:
    """Return the lowest value that passes a rung with these values."""
    ordered = sorted(values, reverse=True)
    return ordered[max(0, len(ordered) // reduction - 1)]

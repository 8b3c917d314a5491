"""HyperBand: brackets of trials that wait for each other at each rung; the best share continues.

Source: Li et al., HyperBand, JMLR 2018. Trials fill one bracket after the other by their numbers,
those with the smallest first resource before the others; a full band is followed by another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.decision import (
    GO_ON,
    TrialAction,
    TrialDecision,
    TrialProgress,
    rank_of,
)


@dataclass(frozen=True)
class Bracket:
    """A bracket and its trials.

    Attributes:
        first, size: numbers of its trials, first to first + size - 1.
        rungs: resources at which they wait for each other; the last one is max_t.
    """

    first: int
    size: int
    rungs: tuple[int, ...]


@dataclass(frozen=True)
class HyperBand:
    """The band.

    Attributes:
        max_t: resource of a trial that passes all rungs.
        reduction: of so many at a rung one continues.
        sign: see `Asha`.
    """

    max_t: int = 81
    reduction: int = 3
    sign: float = 1.0

    def bracket_of(self, number: int) -> Bracket:
        deepest = 0
        while self.reduction ** (deepest + 1) <= self.max_t:
            deepest += 1
        sizes = [-(-(deepest + 1) * self.reduction**s // (s + 1)) for s in range(deepest, -1, -1)]
        first = number - number % sum(sizes)
        for s, size in zip(range(deepest, -1, -1), sizes, strict=True):
            if number < first + size:
                rungs = [max(1, self.max_t // self.reduction**k) for k in range(s, -1, -1)]
                return Bracket(first, size, tuple(rungs))
            first += size
        return Bracket(first, 1, (self.max_t,))

    def judge(
        self, trial: TrialProgress, others: Sequence[TrialProgress]
    ) -> Decision[TrialDecision]:
        """Judge a trial by its reports: at a rung it waits; see `settle`.

        Its first value at a rung counts, so reports until its pause took effect are no advantage.
        """
        at, value = trial.curve[-1]
        if at >= self.max_t:
            return Decision(
                TrialDecision(TrialAction.STOP, {self.max_t: value}), f"reached max_t={self.max_t}"
            )
        rungs = self.bracket_of(trial.number).rungs
        passed = [rung for rung in rungs if rung <= at and rung not in trial.rungs]
        if not passed:
            return Decision(GO_ON, "between rungs")
        reason = f"waits at rung {passed[-1]} for the others of its bracket"
        values = {rung: next(v for t, v in trial.curve if t >= rung) for rung in passed}
        return Decision(TrialDecision(TrialAction.PAUSE, values), reason)

    def settle(
        self, trials: Sequence[TrialProgress], *, is_exhausted: bool
    ) -> list[tuple[int, Decision[TrialDecision]]]:
        """Return the decisions for waiting trials whose bracket is complete at their rung."""
        found: list[tuple[int, Decision[TrialDecision]]] = []
        first = 0
        while first < len(trials):
            bracket = self.bracket_of(first)
            members = list(trials[first : first + bracket.size])
            is_full = len(members) == bracket.size or is_exhausted
            if is_full:
                found += self._settle(members, bracket.rungs)
            first += bracket.size
        return found

    def _settle(
        self, members: list[TrialProgress], rungs: Sequence[int]
    ) -> list[tuple[int, Decision[TrialDecision]]]:
        for rung, following in pairwise(rungs):
            if any(rung not in one.rungs and not one.is_over for one in members):
                return []
            arrived = [one for one in members if rung in one.rungs]
            order = sorted(arrived, key=lambda one: (-rank_of(one.rungs[rung]), one.number))
            kept = order[: max(1, len(order) // self.reduction)]
            # A trial past this rung has passed it before.
            waiting = [one for one in arrived if one.is_paused and following not in one.rungs]
            last = kept[-1].rungs[rung] * self.sign if kept else 0.0
            why = f"at rung {rung} the best {len(kept)} of {len(order)} continue, to {last:.4g}"
            if waiting:
                return [
                    (
                        one.number,
                        Decision(GO_ON if one in kept else TrialDecision(TrialAction.STOP), why),
                    )
                    for one in waiting
                ]
            members = kept
        return []

"""Schedulers of studies: against Optuna's pruners on recorded traces, and what they guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.policy.tuning.asha import Asha
from elastic.core.policy.tuning.decision import TrialAction, TrialProgress
from elastic.core.policy.tuning.hyperband import HyperBand
from elastic.core.policy.tuning.median import Median
from elastic.core.policy.tuning.pbt import Pbt
from tests.effort import examples

LIMITS = settings(max_examples=examples(30), deadline=None)
VALUES = st.one_of(st.floats(-5, 5), st.just(math.nan), st.sampled_from([0.0, 1.0]))


@dataclass
class Trace:
    """Trials that report in some order, and what became of each at each report."""

    seen: list[TrialProgress]
    stopped: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int) -> Trace:
        return cls([TrialProgress(number) for number in range(count)])

    def report(self, policy: Asha | Median, number: int, value: float, length: int) -> TrialAction:
        """Take the next report of a trial; it is complete after `length` of them."""
        trial = self.seen[number]
        at = len(trial.curve) + 1
        trial = replace(trial, curve=[*trial.curve, (at, value)])
        others = [one for one in self.seen if one.number != number]
        verdict = policy.judge(trial, others).value
        is_over = verdict.action is TrialAction.STOP or at == length
        self.seen[number] = replace(
            trial,
            rungs={**trial.rungs, **verdict.rungs},
            is_over=is_over,
            is_complete=is_over and verdict.action is not TrialAction.STOP,
        )
        return verdict.action


def orders(random: Random, count: int, length: int) -> list[int]:
    """Whose turn it is, mixed: trials run beside each other."""
    turns = [number for number in range(count) for _ in range(length)]
    random.shuffle(turns)
    return turns


def agree(
    policy: Asha | Median,
    pruner: optuna.pruners.BasePruner,
    values: Sequence[Sequence[float]],
    seed: int,
) -> int:
    """Run both over one trace; return how many trials were stopped."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    theirs = [study.ask() for _ in values]
    ours, stopped, length = Trace.of(len(values)), set(), len(values[0])
    for number in orders(Random(seed), len(values), length):
        if number in stopped:
            continue
        at = len(ours.seen[number].curve) + 1
        value = values[number][at - 1]
        theirs[number].report(value, at)
        prunes = theirs[number].should_prune()
        act = ours.report(policy, number, value, length)
        assert (act is TrialAction.STOP) == prunes, (
            f"trial {number} at {at}: {act}, Optuna: {prunes}"
        )
        if prunes:
            stopped.add(number)
            study.tell(theirs[number], state=optuna.trial.TrialState.PRUNED)
        elif at == length:
            study.tell(theirs[number], 0.0)
    return len(stopped)


CURVES = st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=1, max_size=12)


@LIMITS
@given(CURVES, st.integers(0, 1000), st.integers(1, 3), st.integers(2, 4))
def test_asha_decides_as_optunas_pruner(
    values: list[list[float]], seed: int, grace: int, reduction: int
) -> None:
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=grace, reduction_factor=reduction, min_early_stopping_rate=0
    )
    agree(Asha(grace, reduction, max_t=0), pruner, values, seed)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@LIMITS
@given(CURVES, st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4))
def test_median_stopping_decides_as_optunas_pruner(
    values: list[list[float]], seed: int, grace: int, least: int
) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=least, n_warmup_steps=grace)
    agree(Median(grace, least), pruner, values, seed)


def test_both_stop_trials_on_a_recorded_trace_of_a_thousand_reports() -> None:
    random = Random(7)
    rates = [random.uniform(0.02, 0.5) for _ in range(40)]
    values = [
        [1 - math.exp(-rate * at) + random.gauss(0, 0.02) for at in range(25)] for rate in rates
    ]
    asha = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=3, min_early_stopping_rate=0
    )
    assert agree(Asha(1, 3, max_t=0), asha, values, 1) > 20
    median = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2)
    assert agree(Median(2, 3), median, values, 1) > 5


def test_asha_stops_at_max_t_and_says_why_it_stops() -> None:
    policy = Asha(1, 2, max_t=4, sign=-1.0)
    good, bad = TrialProgress(0, rungs={1: -0.25}), TrialProgress(1, curve=[(1, -0.75)])
    decision = policy.judge(bad, [good])
    assert decision.value.action is TrialAction.STOP
    assert decision.reason == "0.75 at rung 1 is behind 0.25, of the best 1/2 of 2"
    done = TrialProgress(0, curve=[(4, 0.5)], rungs={1: 0.5, 2: 0.5})
    assert policy.judge(done, []).reason == "reached max_t=4"


def test_asha_that_stops_nobody_at_max_t_remembers_what_passed_the_rungs_before() -> None:
    late = TrialProgress(0, curve=[(4, 0.5)], rungs={1: 0.5})
    verdict = Asha(1, 2, max_t=4, stops_last=False).judge(late, []).value
    assert (verdict.action, verdict.rungs) == (TrialAction.GO_ON, {2: 0.5})


# ------------------------------------------------------------------------------------- HyperBand


@pytest.mark.parametrize("max_t", [1, 9, 27, 81, 100])
def test_brackets_tile_all_numbers_and_begin_with_the_shortest(max_t: int) -> None:
    policy = HyperBand(max_t, 3)
    number, first = 0, policy.bracket_of(0)
    assert first.rungs[-1] == max_t
    for _ in range(20):
        bracket = policy.bracket_of(number)
        assert bracket.first == number
        inside = range(bracket.first, bracket.first + bracket.size)
        assert {policy.bracket_of(n) for n in inside} == {bracket}
        number += bracket.size


@LIMITS
@given(st.integers(1, 40), st.sampled_from([1, 3, 9, 27]), st.integers(0, 1000))
def test_hyperband_ends_every_trial_and_the_best_of_a_bracket_goes_all_the_way(
    count: int, max_t: int, seed: int
) -> None:
    policy, random = HyperBand(max_t, 3), Random(seed)
    values = [random.random() for _ in range(count)]
    seen = [TrialProgress(number) for number in range(count)]
    for _ in range(count * max_t * 4):
        moving = [one for one in seen if not one.is_over and not one.is_paused]
        if not moving:
            break
        trial = random.choice(moving)
        at = trial.curve[-1][0] + 1 if trial.curve else 1
        trial = replace(trial, curve=[(at, values[trial.number])])
        verdict = policy.judge(trial, [one for one in seen if one is not trial]).value
        seen[trial.number] = replace(
            trial,
            rungs={**trial.rungs, **verdict.rungs},
            is_over=verdict.action is TrialAction.STOP,
            is_paused=verdict.action is TrialAction.PAUSE,
        )
        for number, decision in policy.settle(seen, is_exhausted=True):
            stops = decision.value.action is TrialAction.STOP
            assert seen[number].is_paused
            seen[number] = replace(seen[number], is_paused=False, is_over=stops)
    assert all(one.is_over for one in seen)
    for number in range(count):
        bracket = policy.bracket_of(number)
        members = seen[bracket.first : bracket.first + bracket.size]
        best = max(members, key=lambda one: (values[one.number], -one.number))
        assert best.curve[-1][0] == max_t


def test_what_comes_until_a_pause_takes_effect_is_no_advantage() -> None:
    ahead = TrialProgress(
        0, curve=[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)], rungs={1: 0.1}
    )
    assert HyperBand(9, 3).judge(ahead, []).value.rungs == {3: 0.3}


# ------------------------------------------------------------------------------------------- PBT


@LIMITS
@given(
    st.lists(VALUES, min_size=1, max_size=12),
    VALUES,
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.1, 0.25, 0.5]),
)
def test_who_takes_over_is_bad_and_the_donor_is_good(
    scores: list[float], value: float, draw: float, quantile: float
) -> None:
    others = [TrialProgress(number + 1, rungs={4: score}) for number, score in enumerate(scores)]
    verdict = Pbt(4, 0, quantile).judge(TrialProgress(0, curve=[(4, value)]), others, draw).value
    assert verdict.rungs.keys() == {4}
    if verdict.action is TrialAction.EXPLOIT:
        donor = scores[verdict.donor - 1]
        assert math.isnan(value) or donor >= value
        assert not math.isnan(donor)


def test_nobody_takes_over_before_its_time_or_from_its_equals() -> None:
    others = [TrialProgress(number, rungs={4: 1.0}) for number in range(1, 4)]
    assert (
        Pbt(4).judge(TrialProgress(0, curve=[(3, 0.0)]), others, 0.0).value.action
        is TrialAction.GO_ON
    )
    assert (
        Pbt(4).judge(TrialProgress(0, curve=[(4, 1.0)]), others, 0.0).value.action
        is TrialAction.GO_ON
    )
    assert (
        Pbt(4).judge(TrialProgress(0, curve=[(4, 0.0)]), others, 0.0).value.action
        is TrialAction.EXPLOIT
    )
    late = TrialProgress(0, curve=[(5, 0.0)], rungs={4: 0.0})
    assert Pbt(4).judge(late, others, 0.0).value.action is TrialAction.GO_ON

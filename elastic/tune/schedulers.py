"""Schedulers with Ray Tune's names: decide which trials continue, by the core's policies.

Rule: a scheduler holds configuration only. Its decisions depend only on the study, so that a
restarted driver decides as the killed one would have done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.asha import Asha
from elastic.core.policy.tuning.decision import GO_ON, TrialDecision, TrialProgress
from elastic.core.policy.tuning.hyperband import HyperBand
from elastic.core.policy.tuning.median import Median
from elastic.core.policy.tuning.pbt import Pbt
from elastic.core.study import (
    ITERATION,
    Study,
    Trial,
    TrialState,
    number_of,
)
from elastic.errors import ConfigError
from elastic.tune import space as spaces

SHRINK, GROW = 0.8, 1.2


class TrialScheduler:
    """Judges trials by their reports.

    Attributes:
        metric, mode: the metric that is compared; None for that of `TuneConfig`.
        time_attr: the metric that measures a trial's progress: a number that increases;
            "training_iteration" and "time_total_s" (seconds since the trial's first job began
            to run) need not be reported.
    """

    needs_checkpoints = False
    """Whether trials need checkpoints to continue; without them they start from the beginning."""
    compares_curves = False
    """Whether it reads all reports of other trials, not only their values at rungs."""

    def __init__(
        self, time_attr: str = ITERATION, metric: str | None = None, mode: str | None = None
    ) -> None:
        """Configure; see the class."""
        if mode not in (None, "min", "max"):
            raise ConfigError(f"{type(self).__name__}: mode={mode!r}: expected 'min' or 'max'")
        self.time_attr, self.metric, self.mode = time_attr, metric, mode

    def bind(self, metric: str, mode: str, seed: int) -> None:
        """Receive the tuner's metric and mode, "" if not set, and the study's seed.

        Raises:
            ConfigError: there is no metric at all, or two different ones.
        """
        for name, ours, theirs in (("metric", self.metric, metric), ("mode", self.mode, mode)):
            if ours and theirs and ours != theirs:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={ours!r}, and TuneConfig has {theirs!r}: give "
                    f"it once"
                )
        self.metric, self.mode, self._seed = self.metric or metric, self.mode or mode or "max", seed
        if not self.metric:
            raise ConfigError(
                f"{type(self).__name__}: no metric to compare trials by: give TuneConfig(metric="
                f"..., mode=...)"
            )

    @property
    def sign(self) -> float:
        """Return the factor that makes greater values better: -1 for mode "min"."""
        return -1.0 if self.mode == "min" else 1.0

    def judge(self, study: Study, trial: Trial) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        return Decision(GO_ON, "")

    def settle(self, study: Study) -> list[tuple[int, Decision[TrialDecision]]]:
        """Return decisions about paused trials, as (trial number, decision)."""
        return []

    def explore(self, trial: Trial, donor: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with which a trial continues from its donor's checkpoint."""
        return dict(donor)

    def _seen(self, trial: Trial, *, with_curve: bool = True) -> TrialProgress:
        curve = []
        for report in trial.reports if with_curve else ():
            at = number_of(report.value(self.time_attr))
            value = number_of(report.metrics.get(self.metric or ""))
            if at is not None and value is not None:
                curve.append((int(at), value * self.sign))
        return TrialProgress(
            trial.number,
            curve,
            trial.rungs,
            trial.is_over or bool(trial.verdict),
            trial.state is TrialState.SUCCEEDED,
            trial.state is TrialState.PAUSED and not trial.verdict,
        )

    def _judged(
        self,
        study: Study,
        trial: Trial,
        judge: Callable[[TrialProgress, Sequence[TrialProgress]], Decision[TrialDecision]],
    ) -> Decision[TrialDecision]:
        """Judge by a policy; a report without the metric changes nothing.

        Raises:
            ConfigError: the report lacks the time_attr.
        """
        newest = trial.reports[-1]
        if number_of(newest.value(self.time_attr)) is None:
            raise ConfigError(
                f"{type(self).__name__}: trial {trial.label} reported {sorted(newest.metrics)} and "
                f"not {self.time_attr!r}, which is its time_attr"
            )
        if number_of(newest.metrics.get(self.metric or "")) is None:
            return Decision(GO_ON, "")
        others = [
            self._seen(other, with_curve=self.compares_curves)
            for other in study.trials
            if other is not trial
        ]
        return judge(self._seen(trial), others)


class FIFOScheduler(TrialScheduler):
    """Every trial runs to its end."""

    def bind(self, metric: str, mode: str, seed: int) -> None:
        """Do nothing: no metric is needed."""


class AsyncHyperBandScheduler(TrialScheduler):
    """ASHA: at each rung, the best fraction of the trials that reached it continues; see `Asha`."""

    def __init__(
        self,
        time_attr: str = ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: int = 100,
        grace_period: int = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
    ) -> None:
        """Configure.

        Args:
            time_attr: see `TrialScheduler`.
            metric: the metric that is compared.
            mode: "min" or "max" is better.
            max_t: progress at which a trial ends.
            grace_period: the first rung; no trial is stopped before it.
            reduction_factor: one of so many trials continues at each rung.
            brackets: number of groups of trials; each starts its rungs one later than the last.
            stop_last_trials: False: a trial that reaches max_t keeps running.
        """
        super().__init__(time_attr, metric, mode)
        _expect(self, "grace_period", grace_period, grace_period >= 1, "at least 1")
        _expect(
            self, "max_t", max_t, max_t >= grace_period, f"at least grace_period={grace_period}"
        )
        _expect(self, "reduction_factor", reduction_factor, reduction_factor >= 2, "at least 2")
        _expect(self, "brackets", brackets, brackets >= 1, "at least 1")
        self._sizes = (int(grace_period), round(reduction_factor), int(max_t), int(brackets))
        self._stops_last = bool(stop_last_trials)

    def judge(self, study: Study, trial: Trial) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        policy = Asha(*self._sizes, sign=self.sign, stops_last=self._stops_last)
        return self._judged(study, trial, policy.judge)


ASHAScheduler = AsyncHyperBandScheduler


class MedianStoppingRule(TrialScheduler):
    """Stops a trial whose best is worse than the median of completed trials; see `Median`."""

    compares_curves = True

    def __init__(
        self,
        time_attr: str = ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        grace_period: float = 1,
        min_samples_required: int = 3,
        min_time_slice: int = 0,
        hard_stop: bool = True,
    ) -> None:
        """Configure.

        Args:
            time_attr: see `TrialScheduler`.
            metric: the metric that is compared.
            mode: "min" or "max" is better.
            grace_period: progress before which no trial is stopped.
            min_samples_required: number of completed trials before which no trial is stopped.
            min_time_slice: accepted as in Ray, where trials take turns; no effect.
            hard_stop: only True is supported: trials are stopped, not paused.
        """
        super().__init__(time_attr, metric, mode)
        _expect(self, "hard_stop", hard_stop, bool(hard_stop), "True")
        self._sizes = (int(grace_period), int(min_samples_required))

    def judge(self, study: Study, trial: Trial) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        return self._judged(study, trial, Median(*self._sizes, sign=self.sign).judge)


class HyperBandScheduler(TrialScheduler):
    """HyperBand: trials of a bracket wait for each other at each rung; see `HyperBand`."""

    needs_checkpoints = True

    def __init__(
        self,
        time_attr: str = ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: int = 81,
        reduction_factor: float = 3,
        stop_last_trials: bool = True,
    ) -> None:
        """Configure; see `AsyncHyperBandScheduler`."""
        super().__init__(time_attr, metric, mode)
        _expect(self, "max_t", max_t, max_t >= 1, "at least 1")
        _expect(self, "reduction_factor", reduction_factor, reduction_factor >= 2, "at least 2")
        _expect(self, "stop_last_trials", stop_last_trials, bool(stop_last_trials), "True")
        self._sizes = (int(max_t), round(reduction_factor))

    def judge(self, study: Study, trial: Trial) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        return self._judged(study, trial, HyperBand(*self._sizes, sign=self.sign).judge)

    def settle(self, study: Study) -> list[tuple[int, Decision[TrialDecision]]]:
        """Return decisions about paused trials."""
        policy = HyperBand(*self._sizes, sign=self.sign)
        seen = [self._seen(trial, with_curve=False) for trial in study.trials]
        return policy.settle(seen, is_exhausted=study.is_exhausted)


class PopulationBasedTraining(TrialScheduler):
    """The worst trials continue from checkpoints of the best with a mutated config; see `Pbt`."""

    needs_checkpoints = True

    def __init__(
        self,
        time_attr: str = ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60,
        burn_in_period: float = 0,
        hyperparam_mutations: Mapping[str, Any] | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        perturbation_factors: tuple[float, float] = (GROW, SHRINK),
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
    ) -> None:
        """Configure.

        Args:
            time_attr: see `TrialScheduler`.
            metric: the metric that is compared.
            mode: "min" or "max" is better.
            perturbation_interval: progress between two comparisons of a trial.
            burn_in_period: progress before the first comparison.
            hyperparam_mutations: key -> a domain, a list or a function that draws new values.
            quantile_fraction: the worst fraction copies from the best fraction; at most 0.5.
            resample_probability: probability that a value is drawn anew rather than perturbed.
            perturbation_factors: a number is multiplied by one of these, at random.
            custom_explore_fn: called with the mutated config; returns the final one.
            log_config: accepted as in Ray; the study's log always has every config.
            require_attrs: accepted as in Ray; a report without `time_attr` is always an error.
            synch: only False is supported: trials do not wait for each other.
        """
        super().__init__(time_attr, metric, mode)
        _expect(self, "synch", synch, not synch, "False")
        is_half = 0 < quantile_fraction <= 0.5
        _expect(self, "quantile_fraction", quantile_fraction, is_half, "above 0, 0.5 at most")
        is_after = perturbation_interval >= 1
        _expect(self, "perturbation_interval", perturbation_interval, is_after, "at least 1")
        if not hyperparam_mutations and custom_explore_fn is None:
            raise ConfigError(
                "PopulationBasedTraining: expected hyperparam_mutations or custom_explore_fn: "
                "nothing would be changed"
            )
        spaces.check(
            {k: v for k, v in (hyperparam_mutations or {}).items() if not callable(v)},
            "hyperparam_mutations",
        )
        self._mutations = dict(hyperparam_mutations or {})
        self._sizes = (int(perturbation_interval), int(burn_in_period), float(quantile_fraction))
        self._resample, self._factors = resample_probability, perturbation_factors
        self._custom = custom_explore_fn

    def judge(self, study: Study, trial: Trial) -> Decision[TrialDecision]:
        """Judge a trial by its newest report."""
        policy = Pbt(*self._sizes, sign=self.sign)
        draw = Random(f"{self._seed}/{trial.number}/{trial.iteration}").random()
        return self._judged(study, trial, lambda seen, others: policy.judge(seen, others, draw))

    def explore(self, trial: Trial, donor: Mapping[str, Any]) -> dict[str, Any]:
        """Return the donor's config with mutated values."""
        random = Random(f"{self._seed}/{trial.number}/{trial.iteration}/config")
        # For a trainer, top-level keys of the mutations apply to its train_loop_config.
        inner = donor.get("train_loop_config")
        is_inner = isinstance(inner, Mapping) and "train_loop_config" not in self._mutations
        config = self._mutated(
            dict(inner if is_inner and inner is not None else donor), self._mutations, random
        )
        if self._custom is not None:
            config = self._custom(config)
        return {**donor, "train_loop_config": config} if is_inner else config

    def _mutated(
        self, config: dict[str, Any], mutations: Mapping[str, Any], random: Random
    ) -> dict[str, Any]:
        changed = dict(config)
        for key, mutation in mutations.items():
            if isinstance(mutation, Mapping) and not spaces.is_grid(mutation):
                changed[key] = self._mutated(dict(config.get(key) or {}), mutation, random)
                continue
            options = list(mutation) if isinstance(mutation, (list, tuple)) else None
            value: Any = config.get(key)
            is_new = random.random() < self._resample or value is None
            if options is not None and value in options and not is_new:
                near = options.index(value) + random.choice((-1, 1))
                changed[key] = options[min(max(near, 0), len(options) - 1)]
            elif is_new or not _is_number(value):
                changed[key] = _drawn(mutation, options, random)
            else:
                grown = value * random.choice(self._factors)
                changed[key] = int(grown) if isinstance(value, int) else grown
        return changed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _drawn(mutation: Any, options: list[Any] | None, random: Random) -> Any:
    if options is not None:
        return random.choice(options)
    if isinstance(mutation, spaces.Domain):
        return mutation.sample(random)
    return mutation() if callable(mutation) else mutation


def _expect(scheduler: TrialScheduler, name: str, value: Any, holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(f"{type(scheduler).__name__}: {name}={value!r}: expected {what}")

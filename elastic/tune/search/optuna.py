"""Search by Optuna's ask-and-tell API: TPE, GP, CMA-ES, NSGA-II and all its other samplers.

Rule: the Optuna study is in memory. On resume it is rebuilt by repeating ask and tell in the order
of the log: with the same seed it continues as if it had not been interrupted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic.core.study import Trial, number_of
from elastic.errors import ConfigError, UsageError
from elastic.tune import space as spaces
from elastic.tune.search import Searcher

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

log = logging.getLogger(__name__)

PLAIN = (bool, int, float, str, type(None))
"""Types of values that Optuna accepts as categories."""
Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any] | None]


class OptunaSearch(Searcher):
    """Proposes configs by an Optuna sampler.

    A space may be a dict, with `tune.choice` of further spaces for conditional parameters, or a
    function of Optuna's trial that calls `trial.suggest_float(...)` and so on, and returns the
    other entries of the config.
    """

    def __init__(
        self,
        space: Space | None = None,
        metric: str | Sequence[str] | None = None,
        mode: str | Sequence[str] | None = None,
        points_to_evaluate: Sequence[Mapping[str, Any]] | None = None,
        sampler: BaseSampler | None = None,
        seed: int | None = None,
        study_name: str | None = None,
        evaluated_rewards: Sequence[float] | None = None,
    ) -> None:
        """Configure; Optuna is imported here.

        Args:
            space: instead of the tuner's param_space.
            metric: instead of `TuneConfig`'s; several for several objectives.
            mode: the mode of each metric.
            points_to_evaluate: parameters that are tried first.
            sampler: one of `optuna.samplers`; None for TPE.
            seed: TPE's seed; None for the study's.
            study_name: name of the Optuna study.
            evaluated_rewards: known values of `points_to_evaluate`, which are then not tried.

        Raises:
            UsageError: Optuna is not installed.
        """
        _optuna()
        several = [metric] if isinstance(metric, str) else list(metric or ())
        modes = [mode] * max(1, len(several)) if isinstance(mode, str) else list(mode or ())
        if wrong := [one for one in modes if one not in ("min", "max")]:
            raise ConfigError(f"OptunaSearch: mode={wrong[0]!r}: expected 'min' or 'max'")
        super().__init__(several[0] if several else None, modes[0] if modes else None)
        self._space, self._metrics, self._modes = space, several, modes
        self._points, self._rewards = list(points_to_evaluate or ()), evaluated_rewards
        self._sampler, self._own_seed, self._name = sampler, seed, study_name
        self._study: Any = None
        self._asked: dict[str, Any] = {}

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Receive the tuner's space and objective, and create the Optuna study.

        Raises:
            ConfigError: there is no metric, or Optuna cannot draw from the space.
        """
        optuna = _optuna()
        self._metrics = self._metrics or ([metric] if metric else [])
        self._modes = self._modes or [mode] * len(self._metrics)
        super().set_space(space, self._metrics[0] if self._metrics else "", mode, seed)
        if not self._metrics:
            raise ConfigError("OptunaSearch: no metric: give TuneConfig(metric=..., mode=...)")
        self._space = self._space if self._space is not None else space
        if not callable(self._space):
            spaces.check(self._space)
            _check(self._space)
        own = seed if self._own_seed is None else self._own_seed
        level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                study_name=self._name,
                directions=["minimize" if one == "min" else "maximize" for one in self._modes],
                sampler=self._sampler or optuna.samplers.TPESampler(seed=own),
            )
        finally:
            optuna.logging.set_verbosity(level)
        if self._rewards is None:
            for point in self._points:
                self._study.enqueue_trial(dict(point))
        else:
            self._add_known()

    def _add_known(self) -> None:
        optuna = _optuna()
        if callable(self._space) or self._rewards is None:
            raise ConfigError("OptunaSearch: evaluated_rewards with a function: expected a dict")
        distributions = {
            "/".join(map(str, path)): _distribution(domain)
            for path, domain in spaces.leaves(self._space)
            if isinstance(domain, spaces.Domain)
        }
        for point, reward in zip(self._points, self._rewards, strict=True):
            self._study.add_trial(
                optuna.trial.create_trial(
                    params=dict(point),
                    distributions={name: distributions[name] for name in point},
                    value=reward,
                )
            )

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return Optuna's next proposal."""
        trial = self._study.ask()
        self._asked[trial_id] = trial
        if callable(self._space):
            constants = self._space(trial) or {}
            return {**trial.params, **constants}
        config = _suggested(self._space, trial, ())
        for path, part in list(spaces.leaves(config)):
            if isinstance(part, spaces.Domain) and part.call is not None:
                config = spaces.put(config, path, part.call(spaces.Drawn(config)))
        return dict(config)

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Ask again; if Optuna now proposes another config, fail it and enqueue the earlier one."""
        now = self.suggest(trial_id)
        if now == config:
            return
        trial = self._asked[trial_id]
        known = spaces.flat(config)
        params = {name: known[name] for name in trial.params if name in known}
        log.warning("optuna_proposes_otherwise trial=%s now=%r then=%r", trial_id, now, config)
        self._study.tell(trial, state=_optuna().trial.TrialState.FAIL)
        self._study.enqueue_trial(params)
        self.suggest(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report a trial's last values to Optuna."""
        trial = self._asked.pop(trial_id, None)
        if trial is None:
            return
        values = [number_of((result or {}).get(metric)) for metric in self._metrics]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if error or len(finite) < len(values):
            self._study.tell(trial, state=_optuna().trial.TrialState.FAIL)
        else:
            self._study.tell(trial, finite)


def study_of(
    trials: Sequence[Trial], metric: str, mode: str, configs: Sequence[Mapping[str, Any]]
) -> Any:
    """Return an Optuna study with a study's trials; trials without a final value count as failed.

    Args:
        trials: the trials, with their reports.
        metric: the metric that is a trial's value.
        mode: "min" or "max".
        configs: the config of each trial.

    Raises:
        UsageError: Optuna is not installed.
    """
    optuna = _optuna()
    states = optuna.trial.TrialState
    rows = [spaces.flat(config) for config in configs]
    tried: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            tried.setdefault(name, []).append(value)
    known = {name: _tried(values) for name, values in tried.items()}
    study = optuna.create_study(direction="minimize" if mode == "min" else "maximize")
    for trial, row in zip(trials, rows, strict=True):
        values = {r.number: number_of(r.metrics.get(metric)) for r in trial.reports}
        numbers = {n: value for n, value in values.items() if value is not None}
        value = trial.value(metric)
        is_good = trial.is_over and value is not None and math.isfinite(value)
        params = {
            name: value if isinstance(value, PLAIN) else str(value) for name, value in row.items()
        }
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions={name: known[name] for name in params},
                intermediate_values=numbers,
                value=value if is_good else None,
                state=states.COMPLETE if is_good else states.FAIL,
            )
        )
    return study


def _tried(values: Sequence[Any]) -> Any:
    """Return the smallest distribution that contains all of these values."""
    distributions = _optuna().distributions
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return distributions.IntDistribution(min(values), max(values))
    if kinds <= {int, float}:
        return distributions.FloatDistribution(min(values), max(values))
    plain = [value if isinstance(value, PLAIN) else str(value) for value in values]
    return distributions.CategoricalDistribution(tuple(dict.fromkeys(plain)))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "tune.search.optuna needs Optuna: pip install 'elastic-torch[tune]'"
        ) from error
    return optuna


def _check(space: Any) -> None:
    """Reject spaces that Optuna does not support; the ConfigError names the path."""
    for path, part in spaces.leaves(space):
        where = "/".join(map(str, path))
        if spaces.is_grid(part):
            raise ConfigError(
                f"OptunaSearch: param_space/{where} is a grid_search: expected tune.choice, or no "
                f"search_alg, which goes through grids"
            )
        if isinstance(part, spaces.Domain):
            if part.kind == "normal":
                raise ConfigError(
                    f"OptunaSearch: param_space/{where} is a tune.randn: Optuna has bounded "
                    f"domains only; expected tune.uniform"
                )
            for option in part.options:
                _check(option)


def _distribution(domain: spaces.Domain) -> Any:
    """Return a domain as an Optuna distribution; a choice must have plain options only."""
    distributions = _optuna().distributions
    if domain.kind == "choice":
        return distributions.CategoricalDistribution(domain.options)
    # Optuna has no steps for log distributions: values are rounded afterwards.
    step = None if domain.log else domain.q
    if domain.kind == "int":
        return distributions.IntDistribution(
            int(domain.low), int(domain.highest), log=domain.log, step=int(step or 1)
        )
    return distributions.FloatDistribution(domain.low, domain.high, log=domain.log, step=step)


def _suggested(space: Any, trial: Any, path: spaces.Path) -> Any:
    if isinstance(space, spaces.Domain):
        return space if space.kind == "call" else _asked(space, trial, path)
    if isinstance(space, Mapping):
        return {key: _suggested(part, trial, (*path, key)) for key, part in space.items()}
    if isinstance(space, (list, tuple)):
        parts = [_suggested(part, trial, (*path, n)) for n, part in enumerate(space)]
        return parts if isinstance(space, list) else tuple(parts)
    return space


def _asked(domain: spaces.Domain, trial: Any, path: spaces.Path) -> Any:
    name = "/".join(map(str, path))
    if domain.kind == "choice":
        if all(type(one) in PLAIN for one in domain.options):
            return trial.suggest_categorical(name, domain.options)
        index = trial.suggest_categorical(name, tuple(range(len(domain.options))))
        return _suggested(domain.options[index], trial, (*path, index))
    bounds = _distribution(domain)
    if domain.kind == "int":
        value = trial.suggest_int(name, bounds.low, bounds.high, step=bounds.step, log=bounds.log)
        return int(domain.rounded(value)) if domain.log else value
    value = trial.suggest_float(name, bounds.low, bounds.high, step=bounds.step, log=bounds.log)
    return domain.rounded(value) if domain.log else value

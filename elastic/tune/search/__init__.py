"""Searchers propose configs: by random and grid search, or by another library.

Rule: searchers are deterministic: the same calls lead to the same proposals. So a study is resumed
by replaying its log into a new searcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from random import Random
from typing import Any

from elastic.errors import ConfigError, UsageError
from elastic.tune import space as spaces


class Exhausted(Exception):
    """Raised by a searcher that has no more configs to propose."""


class Searcher:
    """Proposes configs; the base class of searchers.

    Attributes:
        metric, mode: the objective; set by the tuner if not given.
    """

    learns = True
    """Whether proposals depend on results: then none is made before a trial can run."""

    def __init__(self, metric: str | None = None, mode: str | None = None) -> None:
        """Optimize a metric; None for that of `TuneConfig`."""
        if mode not in (None, "min", "max"):
            raise ConfigError(f"{type(self).__name__}: mode={mode!r}: expected 'min' or 'max'")
        self.metric, self.mode = metric, mode

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Receive the tuner's space and objective, before the first proposal."""
        self.metric, self.mode = self.metric or metric, self.mode or mode

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return a config, or None if it has none now.

        Raises:
            Exhausted: there are no more configs.
        """
        raise NotImplementedError

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Receive a report of a trial."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Receive the end of a trial; `result` is its last report."""

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Repeat an earlier proposal, when a study is resumed.

        Args:
            trial_id: the trial's id.
            config: the earlier proposal, which the new one should equal.
        """
        self.suggest(trial_id)

    @property
    def total(self) -> int | None:
        """Return how many configs it proposes in all, None if it has no limit of its own."""
        return None


class BasicVariantGenerator(Searcher):
    """Grid and random search: each grid combination `num_samples` times, all else drawn at random.

    Each proposal has its own seed, derived from the study's seed and the proposal's number.
    """

    learns = False

    def __init__(
        self,
        *,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: int | None = None,
    ) -> None:
        """Configure; the tuner sets the space.

        Args:
            points_to_evaluate: configs, or parts of them, that are tried first.
            max_concurrent: limit of running trials; 0 for no limit.
            constant_grid_search: accepted as in Ray; grids are always complete here.
            random_state: seed, instead of the study's.
        """
        super().__init__()
        self.max_concurrent = max_concurrent
        self._points = list(points_to_evaluate or ())
        self._random_state = random_state
        self.num_samples = 1
        self._space: Mapping[str, Any] = {}
        self._seed: int = 0
        self._count = 0

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Receive the tuner's space and seed."""
        super().set_space(space, metric, mode, seed)
        self._space = space
        self._seed = seed if self._random_state is None else self._random_state

    @property
    def total(self) -> int | None:
        """Return the number of trials; None for -1 samples, which have no end."""
        if self.num_samples < 0:
            return None
        return self.num_samples * sum(1 for _ in spaces.combinations(self._space))

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return the next config; see `Searcher`."""
        total = self.total
        if total is not None and self._count >= total:
            raise Exhausted
        number, self._count = self._count, self._count + 1
        size = max(1, sum(1 for _ in spaces.combinations(self._space)))
        chosen = next(islice(spaces.combinations(self._space), number % size, None))
        config = spaces.draw(self._space, Random(f"{self._seed}/{number}"), chosen)
        if number < len(self._points):
            config = {**config, **self._points[number]}
        return dict(config)


class ConcurrencyLimiter(Searcher):
    """Limits how many trials of another searcher run at once."""

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        """Limit a searcher.

        Args:
            searcher: proposes the configs.
            max_concurrent: limit of trials that have not ended.
            batch: propose a full batch, then wait until all of it has ended.
        """
        if max_concurrent < 1:
            raise ConfigError(f"ConcurrencyLimiter: max_concurrent={max_concurrent}: expected >= 1")
        super().__init__(searcher.metric, searcher.mode)
        self.searcher, self.max_concurrent, self.batch = searcher, max_concurrent, batch
        self._live: set[str] = set()
        self._is_closed = False

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Pass the tuner's space and objective to the searcher."""
        self.searcher.set_space(space, metric, mode, seed)

    @property
    def total(self) -> int | None:
        """Return the searcher's total."""
        return self.searcher.total

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return a config if the limit allows; see `Searcher`."""
        if self._is_closed or len(self._live) >= self.max_concurrent:
            return None
        config = self.searcher.suggest(trial_id)
        if config is not None:
            self._add(trial_id)
        return config

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Repeat an earlier proposal."""
        self.searcher.takes_again(trial_id, config)
        self._add(trial_id)

    def _add(self, trial_id: str) -> None:
        self._live.add(trial_id)
        self._is_closed = self.batch and len(self._live) >= self.max_concurrent

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Pass a report to the searcher."""
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Release the trial's place, and pass its end to the searcher."""
        self._live.discard(trial_id)
        if not self._live:
            self._is_closed = False
        self.searcher.on_trial_complete(trial_id, result, error)


class Repeater(Searcher):
    """Runs each config of another searcher several times, and reports the mean to it."""

    def __init__(self, searcher: Searcher, repeat: int = 1, set_index: bool = True) -> None:
        """Repeat each config of a searcher.

        Args:
            searcher: proposes the configs; it must have a metric.
            repeat: number of trials per config.
            set_index: add the number of the repetition to the config, as "__trial_index__".
        """
        if repeat < 1:
            raise ConfigError(f"Repeater: repeat={repeat}: expected >= 1")
        super().__init__(searcher.metric, searcher.mode)
        self.searcher, self.repeat, self.set_index = searcher, repeat, set_index
        self._config: Mapping[str, Any] = {}
        self._leader = ""
        self._count = 0
        self._leaders: dict[str, str] = {}
        self._values: dict[str, list[float]] = {}
        self._ended: Counter[str] = Counter()

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Pass the tuner's space and objective to the searcher."""
        self.searcher.set_space(space, metric, mode, seed)
        self.metric = self.searcher.metric

    @property
    def total(self) -> int | None:
        """Return the searcher's total, times the repetitions."""
        total = self.searcher.total
        return None if total is None else total * self.repeat

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return a config, or the last one again; see `Searcher`."""
        if self._count % self.repeat == 0:
            config = self.searcher.suggest(trial_id)
            if config is None:
                return None
            self._config, self._leader = config, trial_id
        index, self._count = self._count % self.repeat, self._count + 1
        self._leaders[trial_id] = self._leader
        return {**self._config, **({"__trial_index__": index} if self.set_index else {})}

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Repeat an earlier proposal."""
        index, self._count = self._count % self.repeat, self._count + 1
        if index == 0:
            bare = {key: v for key, v in config.items() if key != "__trial_index__"}
            self.searcher.takes_again(trial_id, bare)
            self._config, self._leader = bare, trial_id
        self._leaders[trial_id] = self._leader

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Receive the end of a trial; the searcher receives it once all repetitions have ended."""
        leader = self._leaders.get(trial_id)
        if leader is None:
            return
        value = (result or {}).get(self.metric or "")
        if isinstance(value, (int, float)) and not error:
            self._values.setdefault(leader, []).append(float(value))
        self._ended[leader] += 1
        if self._ended[leader] < self.repeat:
            return
        values = self._values.get(leader, [])
        mean = {self.metric or "": sum(values) / len(values)} if values else None
        self.searcher.on_trial_complete(leader, mean, error=not values)


def check_searcher(searcher: Any) -> Searcher:
    """Return the searcher, which has to be a `Searcher`."""
    if not isinstance(searcher, Searcher):
        raise UsageError(
            f"TuneConfig: search_alg is a {type(searcher).__name__}, expected a searcher such as "
            f"tune.search.optuna.OptunaSearch(); searchers of other libraries propose by "
            f"subclassing tune.search.Searcher"
        )
    return searcher

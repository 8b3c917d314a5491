"""Who proposes configs: at random, along grids, or by another library.

Rule: a searcher that is told the same proposes the same, so that a study is gone on with by telling
it again what the study's log says.
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
    """A searcher has nothing more to propose."""


class Searcher:
    """What proposes; the base of one's own.

    Attributes:
        metric, mode: what it searches by; set by the tuner where they were not given.
    """

    def __init__(self, metric: str | None = None, mode: str | None = None) -> None:
        """Search by a metric, None for that of `TuneConfig`."""
        if mode not in (None, "min", "max"):
            raise ConfigError(f"{type(self).__name__}: mode={mode!r}: expected 'min' or 'max'")
        self.metric, self.mode = metric, mode

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Take what the tuner has been given, before the first proposal."""
        self.metric, self.mode = self.metric or metric, self.mode or mode

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return a config, None for not yet.

        Raises:
            Exhausted: there will be no more.
        """
        raise NotImplementedError

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Hear of a report."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Hear of an end; `result` is the trial's last report."""

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Propose what was proposed before; for a study that is gone on with.

        Args:
            trial_id: of then.
            config: what was proposed then; what is proposed now should equal it.
        """
        self.suggest(trial_id)

    @property
    def total(self) -> int | None:
        """Return how many it proposes by itself, None if it never ends."""
        return None


class BasicVariantGenerator(Searcher):
    """Grids in all combinations, and what is not a grid drawn at random, `num_samples` times each.

    Each proposal has a seed of its own, made from that of the study and its number.
    """

    def __init__(
        self,
        *,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            points_to_evaluate: configs, or parts of them, that are tried first.
            max_concurrent: so many trials at once; 0 for no limit.
            constant_grid_search: of Ray; grids are always whole here.
            random_state: seed, in place of the study's.
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
        """Take what the tuner has been given."""
        super().set_space(space, metric, mode, seed)
        self._space = space
        self._seed = seed if self._random_state is None else self._random_state

    @property
    def total(self) -> int | None:
        """Return how many trials there will be; -1 samples are without end."""
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
    """Lets another searcher propose only while fewer than so many trials run."""

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        """Limit a searcher.

        Args:
            searcher: who proposes.
            max_concurrent: at most so many that have not ended.
            batch: wait until all of a batch have ended.
        """
        if max_concurrent < 1:
            raise ConfigError(f"ConcurrencyLimiter: max_concurrent={max_concurrent}: expected >= 1")
        super().__init__(searcher.metric, searcher.mode)
        self.searcher, self.max_concurrent, self.batch = searcher, max_concurrent, batch
        self._live: set[str] = set()
        self._is_closed = False

    def set_space(self, space: Mapping[str, Any], metric: str, mode: str, seed: int) -> None:
        """Take what the tuner has been given."""
        self.searcher.set_space(space, metric, mode, seed)

    @property
    def total(self) -> int | None:
        """Return how many it proposes."""
        return self.searcher.total

    def suggest(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return a config if there is room; see `Searcher`."""
        if self._is_closed or len(self._live) >= self.max_concurrent:
            return None
        config = self.searcher.suggest(trial_id)
        if config is not None:
            self._add(trial_id)
        return config

    def takes_again(self, trial_id: str, config: Any) -> None:
        """Propose what was proposed before."""
        self.searcher.takes_again(trial_id, config)
        self._add(trial_id)

    def _add(self, trial_id: str) -> None:
        self._live.add(trial_id)
        self._is_closed = self.batch and len(self._live) >= self.max_concurrent

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Hear of a report."""
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Hear of an end."""
        self._live.discard(trial_id)
        if not self._live:
            self._is_closed = False
        self.searcher.on_trial_complete(trial_id, result, error)


class Repeater(Searcher):
    """Tries each config of another searcher several times, and tells it the mean."""

    def __init__(self, searcher: Searcher, repeat: int = 1, set_index: bool = True) -> None:
        """Repeat what a searcher proposes.

        Args:
            searcher: who proposes; it must search by a metric.
            repeat: how often each.
            set_index: the config says which repetition it is, as "__trial_index__".
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
        """Take what the tuner has been given."""
        self.searcher.set_space(space, metric, mode, seed)
        self.metric = self.searcher.metric

    @property
    def total(self) -> int | None:
        """Return how many it proposes."""
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
        """Propose what was proposed before."""
        index, self._count = self._count % self.repeat, self._count + 1
        if index == 0:
            bare = {key: v for key, v in config.items() if key != "__trial_index__"}
            self.searcher.takes_again(trial_id, bare)
            self._config, self._leader = bare, trial_id
        self._leaders[trial_id] = self._leader

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Hear of an end; the searcher hears once all repetitions have ended."""
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
    """Return a searcher.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(searcher, Searcher):
        raise UsageError(
            f"TuneConfig: search_alg is a {type(searcher).__name__}, expected a searcher such as "
            f"tune.search.optuna.OptunaSearch(); searchers of other libraries propose by "
            f"subclassing tune.search.Searcher"
        )
    return searcher

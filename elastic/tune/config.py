"""Ray Tune's `TuneConfig`: how a study runs; frozen, and validated when it is constructed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from elastic.core.study import Trial
from elastic.errors import ConfigError
from elastic.train.config_checks import expect, refuse, take_int, take_seconds
from elastic.tune.schedulers import TrialScheduler
from elastic.tune.search import Searcher, check_searcher


@dataclass(frozen=True)
class TuneConfig:
    """The objective, search and limits of a study.

    Attributes:
        metric: the reported number that trials are compared by; None to not compare them.
        mode: "min" or "max": which values of the metric are better.
        search_alg: proposes configs; None for grid and random search.
        scheduler: stops trials early; None to run all to their end.
        num_samples: number of trials; with grids, of trials per combination; -1 for no limit.
        max_concurrent_trials: limit of running trials; None for as many as the cluster has room
            for.
        time_budget_s: seconds after which all trials are stopped.
        trial_name_creator: returns the name that is displayed for a trial; it may read the trial's
            `trainable_name`, `trial_id` and `config`.
        seed: of all random draws; None draws a seed, which the study's log records.
        reuse_actors, chdir_to_trial_dir, trial_dirname_creator: accepted as in Ray, no effect.
    """

    metric: str | None = None
    mode: str | None = None
    search_alg: Searcher | None = None
    scheduler: TrialScheduler | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | timedelta | None = None
    trial_name_creator: Callable[[Trial], str] | None = None
    seed: int | None = None
    reuse_actors: bool | None = None
    chdir_to_trial_dir: bool | None = None
    trial_dirname_creator: Callable[[Trial], str] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are not valid."""
        if self.mode not in (None, "min", "max"):
            refuse(self, "mode", "'min' or 'max'")
        expect(self, "metric", str, "the name of a metric", none=True)
        if self.metric is not None and self.mode is None:
            raise ConfigError(
                f"TuneConfig: metric={self.metric!r} without a mode: expected mode='min' or 'max'"
            )
        whole = "an int >= 1, or -1 for no end"
        take_int(self, "num_samples", whole, low=-1)
        if not self.num_samples:
            refuse(self, "num_samples", whole)
        take_int(self, "max_concurrent_trials", "an int >= 1, or None", low=0, none=True)
        if self.search_alg is not None:
            check_searcher(self.search_alg)
        one = "one of tune.schedulers, such as ASHAScheduler()"
        expect(self, "scheduler", TrialScheduler, one, none=True)
        if isinstance(self.time_budget_s, timedelta):
            object.__setattr__(self, "time_budget_s", self.time_budget_s.total_seconds())
        take_seconds(self, "time_budget_s", "seconds >= 0, or None", zero=True, none=True)


class PlacementGroupFactory:
    """Ray's resources of a trial in bundles; the trial's worker takes their sum.

    Attributes:
        bundles: such as [{"CPU": 1}, {"CPU": 2, "GPU": 1}].
        required_resources: their sum.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK") -> None:
        """Add them up; the `strategy` has no effect, since one worker has all."""
        del strategy
        if not bundles or not all(isinstance(one, Mapping) for one in bundles):
            raise ConfigError(
                f"PlacementGroupFactory: bundles={bundles!r}: expected dicts such as {{'CPU': 1}}"
            )
        self.bundles = [dict(one) for one in bundles]
        names = dict.fromkeys(name for one in self.bundles for name in one)
        self.required_resources = {
            name: sum(one.get(name, 0.0) for one in self.bundles) for name in names
        }

"""When a trial, or the whole study, has had enough: under Ray Tune's names.

Rule: a stopper is told each report once, in order; one that is restored is told them again.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.study import ITERATION
from elastic.errors import ConfigError


class Stopper:
    """The base of one's own."""

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether a trial has had enough, by its newest report."""
        raise NotImplementedError

    def stop_all(self) -> bool:
        """Return whether the study has had enough."""
        return False


class NoopStopper(Stopper):
    """Stops nobody."""

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return False."""
        return False


class FunctionStopper(Stopper):
    """A function of trial and report."""

    def __init__(self, function: Callable[..., bool]) -> None:
        """Ask a function, which may also take the report alone."""
        self._function = function
        self._takes_id = len(inspect.signature(function).parameters) > 1

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return what the function says."""
        return bool(self._function(*((trial_id,) if self._takes_id else ()), result))


class DictStopper(Stopper):
    """A trial ends once one of these metrics is so much or more."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        """Compare with bounds by metric."""
        self._bounds = dict(bounds)

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether one of the bounds is reached."""
        return any(
            isinstance(value := result.get(name), (int, float)) and value >= bound
            for name, bound in self._bounds.items()
        )


class MaximumIterationStopper(Stopper):
    """A trial ends after so many reports."""

    def __init__(self, max_iter: int) -> None:
        """Stop after `max_iter` reports."""
        if max_iter < 1:
            raise ConfigError(f"MaximumIterationStopper: max_iter={max_iter}: expected >= 1")
        self._max_iter = max_iter

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether it has made so many."""
        return bool(result[ITERATION] >= self._max_iter)


class TrialPlateauStopper(Stopper):
    """A trial ends once its metric hardly moves any more."""

    def __init__(
        self,
        metric: str,
        std: float = 0.01,
        num_results: int = 4,
        grace_period: int = 4,
        metric_threshold: float | None = None,
        mode: str | None = None,
    ) -> None:
        """Configure.

        Args:
            metric: what is looked at.
            std: standard deviation below which it stands still.
            num_results: of so many reports.
            grace_period: reports before which nobody is stopped.
            metric_threshold: a trial that is not so good yet is not stopped.
            mode: "min" or "max": what is good; needed with `metric_threshold`.
        """
        if metric_threshold is not None and mode not in ("min", "max"):
            raise ConfigError(
                f"TrialPlateauStopper: mode={mode!r} with a metric_threshold: expected 'min' or "
                f"'max'"
            )
        self._metric = metric
        self._std = std
        self._num = num_results
        self._grace = grace_period
        self._threshold, self._mode = metric_threshold, mode
        self._window: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=num_results))
        self._count: dict[str, int] = defaultdict(int)

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether it stands still."""
        value = result.get(self._metric)
        if not isinstance(value, (int, float)):
            return False
        window = self._window[trial_id]
        window.append(float(value))
        self._count[trial_id] += 1
        if self._count[trial_id] < self._grace or len(window) < self._num:
            return False
        if self._threshold is not None:
            is_far = value > self._threshold if self._mode == "min" else value < self._threshold
            if is_far:
                return False
        return all(map(math.isfinite, window)) and statistics.pstdev(window) < self._std


class ExperimentPlateauStopper(Stopper):
    """The study ends once its best values hardly move any more."""

    def __init__(
        self,
        metric: str,
        std: float = 0.001,
        top: int = 10,
        mode: str = "min",
        patience: int = 0,
    ) -> None:
        """Configure.

        Args:
            metric: what is looked at.
            std: standard deviation below which the best stand still.
            top: so many best values.
            mode: "min" or "max" is good.
            patience: so many further reports that change nothing.
        """
        self._metric = metric
        self._std = std
        self._top = top
        self._mode = mode
        self._timeout, self._still = patience, 0
        self._best: list[float] = []

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Take note of a report."""
        value = result.get(self._metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            self._best = sorted([*self._best, value], reverse=self._mode == "max")[: self._top]
            is_still = len(self._best) == self._top and statistics.pstdev(self._best) <= self._std
            self._still = self._still + 1 if is_still else 0
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether they stand still."""
        return self._still > self._timeout


class TimeoutStopper(Stopper):
    """The study ends after so many seconds."""

    def __init__(self, timeout: float) -> None:
        """Count from now on."""
        self._until = time.monotonic() + float(getattr(timeout, "total_seconds", lambda: timeout)())

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether they are over."""
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether they are over."""
        return time.monotonic() >= self._until


class CombinedStopper(Stopper):
    """Whatever one of several says."""

    def __init__(self, *stoppers: Stopper) -> None:
        """Ask several."""
        self._stoppers = stoppers

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether one says so; all are told."""
        said = [stopper(trial_id, result) for stopper in self._stoppers]
        return any(said)

    def stop_all(self) -> bool:
        """Return whether one says so."""
        return any(stopper.stop_all() for stopper in self._stoppers)


def as_stopper(rule: Any) -> Stopper:
    """Return what `RunConfig(stop=...)` is given as a stopper."""
    if rule is None:
        return NoopStopper()
    if isinstance(rule, Stopper):
        return rule
    return DictStopper(rule) if isinstance(rule, Mapping) else FunctionStopper(rule)

"""Stoppers with Ray Tune's names: end a trial, or the whole study, by its reports.

Rule: a stopper receives each report once, in order. After a restore it receives them again.
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
    """Base class of stoppers."""

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether to stop a trial, by its newest report."""
        raise NotImplementedError

    def stop_all(self) -> bool:
        """Return whether to stop the study."""
        return False


class NoopStopper(Stopper):
    """Never stops a trial."""

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return False for every report."""
        return False


class FunctionStopper(Stopper):
    """Stops a trial when a function of its id and report returns True."""

    def __init__(self, function: Callable[..., bool]) -> None:
        """Use a function of (trial_id, result), or of the result alone."""
        self._function = function
        self._takes_id = len(inspect.signature(function).parameters) > 1

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return the function's value as a bool."""
        return bool(self._function(*((trial_id,) if self._takes_id else ()), result))


class DictStopper(Stopper):
    """Stops a trial once one of these metrics is at least its bound."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        """Use these bounds: metric -> value."""
        self._bounds = dict(bounds)

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether one of the bounds is reached."""
        return any(
            isinstance(value := result.get(name), (int, float)) and value >= bound
            for name, bound in self._bounds.items()
        )


class MaximumIterationStopper(Stopper):
    """Stops a trial after a number of reports."""

    def __init__(self, max_iter: int) -> None:
        """Stop after `max_iter` reports."""
        if max_iter < 1:
            raise ConfigError(f"MaximumIterationStopper: max_iter={max_iter}: expected >= 1")
        self._max_iter = max_iter

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether the trial has made that many reports."""
        return bool(result[ITERATION] >= self._max_iter)


class TrialPlateauStopper(Stopper):
    """Stops a trial once its metric has reached a plateau."""

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
            metric: the metric to watch.
            std: standard deviation below which the metric counts as a plateau.
            num_results: number of newest reports over which it is computed.
            grace_period: number of reports before which no trial is stopped.
            metric_threshold: a trial whose metric is worse than this is not stopped.
            mode: "min" or "max" is better; needed with `metric_threshold`.
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
        """Return whether the trial's metric is on a plateau."""
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
    """Stops the study once its best values have reached a plateau."""

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
            metric: the metric to watch.
            std: standard deviation below which the best values count as a plateau.
            top: number of best values.
            mode: "min" or "max" is better.
            patience: number of further reports for which the plateau must last.
        """
        self._metric = metric
        self._std = std
        self._top = top
        self._mode = mode
        self._timeout, self._still = patience, 0
        self._best: list[float] = []

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Add a report; return whether to stop the study."""
        value = result.get(self._metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            self._best = sorted([*self._best, value], reverse=self._mode == "max")[: self._top]
            is_still = len(self._best) == self._top and statistics.pstdev(self._best) <= self._std
            self._still = self._still + 1 if is_still else 0
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether the plateau has lasted for more than `patience` reports."""
        return self._still > self._timeout


class TimeoutStopper(Stopper):
    """Stops the study after a time, in seconds or as a timedelta."""

    def __init__(self, timeout: float) -> None:
        """Start the timer now."""
        self._until = time.monotonic() + float(getattr(timeout, "total_seconds", lambda: timeout)())

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether the time is over."""
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._until


class CombinedStopper(Stopper):
    """Stops when any of several stoppers does."""

    def __init__(self, *stoppers: Stopper) -> None:
        """Combine these stoppers."""
        self._stoppers = stoppers

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether any stops the trial; all receive the report."""
        stops = [stopper(trial_id, result) for stopper in self._stoppers]
        return any(stops)

    def stop_all(self) -> bool:
        """Return whether any stops the study."""
        return any(stopper.stop_all() for stopper in self._stoppers)


def as_stopper(rule: Any) -> Stopper:
    """Return the value of `RunConfig(stop=...)` as a stopper."""
    if rule is None:
        return NoopStopper()
    if isinstance(rule, Stopper):
        return rule
    return DictStopper(rule) if isinstance(rule, Mapping) else FunctionStopper(rule)

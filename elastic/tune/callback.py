"""Callbacks of a study, with Ray Tune's names; they run in the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.core.study import Trial


class Callback:
    """Base class of callbacks: pass instances as `RunConfig(callbacks=[...])` of the tuner.

    A trial is a `elastic.core.study.Trial`: number, name, config, reports, state. An exception of
    a callback ends the study.
    """

    def setup(self, **info: Any) -> None:
        """Run before the first trial is proposed."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Run after a trial's job was submitted."""

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: dict[str, Any]
    ) -> None:
        """Run on each report of a trial."""

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Run after a trial has ended or was stopped."""

    def on_trial_error(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Run after a trial has failed."""

    def on_experiment_end(self, trials: Sequence[Trial]) -> None:
        """Run after all trials have ended."""


class Callbacks:
    """All callbacks of a study; one that lacks a method is skipped for that event."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Keep the callbacks that have methods for trials."""
        self._callbacks = [one for one in callbacks if is_for_trials(one)]
        self._count = 0

    def call(self, what: str, **named: Any) -> None:
        """Call the method `what` of all callbacks; counts those of trials as `iteration`."""
        if what.startswith("on_trial"):
            self._count += 1
            named["iteration"] = self._count
        for callback in self._callbacks:
            method = getattr(callback, what, None)
            if method is not None:
                method(**named)


def is_for_trials(callback: Any) -> bool:
    """Return whether a callback has methods for trials."""
    return any(hasattr(callback, name) for name in ("on_trial_result", "on_trial_complete"))

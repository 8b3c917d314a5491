"""Callbacks of a study, under Ray Tune's names; called in the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.core.study import Trial


class Callback:
    """The base of one's own: pass it as `RunConfig(callbacks=[...])` of the tuner.

    A trial is a `elastic.core.study.Trial`: number, name, config, reports, state. What a callback
    raises ends the study.
    """

    def setup(self, **info: Any) -> None:
        """Hear of the beginning."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Hear that a trial's job was submitted."""

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: dict[str, Any]
    ) -> None:
        """Hear of a report."""

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Hear that a trial has ended, or was stopped."""

    def on_trial_error(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Hear that a trial has failed."""

    def on_experiment_end(self, trials: Sequence[Trial]) -> None:
        """Hear of the end."""


class Callbacks:
    """All callbacks of a study; those that lack a method do not hear of it."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Tell these."""
        self._callbacks = [one for one in callbacks if is_for_trials(one)]
        self._count = 0

    def tell(self, what: str, **named: Any) -> None:
        """Call a method of all."""
        if what.startswith("on_trial"):
            self._count += 1
            named["iteration"] = self._count
        for callback in self._callbacks:
            method = getattr(callback, what, None)
            if method is not None:
                method(**named)


def is_for_trials(callback: Any) -> bool:
    """Return whether a callback hears of trials."""
    return any(hasattr(callback, name) for name in ("on_trial_result", "on_trial_complete"))

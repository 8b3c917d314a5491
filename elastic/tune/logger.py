"""Ray Tune's interface of loggers: callbacks that see where a trial begins, reports and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.core.study import Trial
from elastic.tune.callback import Callback


class LoggerCallback(Callback):
    """Base class of loggers: a subclass has some of the three methods."""

    def log_trial_start(self, trial: Trial) -> None:
        """Run when a trial begins."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Run on each report of a trial."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Run after a trial has ended."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Call `log_trial_start`."""
        self.log_trial_start(trial)

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: dict[str, Any]
    ) -> None:
        """Call `log_trial_result`."""
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Call `log_trial_end`."""
        self.log_trial_end(trial)

    def on_trial_error(self, iteration: int, trials: Sequence[Trial], trial: Trial) -> None:
        """Call `log_trial_end`, as failed."""
        self.log_trial_end(trial, failed=True)

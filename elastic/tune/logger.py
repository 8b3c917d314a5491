"""Ray Tune's interface of loggers: callbacks that see where a trial begins, reports and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.core.study import Trial
from elastic.storage.files import Files
from elastic.storage.trackers import TrackerSpec, Tracking
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


class _Tracked(LoggerCallback):
    """Exports the reports of each trial, once each, also in a study that goes on.

    Attributes:
        kind: of the tracker, whose file lies in the run directory of the trial.
    """

    kind = ""

    def __init__(self) -> None:
        """Export nothing yet."""
        self._study = ""
        self._open: dict[str, Tracking] = {}

    def setup(self, **info: Any) -> None:
        """Note the directory of the study."""
        self._study = info["experiment_path"]

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Export what was reported."""
        run = trial.attempt.run
        if run not in self._open:
            path = Files(self._study).folder(run).path
            self._open[run] = Tracking(path, TrackerSpec(self.kind))
        self._open[run].turn()

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Export the rest, and close the file."""
        tracking = self._open.pop(trial.attempt.run, None) if trial.attempts else None
        if tracking is not None:
            tracking.turn()
            tracking.close()


class TBXLoggerCallback(_Tracked):
    """Writes the event file of each trial, for `tensorboard --logdir STUDY`."""

    kind = "tensorboard"


class JsonLoggerCallback(_Tracked):
    """Writes `tracked.jsonl` of each trial: a line for each report."""

    kind = "json"

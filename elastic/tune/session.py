"""The functions that a trial's code calls, and the call of its function on a worker."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import cloudpickle

from elastic.storage.files import Files
from elastic.train.checkpoint import Checkpoint
from elastic.train.config import ScalingConfig
from elastic.train.session import (
    UNSAID,
    TrainContext,
    get_checkpoint,
    require_context,
    size_of_trial,
)
from elastic.train.session import report as train_report
from elastic.worker.process.entry import call_with_config

__all__ = ["TuneContext", "get_checkpoint", "get_context", "report"]

SINGLE = "_metric"
"""Ray's name for the metric of a function that returns a number."""
SIZE = "_scaling_config"
"""In the result of a job that asks for one of another size: the ScalingConfig, as JSON text."""


def report(metrics: Mapping[str, Any], *, checkpoint: Checkpoint | None = None) -> None:
    """Report metrics of this trial, and optionally a checkpoint; see `train.report`.

    Without a checkpoint it does not block. If a scheduler or stopper then ends the trial, its
    worker is stopped soon after; later reports do not count.
    """
    train_report(metrics, UNSAID if checkpoint is None else checkpoint)


@dataclass(frozen=True)
class TuneContext(TrainContext):
    """A train context with the names of the study and the trial."""

    def get_experiment_name(self) -> str:
        """Return the study's name."""
        return self.worker.job_name.rpartition("_")[0] or self.worker.job_name

    def get_trial_id(self) -> str:
        """Return the trial's name, study and number, in each of its jobs."""
        return re.sub(r"(_\d{5,})-\d+$", r"\1", self.worker.job_name)

    def get_trial_name(self) -> str:
        """Return the trial's name: study and number."""
        return self.get_trial_id()


def get_context() -> TuneContext:
    """Return the context of this trial.

    Raises:
        UsageError: outside a trial.
    """
    require_context("tune.get_context")
    return TuneContext()


@dataclass(frozen=True)
class Objective:
    """The callable that a worker runs for a trial: its function; reports the return value.

    Attributes:
        function: called with the config.
        parameters_path: (directory, file) of the pickled further arguments, None for none.
        scaling: what the trial's job was submitted with, None if the user has chosen it.
    """

    function: Callable[..., Any]
    parameters_path: tuple[str, str] | None = None
    scaling: ScalingConfig | None = None

    def __call__(self, config: Mapping[str, Any]) -> Any:
        """Run the trial; return what a trainer in it asks for if its job has another size.

        See `size_asked_by`: storage has no part in it, and the job has ended, so that the next one
        may have its directory. UsageError if the return value is not a valid report.
        """
        size = size_of_trial
        size.known, size.asked = self.scaling, None
        try:
            if self.parameters_path is None:
                value = call_with_config(self.function, config)
            else:
                value = self.function(config, **_parameters(*self.parameters_path))
        except BaseException:
            if size.asked is None:
                raise
        finally:
            asked = size.asked
            size.known = size.asked = None
        if asked is not None:
            return {SIZE: json.dumps(asdict(asked), default=float)}
        if isinstance(value, Mapping):
            report(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            report({SINGLE: value})
        return None


def size_asked_by(result: str) -> str:
    """Return the size that a trial's job has asked for by its result, "" for none."""
    value = json.loads(result) if result else None
    return str(value.get(SIZE, "")) if isinstance(value, dict) else ""


@lru_cache(maxsize=1)
def _stored(directory: str, name: str) -> bytes:
    return Files(directory).read(name)


def _parameters(directory: str, name: str) -> dict[str, Any]:
    return dict(cloudpickle.loads(_stored(directory, name)))

"""Hyperparameter search with the API of ray.tune; each trial is a job in the cluster's queue.

This module has names only. Each is loaded on first use, so that importing this package loads
neither torch nor grpc.

What is where:

    a study       tuner, controller (its driver), config, result_grid, experiment (Ray's older
                  interface); its state is `core.study`, as `storage.study_log` has it
    a trial       trials (its job), following (that job), trial_function, trainable (Ray's class),
                  session (what its code calls), taking (another trial's checkpoint)
    rules         space, search/, schedulers (by `core.policy.tuning`), stopper
    callbacks     callback, logger, integration/
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.errors import TuneError
    from elastic.train.checkpoint import Checkpoint
    from elastic.train.config import CheckpointConfig, FailureConfig, RunConfig, SyncConfig
    from elastic.train.result import Result
    from elastic.tune.callback import Callback
    from elastic.tune.config import PlacementGroupFactory, TuneConfig
    from elastic.tune.experiment import ExperimentAnalysis, run
    from elastic.tune.result_grid import ResultGrid
    from elastic.tune.session import (
        TuneContext,
        get_checkpoint,
        get_context,
        report,
    )
    from elastic.tune.space import (
        choice,
        grid_search,
        lograndint,
        loguniform,
        qlograndint,
        qloguniform,
        qrandint,
        qrandn,
        quniform,
        randint,
        randn,
        sample_from,
        uniform,
    )
    from elastic.tune.stopper import Stopper
    from elastic.tune.trainable import Trainable
    from elastic.tune.trial_function import with_parameters, with_resources
    from elastic.tune.tuner import Tuner

_TRAIN = {
    "Checkpoint": "checkpoint",
    "CheckpointConfig": "config",
    "FailureConfig": "config",
    "Result": "result",
    "RunConfig": "config",
    "SyncConfig": "config",
}
_HOME = {
    "Callback": "callback",
    "ExperimentAnalysis": "experiment",
    "ResultGrid": "result_grid",
    "PlacementGroupFactory": "config",
    "Stopper": "stopper",
    "Trainable": "trainable",
    "TuneConfig": "config",
    "TuneContext": "session",
    "Tuner": "tuner",
    "choice": "space",
    "get_checkpoint": "session",
    "get_context": "session",
    "grid_search": "space",
    "lograndint": "space",
    "loguniform": "space",
    "qlograndint": "space",
    "qloguniform": "space",
    "qrandint": "space",
    "qrandn": "space",
    "quniform": "space",
    "randint": "space",
    "randn": "space",
    "report": "session",
    "run": "experiment",
    "sample_from": "space",
    "uniform": "space",
    "with_parameters": "trial_function",
    "with_resources": "trial_function",
}
_SUBMODULES = ("integration", "logger", "schedulers", "search", "stopper")
_NOT_HERE = {
    "CLIReporter": "the table is shown by itself; RunConfig(verbose=0) hides it",
    "JupyterNotebookReporter": "the table is shown by itself; RunConfig(verbose=0) hides it",
}
"""Names of ray.tune that are missing here -> what to use instead; as an ImportError, because `from`
turns others into one without a word."""
__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "ExperimentAnalysis",
    "FailureConfig",
    "PlacementGroupFactory",
    "Result",
    "ResultGrid",
    "RunConfig",
    "Stopper",
    "SyncConfig",
    "Trainable",
    "TuneConfig",
    "TuneContext",
    "TuneError",
    "Tuner",
    "choice",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "report",
    "run",
    "sample_from",
    "uniform",
    "with_parameters",
    "with_resources",
]


def __getattr__(name: str) -> Any:
    """Load a name from its module on first use.

    Raises:
        AttributeError: the package has no such name.
        ImportError: Ray has it, and the message names what to use instead.
    """
    if name == "TuneError":
        return importlib.import_module("elastic.errors").TuneError
    if name in _TRAIN:
        return getattr(importlib.import_module(f"elastic.train.{_TRAIN[name]}"), name)
    if name in _HOME:
        return getattr(importlib.import_module(f"elastic.tune.{_HOME[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"elastic.tune.{name}")
    if name in _NOT_HERE:
        raise ImportError(
            f"elastic.tune.{name}: Ray has it, and there is none here: {_NOT_HERE[name]}"
        )
    raise AttributeError(f"module 'elastic.tune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what can be imported from here."""
    return sorted([*__all__, *_SUBMODULES])

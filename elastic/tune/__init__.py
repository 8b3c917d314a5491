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

from typing import TYPE_CHECKING

from elastic.lazy import lazy_names, refuse_missing

if TYPE_CHECKING:
    from elastic.errors import TuneError as TuneError
    from elastic.train.checkpoint import Checkpoint as Checkpoint
    from elastic.train.config import CheckpointConfig as CheckpointConfig
    from elastic.train.config import FailureConfig as FailureConfig
    from elastic.train.config import RunConfig as RunConfig
    from elastic.train.config import SyncConfig as SyncConfig
    from elastic.train.result import Result as Result
    from elastic.tune.callback import Callback as Callback
    from elastic.tune.config import PlacementGroupFactory as PlacementGroupFactory
    from elastic.tune.config import TuneConfig as TuneConfig
    from elastic.tune.experiment import ExperimentAnalysis as ExperimentAnalysis
    from elastic.tune.experiment import run as run
    from elastic.tune.result_grid import ResultGrid as ResultGrid
    from elastic.tune.session import TuneContext as TuneContext
    from elastic.tune.session import get_checkpoint as get_checkpoint
    from elastic.tune.session import get_context as get_context
    from elastic.tune.session import report as report
    from elastic.tune.space import choice as choice
    from elastic.tune.space import grid_search as grid_search
    from elastic.tune.space import lograndint as lograndint
    from elastic.tune.space import loguniform as loguniform
    from elastic.tune.space import qlograndint as qlograndint
    from elastic.tune.space import qloguniform as qloguniform
    from elastic.tune.space import qrandint as qrandint
    from elastic.tune.space import qrandn as qrandn
    from elastic.tune.space import quniform as quniform
    from elastic.tune.space import randint as randint
    from elastic.tune.space import randn as randn
    from elastic.tune.space import sample_from as sample_from
    from elastic.tune.space import uniform as uniform
    from elastic.tune.stopper import Stopper as Stopper
    from elastic.tune.trainable import Trainable as Trainable
    from elastic.tune.trial_function import with_parameters as with_parameters
    from elastic.tune.trial_function import with_resources as with_resources
    from elastic.tune.tuner import Tuner as Tuner

_OTHER_SEARCH = (
    "elastic.tune.search.optuna.OptunaSearch proposes by Optuna's samplers (TPE, GP, CMA-ES, "
    "NSGA-II), and a subclass of elastic.tune.search.Searcher by what you like"
)
refuse_missing(
    __name__,
    {
        **dict.fromkeys(
            ("CLIReporter", "JupyterNotebookReporter"),
            "the table is shown by itself; RunConfig(verbose=0) hides it",
        ),
        **dict.fromkeys(
            (
                f"search.{name}"
                for name in ("ax", "bayesopt", "bohb", "hebo", "hyperopt", "nevergrad", "zoopt")
            ),
            _OTHER_SEARCH,
        ),
        "integration.pytorch_lightning": (
            "give the Lightning Trainer "
            "callbacks=[elastic.train.lightning.RayTrainReportCallback()], which reports what was "
            "logged with a checkpoint, or call elastic.tune.report(...) in a callback of your own"
        ),
    },
)
__getattr__, __dir__, __all__ = lazy_names(
    __name__, parts=("integration", "logger", "schedulers", "search", "stopper")
)

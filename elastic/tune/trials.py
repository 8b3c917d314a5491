"""Maps trials to jobs: which function a trial's job runs, its name and its config.

Rule: a trial's job is named after study and trial, and its id is logged before it is submitted.
So a restarted driver finds the job, and submits none twice.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from elastic.core.facts import NodePhase
from elastic.core.policy.packing import NodeCapacity
from elastic.core.study import ITERATION, TOTAL_S, LoggedConfig, Trial
from elastic.core.view import NodeView
from elastic.errors import ConfigError, UsageError
from elastic.storage.files import Files
from elastic.train.checkpoint import Checkpoint
from elastic.train.config import RunConfig, ScalingConfig
from elastic.train.config_checks import refuse
from elastic.train.metrics import as_reported
from elastic.train.trainer import DataParallelTrainer, checked
from elastic.tune.session import Objective
from elastic.tune.space import Domain, combinations, draw, grid_search
from elastic.tune.trainable import checkpoints_every, steps
from elastic.tune.trial_function import TrialFunction, parameters_of

if TYPE_CHECKING:
    from elastic.core.config import JobSpec

LOOP = "train_loop_config"
SCALING = "scaling_config"
DATASETS = "datasets"
RUN = "run_config"
PARAMETERS = "parameters.pkl"


class Recipe:
    """Makes the trainer of each trial from the arguments of the tuner.

    Attributes:
        name: name of the trainable.
    """

    def __init__(
        self, trainable: TrialFunction | DataParallelTrainer, run_config: RunConfig, path: str
    ) -> None:
        """Make trainers for the trials of one study, in its directory."""
        self._trainable = trainable
        self._run_config = run_config
        self._path = path
        self._stored: tuple[str, str] | None = None

    def store(self) -> None:
        """Write the parameters that all trials share, once per study.

        Raises:
            StorageError: the file cannot be written.
            UsageError: the parameters cannot be pickled.
        """
        if isinstance(self._trainable, TrialFunction) and self._trainable.parameters:
            Files(self._path).write(PARAMETERS, parameters_of(self._trainable))
            self._stored = (self._path, PARAMETERS)

    def trainer(
        self, run: str, config: Mapping[str, Any], resume_from: str = "", size: str = ""
    ) -> DataParallelTrainer:
        """Return the trainer of a trial, whose job and run directory have this name.

        `resume_from` is the path of another trial's checkpoint, `size` the JSON of the scaling
        config that the function's own trainer asked for, "" for none. UsageError if the config has
        keys or values that a trainer does not accept.
        """
        # Those two are not the run's, but of a class that saves checkpoints.
        checkpoints = replace(
            self._run_config.checkpoint_config, checkpoint_frequency=None, checkpoint_at_end=None
        )
        run_config = replace(
            self._run_config,
            name=run,
            storage_path=self._path,
            checkpoint_config=checkpoints,
            callbacks=(),
            stop=None,
        )
        begins = Checkpoint(resume_from) if resume_from else None
        if isinstance(self._trainable, DataParallelTrainer):
            loop, scaling, datasets = split_config(config)
            one = copy.copy(self._trainable)
            one.train_loop_config = {**(one.train_loop_config or {}), **loop}
            one.scaling_config, one.run_config = scaling or one.scaling_config, run_config
            one.datasets = checked({**one.datasets, **datasets})
            one.resume_from_checkpoint = begins or one.resume_from_checkpoint
            return one
        resources = self._trainable.resources
        chosen = resources(config) if callable(resources) else resources
        scaling = from_json(size) if size and chosen is None else _scaling(chosen)
        return DataParallelTrainer(
            Objective(self._function(), self._stored, scaling if chosen is None else None),
            train_loop_config=dict(config),
            scaling_config=scaling,
            run_config=run_config,
            resume_from_checkpoint=begins,
        )

    def _function(self) -> Callable[..., Any]:
        given = self._trainable.function  # type: ignore[union-attr]
        if not isinstance(given, type):
            return given
        config = self._run_config.checkpoint_config
        frequency, at_end = config.checkpoint_frequency, config.checkpoint_at_end
        return steps(given, checkpoints_every(given, frequency, at_end))


class TrainerParts(NamedTuple):
    """What a config has of a trainer's arguments.

    Attributes:
        loop: updates of the train_loop_config.
        scaling: None for the trainer's own.
        datasets: beside the trainer's own, or in place of them.
    """

    loop: dict[str, Any]
    scaling: ScalingConfig | None
    datasets: dict[str, Any]


def split_config(config: Mapping[str, Any]) -> TrainerParts:
    """Split a config into what it has of a trainer's arguments.

    ConfigError if the scaling_config is none for trials, or there is a run_config, or other keys
    are given beside train_loop_config.
    """
    if RUN in config:
        raise ConfigError(
            f"param_space has {RUN!r}, which is the same for all trials: expected "
            f"Tuner(run_config=RunConfig(...))"
        )
    scaling, datasets = _scaling_of(config), config.get(DATASETS, {})
    if not isinstance(datasets, Mapping):
        raise ConfigError(
            f"param_space[{DATASETS!r}] is a {type(datasets).__name__}; expected a dict by name, "
            f"such as {{'train': tune.choice([...])}}; what the train function takes by this name "
            f"belongs inside of {LOOP!r}"
        )
    rest = {key: v for key, v in config.items() if key not in (LOOP, SCALING, DATASETS)}
    if LOOP not in config:
        return TrainerParts(rest, scaling, dict(datasets))
    if rest:
        raise ConfigError(
            f"param_space has {', '.join(map(repr, sorted(rest)))} beside {LOOP!r}: expected "
            f"everything for the train function inside of {LOOP!r}, or no {LOOP!r} at all"
        )
    return TrainerParts(dict(config[LOOP]), scaling, dict(datasets))


def _scaling_of(config: Mapping[str, Any]) -> ScalingConfig | None:
    scaling = config.get(SCALING)
    if isinstance(scaling, Mapping):
        scaling = ScalingConfig(**scaling)
    if scaling is None:
        return None
    if not isinstance(scaling, ScalingConfig):
        raise ConfigError(
            f"param_space[{SCALING!r}] is a {type(scaling).__name__}; expected a ScalingConfig, or "
            f"tune.choice of several"
        )
    for name in scaling.undrawn:
        refuse(scaling, name, f"a value, where {SCALING} is one of several")
    if not scaling.max_workers:
        refuse(scaling, "num_workers", "1 or more: trials are jobs of their own")
    return scaling


def with_fields(space: Any) -> Any:
    """Return a space in which a scaling_config with fields to draw is a dict of its fields."""
    scaling = space.get(SCALING) if isinstance(space, Mapping) else None
    if not (isinstance(scaling, ScalingConfig) and scaling.undrawn):
        return space
    defaults = vars(ScalingConfig())
    return {**space, SCALING: {k: v for k, v in vars(scaling).items() if v != defaults[k]}}


def most_workers(space: Any) -> int:
    """Return how many workers the largest trial may have; 0 if that is not in the space."""
    if not isinstance(space, Mapping) or SCALING not in space:
        return 0
    enumerated = {**space, SCALING: _as_grids(space[SCALING])}
    configs = (draw(enumerated, Random(0), chosen) for chosen in combinations(enumerated))
    sizes = (scaling.max_workers for config in configs if (scaling := _scaling_of(config)))
    return max(sizes, default=0)


def _as_grids(space: Any) -> Any:
    """Return a space in which each choice is a grid, and each whole number the greatest one."""
    if isinstance(space, Domain) and space.options:
        return grid_search(space.options)
    if isinstance(space, Domain) and space.kind == "int":
        return int(space.rounded(space.highest))
    if isinstance(space, Mapping):
        return {key: _as_grids(part) for key, part in space.items()}
    return space


def from_json(text: str) -> ScalingConfig:
    """Return the scaling config that a trial reported."""
    values = json.loads(text)
    number = values.pop("num_workers")
    return ScalingConfig(
        num_workers=tuple(number) if isinstance(number, list) else number, **values
    )


def _scaling(resources: Any) -> ScalingConfig:
    if isinstance(resources, ScalingConfig):
        return resources
    if resources is None:
        return ScalingConfig()
    resources = getattr(resources, "required_resources", resources)
    if not isinstance(resources, Mapping):
        raise UsageError(
            f"tune.with_resources: {resources!r}: expected a dict such as {{'cpu': 2, 'gpu': 1}}, "
            f"or a ScalingConfig"
        )
    names = {"cpu": "CPU", "gpu": "GPU"}
    others = resources.get("custom_resources", {})
    amounts: dict[str, float] = {
        names.get(str(name), str(name)): float(amount)
        for name, amount in {**resources, **others}.items()
        if name != "custom_resources"
    }
    # Each worker takes a slot, which already counts as one CPU.
    if amounts.get("CPU", 1.0) <= 1.0:
        amounts.pop("CPU", None)
    amounts = {name: amount for name, amount in amounts.items() if amount}
    return ScalingConfig(use_gpu="GPU" in amounts, resources_per_worker=amounts or None)


def room_for(spec: JobSpec, nodes: Sequence[NodeView]) -> int:
    """Return how many jobs of this size fit on the cluster if it ran nothing else; at least 1."""
    workers = 0
    for view in nodes:
        node = NodeCapacity.of(view.node, cordoned=view.cordoned)
        if view.phase is NodePhase.READY and node.matches(spec):
            workers += node.capacity(spec.resources_per_worker)
    return max(1, workers // spec.min_workers)


# ---------------------------------------------------------------------------- configs in the log


def to_log(config: Any) -> dict[str, Any]:
    """Return a config as log fields: JSON, plus a pickle if JSON would lose something."""
    try:
        text = json.dumps(config)
        if json.loads(text) == config and _is_plain(config):
            return {"config": config}
    except (TypeError, ValueError):
        pass
    pickled = base64.b64encode(cloudpickle.dumps(config)).decode()
    return {"config": _shown(config), "pickled": pickled}


def from_log(config: LoggedConfig) -> Any:
    """Return a config of the log; unpickling runs code, as the trainable does."""
    return cloudpickle.loads(base64.b64decode(config.pickled)) if config.pickled else config.shown


def reported(
    trial: Trial, number: int, metrics: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Return a report in the form that stoppers, searchers, callbacks and results have."""
    return {
        **as_reported(metrics),
        ITERATION: number,
        "trial_id": trial.name,
        TOTAL_S: seconds,
        "config": from_log(trial.logged_config),
    }


def _is_plain(value: Any) -> bool:
    # A tuple equals no list, but json.loads(json.dumps(1.0)) == 1 and True == 1.
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _shown(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(part) for part in value]
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else getattr(value, "__name__", repr(value))

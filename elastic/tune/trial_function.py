"""What a study tries: a function, or a class, with what it is given on each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from elastic.errors import UsageError
from elastic.tune.trainable import Trainable
from elastic.worker.process.entry import call_with_config


@dataclass(frozen=True)
class TrialFunction:
    """A function with its extra arguments and the resources of its worker.

    Attributes:
        function: called with a config; or a subclass of `tune.Trainable`.
        parameters: further keyword arguments; stored once for all trials.
        resources: such as {"CPU": 2}, a `ScalingConfig`, or a function of the config.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    resources: Any = None

    @property
    def name(self) -> str:
        """Return the function's name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, config: Mapping[str, Any]) -> Any:
        """Call the function with the config and the parameters."""
        if self.parameters:
            return self.function(config, **self.parameters)
        return call_with_config(self.function, config)


def with_parameters(trainable: Callable[..., Any], **parameters: Any) -> TrialFunction:
    """Bind further keyword arguments, such as data, which are stored once for all trials.

    Raises:
        UsageError: the trainable is not a function.
    """
    one = as_trainable(trainable)
    return TrialFunction(one.function, {**one.parameters, **parameters}, one.resources)


def with_resources(trainable: Callable[..., Any], resources: Any) -> TrialFunction:
    """Set the resources of each trial of a function.

    Args:
        trainable: a function.
        resources: {"cpu": 2, "gpu": 1}, a `ScalingConfig`, or a function of the config that
            returns one of these.

    Raises:
        UsageError: the trainable is a trainer; set its scaling_config instead.
    """
    one = as_trainable(trainable)
    return TrialFunction(one.function, one.parameters, resources)


def as_trainable(trainable: Any) -> TrialFunction:
    """Return a function as a `TrialFunction`.

    Raises:
        UsageError: it is not a function.
    """
    if isinstance(trainable, TrialFunction):
        return trainable
    if isinstance(trainable, type):
        if not issubclass(trainable, Trainable):
            raise UsageError(
                f"tune: {trainable.__name__} is a class; expected a function of a config that "
                f"calls tune.report(...), a subclass of tune.Trainable, or a TorchTrainer"
            )
        return TrialFunction(trainable, resources=trainable.default_resource_request)
    if not callable(trainable):
        raise UsageError(
            f"tune: the trainable is a {type(trainable).__name__}; expected a function of a config "
            f"or a TorchTrainer"
        )
    return TrialFunction(trainable)


def parameters_of(trainable: TrialFunction) -> bytes:
    """Return a trainable's further arguments as a pickle.

    Raises:
        UsageError: they cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(dict(trainable.parameters)))
    except Exception as error:
        raise UsageError(
            f"tune.with_parameters: {', '.join(trainable.parameters)} cannot be sent to workers "
            f"({type(error).__name__}: {error}); create what cannot be pickled inside the function"
        ) from error

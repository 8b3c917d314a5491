"""Ray's settings: `DataContext`, whose settings are the user's alone, and arguments of methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any


class MixStoppingCondition(Enum):
    """When `Dataset.mix` ends."""

    STOP_ON_SHORTEST = "stop_on_shortest"
    STOP_ON_LONGEST_DROP = "stop_on_longest_drop"


class SaveMode(Enum):
    """What `Dataset.write_...` does with the files that are in a folder already."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    IGNORE = "ignore"
    """Write nothing, if there are any."""
    ERROR = "error"


@dataclass(frozen=True)
class RandomSeedConfig:
    """A seed; each epoch has another order, unless `reseed_after_execution` is False."""

    seed: int | None = None
    reseed_after_execution: bool = True


@dataclass(frozen=True)
class FileShuffleConfig(RandomSeedConfig):
    """A seed for the order of files: `read_parquet(path, shuffle=FileShuffleConfig(seed=1))`."""


def seed_of(given: int | RandomSeedConfig | None) -> int:
    """Return a seed; None is 0."""
    return (given.seed if isinstance(given, RandomSeedConfig) else given) or 0


def reseeds(given: int | RandomSeedConfig | None) -> bool:
    """Return whether each epoch is to have another order."""
    return not isinstance(given, RandomSeedConfig) or given.reseed_after_execution


@dataclass
class ExecutionResources:
    """Amounts of Ray's, without effect: there is no object store, and feeders have a number."""

    cpu: float | None = None
    gpu: float | None = None
    object_store_memory: float | None = None
    memory: float | None = None

    @classmethod
    def zero(cls) -> ExecutionResources:
        """Return nothing of each."""
        return cls(0, 0, 0, 0)

    @classmethod
    def for_limits(cls, *amounts: float | None, **named: float | None) -> ExecutionResources:
        """Return these amounts."""
        return cls(*amounts, **named)

    def copy(self, **amounts: float | None) -> ExecutionResources:
        """Return a copy with other amounts."""
        return replace(self, **amounts)


@dataclass
class ExecutionOptions:
    """Options of Ray's, without effect: rows keep their order, and every worker reads its own."""

    resource_limits: ExecutionResources = field(default_factory=ExecutionResources)
    exclude_resources: ExecutionResources = field(default_factory=ExecutionResources)
    locality_with_output: bool | str | Sequence[str] = False
    preserve_order: bool = True
    actor_locality_enabled: bool = True
    verbose_progress: bool | None = None
    label_selector: Mapping[str, str] | None = None


class DataContext(SimpleNamespace):
    """Accepts any setting, such as `execution_options.preserve_order`: order is always kept.

    Workers and feeders of a trainer with datasets have the settings of its driver.
    """

    def __init__(self, **settings: object) -> None:
        """Begin with these settings."""
        super().__init__(**{"execution_options": ExecutionOptions(), **settings})

    def set_config(self, key: str, value: object) -> None:
        """Accept a setting."""
        setattr(self, key, value)

    def get_config(self, key: str, default: object = None) -> object:
        """Return a setting."""
        return getattr(self, key, default)

    @staticmethod
    def get_current() -> DataContext:
        """Return the context of this process."""
        return _current

    @staticmethod
    @contextmanager
    def current(context: DataContext) -> Iterator[DataContext]:
        """Return `context` from `get_current` inside of a `with`."""
        global _current
        before, _current = _current, context
        try:
            yield context
        finally:
            _current = before

    def copy(self, **settings: object) -> DataContext:
        """Return a copy with other settings, which can be changed by themselves."""
        found = copy.deepcopy(self)
        found.__dict__.update(settings)
        return found


def with_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called with the present context, in whatever process."""
    context = DataContext.get_current()

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        with DataContext.current(context):
            return function(*args, **kwargs)

    return called


_current = DataContext()

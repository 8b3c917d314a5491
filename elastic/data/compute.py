"""Ray's sizes for the processes that map batches, which `map_batches(compute=...)` accepts.

Rule: no effect. Rows are computed where they are requested, by as many processes as the iterator
has feeders (`num_feeders`); their order and contents do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import ConfigError


@dataclass(frozen=True)
class TaskPoolStrategy:
    """So many tasks at once; None for no limit."""

    size: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a size below 1."""
        _check(self, "size")


@dataclass(frozen=True)
class ActorPoolStrategy:
    """So many actors, a fixed number or between two; None for no limit."""

    size: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    max_tasks_in_flight_per_actor: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes below 1, or two that contradict each other."""
        for name in ("size", "min_size", "max_size", "max_tasks_in_flight_per_actor"):
            _check(self, name)
        if self.size is not None and (self.min_size is not None or self.max_size is not None):
            raise ConfigError(f"{self}: expected size, or min_size and max_size")
        if self.max_size is not None and (self.min_size or 1) > self.max_size:
            raise ConfigError(f"{self}: expected min_size <= max_size")


def _check(strategy: TaskPoolStrategy | ActorPoolStrategy, name: str) -> None:
    value = getattr(strategy, name)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigError(f"{type(strategy).__name__}: {name}={value!r}: expected an int from 1 on")

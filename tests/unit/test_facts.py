"""Facts are values: equal fields are one fact, sums are exact, and nonsense is refused by name."""

from __future__ import annotations

import dataclasses

from elastic.core import facts
from elastic.errors import ConfigError, UsageError


def test_a_refused_configuration_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, UsageError)
    assert issubclass(ConfigError, ValueError)


def test_every_fact_is_frozen() -> None:
    kinds = [
        kind
        for kind in vars(facts).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == facts.__name__
    ]
    assert len(kinds) >= 10
    assert all(kind.__dataclass_params__.frozen for kind in kinds)

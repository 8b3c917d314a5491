"""What can be imported ahead of a train function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elastic.worker.process.importing import imports_of


class Own:
    """A class of the user's: what its methods use is followed."""

    def method(self) -> Any:
        return np.zeros(1)

    def __call__(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet


def prints_well() -> Any:
    from rich.console import Console

    return Console()


def uses_another(config: dict[str, Any]) -> Any:
    return [prints_well() for _ in config]


def closes_over(own: Own) -> Callable[[], Any]:
    return lambda: own.method()


def imports_nothing() -> None:
    import json  # noqa: F401

    from .nowhere import numpy  # type: ignore[import-not-found] # noqa: F401


def imports_what_is_not_there() -> None:
    import surely_not_installed.part  # type: ignore[import-not-found] # noqa: F401


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (uses_another, ["rich.console", "rich.console.Console"]),
        (functools.partial(uses_another, {}), ["rich.console", "rich.console.Console"]),
        (closes_over(Own()), ["numpy", "pyarrow.parquet"]),
        (Own().method, ["numpy"]),
        (Own(), ["numpy", "pyarrow.parquet"]),
        (imports_nothing, []),
        (imports_what_is_not_there, []),
        (print, []),
    ],
)
def test_installed_modules_are_found_wherever_a_function_uses_them(
    function: Callable[..., Any], found: list[str]
) -> None:
    assert list(imports_of(function)) == found

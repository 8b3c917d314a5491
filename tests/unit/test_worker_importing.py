"""What is imported ahead of a train function: what its workers import before anything else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from torchmetrics import MeanMetric

from elastic.worker.process.entry import pack
from elastic.worker.process.importing import import_all


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """Pickle what is defined here by value, as what a driver's script defines."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Own:
    """A class of the driver's."""

    def method(self) -> Any:
        return np.zeros(1)

    def __call__(self) -> Any:
        return MeanMetric()


def imports_first(config: dict[str, Any]) -> Any:
    """Has text before its imports."""
    import rich.console
    from pyarrow import compute, parquet

    return config, rich.console, compute, parquet


def sets_something_first() -> Any:
    sys.argv.append("")
    import rich.console

    return rich.console


def calls_another() -> Any:
    return sets_something_first(), Own


def closes_over(own: Own) -> Callable[[], Any]:
    return lambda: own.method()


def imports_what_is_not_there() -> None:
    import json  # noqa: F401

    import surely_not_installed.part  # type: ignore[import-not-found] # noqa: F401

    from .nowhere import numpy  # type: ignore[import-not-found] # noqa: F401


FIRST = {"pyarrow:compute", "pyarrow:parquet", "rich.console"}
OF_OWN = {"torchmetrics.aggregation"}  # And numpy, which each spare has.


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (imports_first, FIRST),
        (functools.partial(imports_first, {}), FIRST),
        (sets_something_first, set()),
        (calls_another, OF_OWN),
        (closes_over(Own()), OF_OWN),
        (Own().method, OF_OWN),
        (imports_what_is_not_there, set()),
        (print, set()),
    ],
)
def test_what_is_unpickled_and_imported_first_is_found(
    function: Callable[..., Any], found: set[str]
) -> None:
    assert set(pack(function, None, {}).imports) == found


def test_of_modules_of_the_users_own_count_the_imports_before_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_my_own.py").write_text(
        "import rich.box\nimport sys\nsys.argv\nimport rich.tree\ndef train(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import of_my_own  # type: ignore[import-not-found]

    assert list(pack(of_my_own.train, None, {}).imports) == ["rich.box"]


def test_a_function_is_not_hidden_by_a_module_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hides"
    package.mkdir()
    (package / "__init__.py").write_text("from ._code import run")
    (package / "_code.py").write_text("def run(): return 7")
    (package / "run.py").write_text("raise AssertionError")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import_all(["hides:run", "hides:part", "hides:missing", "missing"])
    assert "hides.part" in sys.modules
    assert sys.modules["hides"].run() == 7

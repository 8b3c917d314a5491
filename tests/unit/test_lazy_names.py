"""Public names of a package are read from its source, wherever Python has it from."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

import pytest

INIT = """
from typing import TYPE_CHECKING
from elastic.lazy import lazy_names

if TYPE_CHECKING:
    from package_in_zip.numbers import ONE as ONE

__getattr__, __dir__, __all__ = lazy_names(__name__, parts=("numbers",))
"""


def test_a_package_in_a_zip_has_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as file:
        file.writestr("package_in_zip/__init__.py", INIT)
        file.writestr("package_in_zip/numbers.py", "ONE = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "packages.zip"))
    package = importlib.import_module("package_in_zip")
    assert package.ONE == 1
    assert package.__all__ == ["ONE"]
    assert dir(package) == ["ONE", "numbers"]

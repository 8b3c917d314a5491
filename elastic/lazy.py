"""Public names of a package, each loaded from its module on first use (PEP 562).

    if TYPE_CHECKING:
        from elastic.train.result import Result as Result

    __getattr__, __dir__, __all__ = lazy_names(__name__)

Rules: a name is written once, in such an import, which the type checker reads, and so do we. What
Ray has and we have not is refused by an ImportError, because `from` turns others into one without
a word.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

_instead: dict[str, str] = {}
"""Names and modules that Ray has and we have not, as they would be called here -> what to use."""


def refuse_missing(package: str, instead: Mapping[str, str]) -> None:
    """Have names and modules of a package refused, with what to use instead."""
    _instead.update({f"{package}.{name}": what for name, what in instead.items()})


def check_missing(name: str) -> None:
    """Refuse a name or module that Ray has and we have not."""
    if name in _instead:
        raise ImportError(
            f"{name}: Ray has it, and there is none here: {_instead[name]} "
            f"(docs/migrate-from-ray.md)"
        )


class ImportGuard:
    """Is asked for a module that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Refuse it, or let Python do so."""
        del path, target
        check_missing(name)


sys.meta_path.append(ImportGuard)  # type: ignore[arg-type]


def lazy_names(
    package: str, *, parts: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its name; the imports with `as` of its `__init__.py` are public.
        parts: modules of the package that can be had by their names, too.
    """
    spec = sys.modules[package].__spec__
    # By its loader, because the file may be in a zip.
    loader: Any = spec and spec.loader
    homes = {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(ast.parse(loader.get_source(package)))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname is not None
    }

    def load(name: str) -> Any:
        if name in homes:
            module, attribute = homes[name]
            return getattr(import_module(module), attribute)
        if name in parts:
            return import_module(f"{package}.{name}")
        check_missing(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted([*homes, *parts]), sorted(homes)

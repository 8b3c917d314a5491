"""What a script imports first, imported before it runs.

Only installed packages, and only up to the first statement that does something: modules of the
script's own may read their rank, `sys.argv`, or what is done before they are imported. The
script runs its import statements all the same, and meets the errors that are passed over here.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
SHARED = frozenset({*sys.stdlib_module_names, "torch", "elastic"})
"""Packages that are never a script's own."""


def put_first(directory: str) -> None:
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def import_ahead(path: str) -> None:
    put_first(str(Path(path).parent))
    for name, parts in _imported_first(path):
        with contextlib.suppress(Exception, SystemExit):
            spec = importlib.util.find_spec(name.partition(".")[0])
            if spec is None:
                continue
            places = [spec.origin] if spec.has_location else spec.submodule_search_locations or []
            if _is_installed(name, places):
                module = importlib.import_module(name)
                for part in parts:  # Some packages import their parts when they are asked for.
                    getattr(module, part, None)


def _imported_first(path: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the modules that a script imports before it does anything else, and what of them."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                found.append((node.module, tuple(alias.name for alias in node.names)))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break  # No text about the script.
    return found


def _is_installed(name: str, places: Iterable[str | None]) -> bool:
    """Return whether a module is installed; what PYTHONPATH has may be the script's own."""
    if name.partition(".")[0] in SHARED:
        return True
    paths = [Path(place) for place in places if place is not None]
    return all(set(INSTALLED).intersection(path.parts) for path in paths)

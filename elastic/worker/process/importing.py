"""What a script imports: whether this library is among it, and what can be imported before it runs.

Ahead are imported only installed packages, and only up to the first statement that does something:
modules of the script's own may read their rank, `sys.argv`, or what is done before they are
imported. The script runs its import statements all the same, and meets the errors that are passed
over here.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
SHARED = frozenset({*sys.stdlib_module_names, "torch", "elastic"})
"""Packages that are never a script's own."""
OUR_NAME = "elastic"
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]*(\.*)[ \t]*(\w*)|import[ \t]+([\w., \t]+))", re.MULTILINE)
"""A line that imports: dots and the first part of a name, or names with commas."""


def put_first(directory: str) -> None:
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def import_ahead(path: str) -> None:
    put_first(str(Path(path).parent))
    for name, parts in _imported_first(path):
        with contextlib.suppress(Exception, SystemExit):
            places = places_of(name)
            if places is not None and _is_installed(name, places):
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


def places_of(name: str) -> list[Path] | None:
    """Return where the first part of a module is: folders of a package, or one file.

    Nothing is imported. None if it is not there; no places if it is in no file.

    Raises:
        ModuleNotFoundError: the name is none.
        ValueError: an imported module does not know where it is from.
    """
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        return None
    # Places may be paths: whatever a script has put into sys.path.
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin is not None else []


def _is_installed(name: str, places: Sequence[Path]) -> bool:
    """Return whether a module is installed; what PYTHONPATH has may be the script's own."""
    if name.partition(".")[0] in SHARED:
        return True
    return all(set(INSTALLED).intersection(path.parts) for path in places)


def uses_us(files: Sequence[Path], folder: Path) -> bool:
    """Return whether a script or package imports this library, or its own modules do.

    Args:
        files: of the script, or of the package that is run.
        folder: where a script's own modules are.
    """
    unread, names, packages = [*files], set[str](), set[Path]()
    while unread:
        file = unread.pop()
        try:
            text = file.read_text(errors="replace")
        except OSError:  # An editor's broken link, or a file that we may not read.
            continue
        for dots, first, several in IMPORT.findall(text):
            if dots:
                package = _package_of(file)
                unread += () if package in packages else modules_of(package)
                packages.add(package)
                continue
            modules = [first] if first else several.split(",")
            for name in (one.strip().partition(".")[0] for one in modules):
                if name == OUR_NAME:
                    return True
                unread += () if name in names else _own_modules(name, folder)
                names.add(name)
    return False


def _own_modules(name: str, folder: Path) -> list[Path]:
    """Return the files of a module or package, none if it is an installed one."""
    found = [one for one in (folder / f"{name}.py", folder / name) if one.exists()]
    if not found:
        # Finders are other people's, and a look at imports must fail no run.
        with contextlib.suppress(Exception):
            places = places_of(name) or []
            found = [] if _is_installed(name, places) else places
    return [file for one in found for file in modules_of(one)]


def _package_of(file: Path) -> Path:
    """Return the folder of the outermost package that a module is in."""
    folder = file.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


def modules_of(place: Path) -> list[Path]:
    """Return the files of a package or module; data may be below a folder of its name."""
    if place.suffix:
        return [place]
    found = sorted(place.glob("*.py"))
    for init in place.glob("*/__init__.py"):
        found += modules_of(init.parent)
    return found

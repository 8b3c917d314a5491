"""What a script or function imports: whether this library is among it, and what can be made ahead.

Ahead are imported only installed packages, and of a script only up to the first statement that does
something: modules of the script's own may read their rank, `sys.argv`, or what is done before they
are imported. The user's code runs its import statements all the same, and meets the errors that are
passed over here.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

INSTALLED = ("site-packages", "dist-packages")
SHARED = frozenset({*sys.stdlib_module_names, "torch", "elastic"})
"""Packages that are never a script's own."""
OF_SPARES = SHARED | {"cloudpickle", "fsspec", "numpy"}
"""Packages that each spare has imported: a job that needs no others can take any spare."""
OUR_NAME = "elastic"
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]*(\.*)[ \t]*(\w*)|import[ \t]+([\w., \t]+))", re.MULTILINE)
"""A line that imports: dots and the first part of a name, or names with commas."""

CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
OF_IMPORTS = frozenset(
    {
        "CACHE",
        "COPY_FREE_VARS",
        "EXTENDED_ARG",
        "GEN_START",
        "IMPORT_FROM",
        "MAKE_CELL",
        "NOP",
        "POP_TOP",
        "RESUME",
        "STORE_DEREF",
        "STORE_FAST",
    }
)
"""What a function's code has before and between its first imports."""


def put_first(directory: str) -> None:
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def import_ahead(path: str) -> None:
    put_first(str(Path(path).parent))
    known: dict[str, bool] = {}
    import_all(name for name in _imported_first(path) if _is_installed_module(name, known))


def import_all(names: Iterable[str]) -> None:
    """Import modules, and parts of modules ("module:part"); errors are left to the user's code."""
    for name in names:
        module_name, _, part = name.partition(":")
        with contextlib.suppress(Exception, SystemExit):
            module = importlib.import_module(module_name)
            # As an import statement does; some packages import their parts when they are asked for.
            if part and not hasattr(module, part):
                importlib.import_module(f"{module_name}.{part}")


def _imported_first(path: str) -> list[str]:
    """Return what a script imports before it does anything else."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                found += [f"{node.module}:{alias.name}" for alias in node.names]
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break  # No text about the script.
    return found


def imports_of(function: Callable[..., Any], modules: Iterable[str]) -> tuple[str, ...]:
    """Return the installed modules that workers import before a function does anything else.

    They are imported where the function is unpickled, by it or by modules of the user's own, and
    by its first statements. Nothing is imported here.
    """
    known: dict[str, bool] = {}
    unread, read = [*modules, *_imported_at_first(function)], set[str]()
    found: list[str] = []
    while unread:
        name = unread.pop()
        if name in read:
            continue
        read.add(name)
        if _is_installed_module(name, known):
            found.append(name)
            continue
        file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        unread += _imported_first(file) if isinstance(file, str) else ()
    return tuple(sorted(n for n in found if _first_part(n) not in OF_SPARES))


def _imported_at_first(function: Any) -> list[str]:
    """Return what a function imports before it does anything else."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    names: list[str] = []
    constants: list[Any] = []
    if not isinstance(function, FunctionType):
        return names
    for step in dis.get_instructions(function):
        if step.opname == "IMPORT_NAME":
            level, parts = constants[-2:]
            if not level:
                names += [f"{step.argval}:{part}" for part in parts or ()] or [step.argval]
        elif step.opname in CONSTANTS:
            constants.append(step.argval)
        elif step.opname not in OF_IMPORTS:
            break
    return names


def _first_part(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _is_installed_module(name: str, known: dict[str, bool]) -> bool:
    """Return whether a module is installed; `known` has the answers for first parts of names."""
    first = _first_part(name)
    if first not in known:
        known[first] = False
        # Finders are other people's, and a look at imports must fail no run.
        with contextlib.suppress(Exception):
            places = places_of(first)
            known[first] = places is not None and _is_installed(first, places)
    return known[first]


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
    """Return whether a script or package imports this library, or its own modules do."""
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

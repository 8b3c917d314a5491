"""The project's own source files, as text and as syntax trees, for the tests that read code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "elastic" / "wire" / "generated"
PYTHON_FOLDERS = ("elastic", "tests", "examples", "bench", "scripts")


def python_files(*folders: str) -> list[Path]:
    """Every hand-written Python file below these folders of the project, sorted."""
    files: list[Path] = []
    for folder in folders or PYTHON_FOLDERS:
        files.extend((ROOT / folder).rglob("*.py"))
    return sorted(file for file in files if GENERATED not in file.parents)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(), filename=str(path))


def where(path: Path, line: int) -> str:
    """A place in the form that editors jump to."""
    return f"{path.relative_to(ROOT)}:{line}"


def module_name(path: Path) -> str:
    """elastic/core/facts.py -> elastic.core.facts; a package's __init__.py -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imported(node: ast.AST, importer: Path) -> list[str]:
    """The dotted names that one statement imports; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = importer.relative_to(ROOT).parent.parts
        base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also inside functions and type checks."""
    return [
        (node.lineno, name)
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in imported(node, path)
    ]


def imports_when_loaded(path: Path) -> list[str]:
    """Dotted names that loading the file imports: not in functions, not for type checkers."""
    return [name for node in _run_when_loaded(parsed(path)) for name in imported(node, path)]


def _run_when_loaded(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _run_when_loaded(child)

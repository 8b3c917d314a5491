"""Private names of torch and Python that code touches stand in the one list of them."""

from __future__ import annotations

import ast

from elastic.worker.base.torch_names import NAMES
from tests.tidy.tree import dotted, parsed, python_files, where

ADAPTERS = (
    "elastic/storage/filesystems.py", "elastic/train/", "elastic/worker/data/stream_source.py",
)  # fmt: skip
"""These touch other libraries, of the versions that pyproject allows, and say so themselves."""


def names_of(tree: ast.AST) -> dict[str, int]:
    """Return private attributes that are read from something, and private names imported."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name: node.lineno for name in names if name.startswith("_")}
    return {name: line for name, line in found.items() if not name.startswith("__")}


def own_names(tree: ast.AST) -> set[str]:
    """Return what code defines: functions, classes, fields, and what methods set of their own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if dotted(node.value) in ("self", "cls") else set()
    return found


def test_every_private_name_that_is_not_ours_is_in_the_list() -> None:
    files = python_files("elastic")
    ours = {name for file in files for name in own_names(parsed(file))}
    listed = {part for one in NAMES for part in one.path.split(".")}
    listed |= {part for one in NAMES for part in one.module.split(".")}
    unlisted = [
        f"{where(file, line)}: {name}"
        for file in files
        if not str(where(file, 0)).startswith(ADAPTERS)
        for name, line in names_of(parsed(file)).items()
        if name not in ours | listed
    ]
    assert unlisted == []

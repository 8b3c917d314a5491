"""Modules and functions that a reader can hold in mind; machine and driver never in one class."""

from __future__ import annotations

import ast

from tests.tidy.tree import parsed, python_files, where

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def test_no_module_is_longer_than_500_lines() -> None:
    wrong = [
        f"{where(path, 1)}: {count} lines, at most {MODULE_LINES_MAX}: find the seam and split it"
        for path in python_files()
        if (count := len(path.read_text().splitlines())) > MODULE_LINES_MAX
    ]
    assert not wrong, "\n".join(wrong)


def test_no_function_is_longer_than_70_lines() -> None:
    wrong = [
        f"{where(path, node.lineno)}: {node.name} has {count} lines, at most {FUNCTION_LINES_MAX}"
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (count := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not wrong, "\n".join(wrong)

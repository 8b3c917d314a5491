"""Tests wait for events with the one deadline of tests/patience.py, and measure no time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, dotted, parsed, python_files, where

PATIENCE = ROOT / "tests" / "patience.py"
SHORT_S = 5
"""What is shorter is no deadline: a pause, or a timeout that a test lets pass."""
CLOCKS = ("time.monotonic", "time.perf_counter", "time.time", "time.process_time")
WAITS = ("join", "wait", "fail_after", "move_on_after", "acquire")
OWN_TIMEOUT = re.compile(r"(DEADLINE|PATIENCE|WAIT|GOODBYE|QUICK|LONG)\w*_S\b|_TIMEOUT_S$")


def test_no_test_has_seconds_of_its_own() -> None:
    wrong = [
        f"{where(path, line)}: {what}"
        for path in python_files("tests")
        if path != PATIENCE
        for line, what in found_in(path)
    ]
    assert not wrong, "\n".join(wrong)


def found_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what to do) for each wait that knows seconds, and for each clock."""
    # What stands for a user's script may be slow on purpose.
    is_test = path.name.startswith("test_")
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Assign) and is_seconds(node.value):
            for target in node.targets:
                if OWN_TIMEOUT.search(dotted(target)) and "HANG" not in dotted(target):
                    yield node.lineno, f"{dotted(target)}: take tests.patience.DEADLINE_S"
        if isinstance(node, ast.Assert) and any(map(is_elapsed, ast.walk(node.test))):
            yield node.lineno, "measures time: wait for what is to happen"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if is_test and name in ("time.sleep", "sleep"):
            yield node.lineno, "sleeps: wait for the event, with tests.patience.wait_for"
        given = [word.value for word in node.keywords if word.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            given += node.args
        if any(map(is_seconds, given)):
            yield node.lineno, f"{name or 'a call'} waits for seconds: tests.patience.DEADLINE_S"
        if name.endswith("mark.timeout"):
            yield node.lineno, "a test has no timeout of its own"


def is_elapsed(node: ast.AST) -> bool:
    """Return whether this is a clock's time minus another."""
    return isinstance(node, ast.BinOp) and any(
        isinstance(side, ast.Call) and dotted(side.func) in CLOCKS
        for side in (node.left, node.right)
    )


def is_seconds(node: ast.expr) -> bool:
    """Return whether this is a number of seconds that somebody waits for in vain."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
        and node.value >= SHORT_S
    )

"""What shows the way through the code names code that is there: walks, answers, package maps."""

from __future__ import annotations

import ast
import re

from tests.tidy.tree import ROOT, parsed

PAGE = ROOT / "docs" / "walks.md"
ANSWERS = ROOT / "docs" / "explain" / "architecture.md"
MAPPED = (
    "agent", "client", "coord", "core", "core/machine", "core/policy", "data", "runtime", "storage",
    "tune", "worker/base", "worker/checkpoint", "worker/data", "worker/engine", "worker/group",
    "worker/process", "worker/reduce", "worker/state",
)  # fmt: skip
"""Packages whose docstring says what is where."""
PLACE = re.compile(r"\b([\w/]+\.py):([\w.]*\w)")
ARROW = re.compile(r"^\s*\w+-?->>\w+: (.*)$")


def is_there(path: str, name: str) -> bool:
    """Whether a file below elastic/ has this function, or this method of a class."""
    file = ROOT / "elastic" / path
    if not file.is_file():
        return False
    body: list[ast.stmt] = parsed(file).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and node.name == part
        ]
        if not found:
            return False
        body = found[-1].body
    return True


def test_every_arrow_names_functions_that_exist() -> None:
    wrong, walks = [], PAGE.read_text().split("\n## ")[1:]
    for walk in walks:
        title, _, text = walk.partition("\n")
        arrows = [match.group(1) for line in text.splitlines() if (match := ARROW.match(line))]
        assert len(arrows) > 10, f"the walk {title!r} of docs/walks.md is told by its arrows"
        for arrow in arrows:
            places = PLACE.findall(arrow)
            if not places:
                wrong.append(f"{title}: {arrow!r} names no file.py:function")
            wrong += [
                f"{title}: elastic/{path} has no {name}: name the function that does it now"
                for path, name in places
                if not is_there(path, name)
            ]
    assert len(walks) == 5
    assert not wrong, "docs/walks.md, " + "\ndocs/walks.md, ".join(wrong)


def test_every_answer_names_functions_that_exist() -> None:
    text = ANSWERS.read_text()
    places = PLACE.findall(text)
    assert len(places) > 10
    wrong = [f"elastic/{path} has no {name}" for path, name in places if not is_there(path, name)]
    files = re.findall(r"`(\w[\w/]+\.py)`", text)
    wrong += [
        f"no file elastic/{path}" for path in files if not (ROOT / "elastic" / path).is_file()
    ]
    assert not wrong, "docs/explain/architecture.md: " + "; ".join(wrong)


def test_a_package_map_names_every_module() -> None:
    for package in MAPPED:
        folder = ROOT / "elastic" / package
        named = re.findall(r"\w+", ast.get_docstring(parsed(folder / "__init__.py")) or "")
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        missing = sorted(modules - {*named})
        assert not missing, (
            f"elastic/{package}/__init__.py does not say where these belong: {missing}"
        )

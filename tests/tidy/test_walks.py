"""docs/walks.md tells of code that is there: every arrow names a function that exists."""

from __future__ import annotations

import ast
import re

from tests.tidy.tree import ROOT, parsed

PAGE = ROOT / "docs" / "walks.md"
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
    assert len(walks) == 4
    assert not wrong, "docs/walks.md, " + "\ndocs/walks.md, ".join(wrong)

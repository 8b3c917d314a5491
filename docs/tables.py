"""Parts of the reference that are read from the code while the pages are built.

    {events}                   every line of the event log: its name and fields
    {figures}                  every metric for Prometheus, who tells it, and what it is
    {docstring} MODULE         a module's docstring, as it stands
    {environment}              the variables that training processes find
    {phases}                   a diagram of each table of legal moves

Also mends what the pages are made of: examples in docstrings, and patterns that match nothing.

Rule: read, never imported where reading is enough; the order is that of the names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from elastic.core.machine import transitions
from elastic.core.machine.transitions import TransitionTable

ROOT = Path(__file__).resolve().parent.parent
PLACE_PARTS = ("core/machine", "agent", "coord")


def note_calls() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(name, fields, file) of every call that writes a line of the event log."""
    for part in PLACE_PARTS:
        for path in sorted((ROOT / "elastic" / part).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if not isinstance(call, ast.Call):
                    continue
                function = call.func
                name = getattr(function, "attr", getattr(function, "id", ""))
                texts = [a for a in call.args if isinstance(a, ast.Constant)]
                if name not in ("note", "_note", "Note") or not texts:
                    continue
                if isinstance(texts[0].value, str) and texts[0].value:
                    fields = tuple(word.arg for word in call.keywords if word.arg)
                    yield texts[0].value, fields, str(path.relative_to(ROOT))


class Events(SphinxDirective):
    """A table of the event log's lines."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        found: dict[str, tuple[set[str], set[str]]] = {}
        for name, fields, file in note_calls():
            known = found.setdefault(name, (set(), set()))
            known[0].update(fields)
            known[1].add(file)
        rows = [
            (f"`{name}`", ", ".join(f"`{f}`" for f in sorted(fields)), ", ".join(sorted(files)))
            for name, (fields, files) in sorted(found.items())
        ]
        return parsed(self, table(("event", "fields", "written in"), rows))


class Figures(SphinxDirective):
    """A table of the metrics for Prometheus."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows = []
        for part, who in (("coord/web", "coordinator"), ("agent", "agent")):
            path = ROOT / "elastic" / part / "figures.py"
            self.env.note_dependency(str(path))
            for call in ast.walk(ast.parse(path.read_text())):
                arguments = call.args if isinstance(call, ast.Call) else []
                texts = [ast.literal_eval(a) for a in arguments if is_text(a)]
                if texts and texts[0].startswith("elastic_"):
                    kind = texts[1] if len(texts) > 2 else "histogram"
                    rows.append((f"`{texts[0]}`", who, kind, texts[-1]))
        return parsed(self, table(("metric", "exported by", "kind", "what it is"), sorted(rows)))


def is_text(node: ast.expr) -> bool:
    """Return whether an argument is a text as it stands."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Environment(SphinxDirective):
    """A table of the variables that `elastic/worker/process/environment.py` sets."""

    def run(self) -> list[nodes.Node]:
        """Return the table: the name, and the expression that gives its value."""
        path = ROOT / "elastic/worker/process/environment.py"
        rows = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and str(key.value).isupper():
                        rows.append((f"`{key.value}`", f"`{ast.unparse(value)}`"))
        return parsed(self, table(("variable", "value"), sorted(rows)))


class Docstring(SphinxDirective):
    """A module's docstring as a literal block."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the block."""
        path = ROOT / (self.arguments[0].replace(".", "/") + ".py")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        self.env.note_dependency(str(path))
        block = nodes.literal_block(text, text)
        block["language"] = "text"
        return [block]


class Phases(SphinxDirective):
    """A diagram of each table of `elastic.core.machine.transitions`, under its own comment."""

    def run(self) -> list[nodes.Node]:
        """Return the diagrams."""
        path = ROOT / "elastic" / "core" / "machine" / "transitions.py"
        body = ast.parse(path.read_text()).body
        self.env.note_dependency(str(path))
        texts = []
        for before, here in pairwise(body):
            if isinstance(before, ast.AnnAssign) and isinstance(here, ast.Expr):
                found = getattr(transitions, ast.unparse(before.target))
                if isinstance(found, TransitionTable) and not found.name.endswith("_SEEN"):
                    texts.append(f"**{found.name}**: {ast.literal_eval(here.value)}")
                    texts.append(f"```{{mermaid}}\n{diagram(found)}\n```")
        return parsed(self, "\n\n".join(texts))


def diagram(found: TransitionTable[Any]) -> str:
    """Return a table of moves as a state diagram; where several may begin, all are shown."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {phase.value}" for phase in found.starts]
    for phase, after in found.moves.items():
        lines += [f"    {phase.value} --> {one.value}" for one in after]
        lines += [] if after else [f"    {phase.value} --> [*]"]
    return "\n".join(lines)


def table(head: tuple[str, ...], rows: list[Any]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def parsed(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    """Return what Markdown in a page becomes."""
    box = nodes.container()
    directive.state.nested_parse(StringList(text.splitlines(), "generated"), 0, box)
    return box.children


def show_code(
    _app: Sphinx, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Let indented blocks of docstrings be code; reStructuredText takes them for quotations."""
    for number in range(len(lines) - 2, 0, -1):
        before, here, after = lines[number - 1 : number + 2]
        if not here.strip() and after.startswith("    ") and before[:1].strip():
            lines[number:number] = ["", "::"]


def drop_unmatched(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave out patterns of the front page that match nothing: others add pages when they like."""
    if page == "index":
        source[0] = "\n".join(
            line
            for line in source[0].splitlines()
            if not line.endswith("*") or any(Path(app.srcdir).glob(f"{line}.md"))
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Let Sphinx know of all this."""
    app.connect("autodoc-process-docstring", show_code, priority=400)
    app.connect("source-read", drop_unmatched)
    app.add_directive("events", Events)
    app.add_directive("figures", Figures)
    app.add_directive("environment", Environment)
    app.add_directive("phases", Phases)
    app.add_directive("docstring", Docstring)
    return {"parallel_read_safe": True}

"""What is written is there: docstrings, links, and every command that a page shows."""

from __future__ import annotations

import ast
import re
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tidy.tree import ROOT, module_name, parsed, python_files, where

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PROGRAMS = {
    "elastic": "elastic.client.cli",
    "elastic-agent": "elastic.agent.cli",
    "elastic-coord": "elastic.coord.cli",
}
FENCED = re.compile(r"^ *```[^\n`]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"^\s*(?:[$#] )?(elastic(?:-agent|-coord)?)((?: +\S+)*)$")
# Side by side with another library's, so no program.
SIDE_BY_SIDE = "migrate-from-"
README_BYTES_MAX = 4096
EXIT_CODES = ("elastic/client/terminal.py", "elastic/agent/cli.py", "elastic/coord/cli.py")
# Commands that have commands of their own.
GROUPS = {
    ("elastic", "tune"),
    ("elastic-coord", "certs"),
    ("elastic-coord", "store"),
    ("elastic-coord", "tokens"),
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Public too, though no package and no page of the reference names them: scripts import them by
# their own names, or `elastic` has them.
IMPORTED_BY_NAME = {
    "elastic.data.aggregate",
    "elastic.data.collate_fn",
    "elastic.data.datasource.filename_provider",
    "elastic.data.datasource.partitioning",
    "elastic.data.datatype",
    "elastic.data.expressions",
    "elastic.testing.local_cluster",
    "elastic.train.accelerate",
    "elastic.train.cluster",
    "elastic.train.devices",
    "elastic.train.huggingface.transformers",
    "elastic.train.lightning",
    "elastic.train.lightning.environment",
    "elastic.train.lightning.files",
    "elastic.train.lightning.fit",
    "elastic.train.lightning.state",
    "elastic.train.lightning.strategy",
    "elastic.train.loaders",
    "elastic.train.remote",
    "elastic.tune.integration.ray_train",
    "elastic.tune.logger",
    "elastic.tune.schedulers",
    "elastic.tune.search",
    "elastic.tune.search.optuna",
}


def api_modules() -> set[str]:
    """Modules whose names are public, so that each function is described there."""
    packages = [path for path in python_files("elastic") if path.name == "__init__.py"]
    reference = (ROOT / "docs" / "reference" / "api.md").read_text()
    exported = {
        node.module or ""
        for path in packages
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and any(alias.asname for alias in node.names)
    }
    return exported | {*re.findall(r"automodule:: (\S+)", reference)} | IMPORTED_BY_NAME


API = api_modules()


def undescribed(path: Path) -> list[tuple[int, str]]:
    """Modules and classes of one file that have no docstring; of the API, functions too."""
    tree = parsed(path)
    missing = []
    is_api = module_name(path) in API
    # An empty package file has nothing to describe.
    if tree.body and not ast.get_docstring(tree):
        missing.append((1, "the module"))

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            # Private names, and magic methods, whose meaning is Python's.
            if node.name.startswith("_"):
                continue
            is_held = isinstance(node, ast.ClassDef) or is_api
            if is_held and not ast.get_docstring(node) and not is_overload(node):
                missing.append((node.lineno, prefix + node.name))
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


def is_overload(node: ast.stmt) -> bool:
    """A further signature, or a property's setter: described where the first one is."""
    decorators = [ast.unparse(item) for item in getattr(node, "decorator_list", [])]
    return any(item.endswith(("overload", ".setter", ".deleter")) for item in decorators)


def commands_shown(page: Path) -> dict[tuple[str, str], set[str]]:
    """(program, subcommand or "") -> the long options that a page shows with it."""
    text = page.read_text()
    lines = [line for block in FENCED.findall(text) for line in joined(block).splitlines()]
    lines += INLINE.findall(FENCED.sub("", text))
    shown: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        match = COMMAND.match(line.split(" # ")[0].rstrip().removesuffix("&").rstrip())
        if not match:
            continue
        # What stands after a bare -- belongs to the user's script.
        words = match.group(2).split(" -- ")[0].split()
        subcommand = words[0] if words and re.fullmatch(r"[a-z][a-z-]*", words[0]) else ""
        if (match.group(1), subcommand) in GROUPS and len(words) > 1:
            subcommand += f" {words[1]}"
        options = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
        shown.setdefault((match.group(1), subcommand), set()).update(options)
    return shown


def joined(block: str) -> str:
    """Put lines that end with a backslash together."""
    return re.sub(r"\\\n\s*", " ", block)


SHOWN = sorted(
    (page.name, program, subcommand, sorted(options))
    for page in PAGES
    for (program, subcommand), options in commands_shown(page).items()
)


def test_everything_public_is_described() -> None:
    wrong = [
        f"{where(path, line)}: {name} of {module_name(path)} has no docstring"
        for path in python_files("elastic")
        for line, name in undescribed(path)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in LINK.findall(page.read_text()):
        file, _, fragment = target.partition("#")
        to = page.parent / file if file else page
        if "://" not in target and not (to.exists() and (not fragment or fragment in headings(to))):
            wrong.append(target)
    assert not wrong, f"{page.name} links to what is not there: {wrong}"


def test_modules_that_the_site_reads_exist() -> None:
    """Nothing else builds the site here: `make docs`."""
    texts = [page.read_text() for page in [*PAGES, *ROOT.glob("docs/*.py")]]
    named = {name for text in texts for name in re.findall(r"\belastic/[\w/]+\.py\b", text)}
    read = {name for text in texts for name in re.findall(r"^```\{docstring\} (\S+)", text, re.M)}
    named |= {name.replace(".", "/") + ".py" for name in read}
    assert len(named) > len(read) > 0
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def headings(page: Path) -> set[str]:
    """The names to which links into a page may lead."""
    return {anchor(line) for line in page.read_text().splitlines() if line.startswith("#")}


def anchor(heading: str) -> str:
    """The name that a page's viewer gives to a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize(
    ("page", "program", "subcommand", "options"),
    SHOWN,
    ids=[f"{page}: {program} {subcommand}".strip() for page, program, subcommand, _ in SHOWN],
)
def test_a_command_that_a_page_shows_exists(
    page: str, program: str, subcommand: str, options: list[str]
) -> None:
    module = PROGRAMS[program]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    arguments = [*subcommand.split(), "--help"]
    done = CliRunner().invoke(import_module(module).main, arguments, prog_name=program)
    assert done.exit_code == 0, f"{page}: {program} {subcommand}: {done.output}"
    missing = [option for option in options if not re.search(rf"{option}\b", done.output)]
    assert not missing, f"{page}: {program} {subcommand} has no {missing}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith(SIDE_BY_SIDE)],
    ids=lambda page: page.name,
)
def test_python_that_a_page_shows_is_python(page: Path) -> None:
    for _, block in PYTHON.findall(page.read_text()):
        ast.parse(textwrap.dedent(block), filename=str(page))


def test_the_readme_is_one_screen() -> None:
    size = len((ROOT / "README.md").read_bytes())
    assert size <= README_BYTES_MAX, f"README.md has {size} bytes: move what is new to docs/"


def test_every_exit_code_is_explained() -> None:
    codes = {
        node.value.value
        for path in EXIT_CODES
        for node in parsed(ROOT / path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if ast.unparse(node.targets[0]).startswith("EXIT_")
    }
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    explained = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert codes == explained


def test_the_glossary_has_each_word_once() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    parts = [re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)[1:] for part in page.split("\n## ")]
    words = [word for part in parts for word in part]
    assert len(words) == len(set(words)) > 100
    assert all(part == sorted(part) for part in parts)

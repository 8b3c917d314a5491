"""One word, one meaning: the words that say nothing, or say it twice, are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, dotted, parsed, python_files, where

INSTEAD = {
    "utils": "the name of what it does",
    "util": "the name of what it does",
    "helper": "the name of what it does",
    "helpers": "the name of what it does",
    "common": "the name of what is shared",
    "misc": "the name of what it does",
    "manager": "agent, driver, or what it really does",
    "master": "coordinator, or rank 0",
    "slave": "worker, or member",
}
# Words that this project once had for things that the field has names for.
PRIVATE = {
    "brought": "what was delivered",
    "carry": "state",
    "desk": "service, or host",
    "digger": "reaper",
    "door": "endpoint, or address",
    "grave": "handle",
    "nap": "suspend",
    "nursery": "script zygote",
    "office": "leader state",
    "pen": "writer",
    "seat": "rank info",
    "telling": "reporting",
    "told": "what was reported",
    "undertaker": "reaper",
    "wish": "request",
}
# torch reads these two under exactly these names.
TORCHS_OWN = {"MASTER_ADDR", "MASTER_PORT", "master_addr", "master_port"}
# Put together here, so that this file does not name what it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME"]) + r")\b")
TEXTS = ("*.py", "*.proto", "*.md", "*.toml", "*.yaml", "*.yml", "*.sh", "Makefile", "Dockerfile*")
OURS = ("elastic", "tests", "examples", "bench", "scripts", "proto", "docker", ".ci")


def words_of(identifier: str) -> list[str]:
    """wait_forGroup2 -> wait, for, group2."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier)
    return [word.lower() for word in spaced.split("_") if word]


def names_given(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a file gives; names that others gave, and we only use, do not count."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def names_in_proto(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        code = re.sub(r'"[^"]*"', "", line.split("//")[0])
        yield from ((number, name) for name in re.findall(r"[A-Za-z_]\w*", code))


def banned(identifier: str) -> str:
    """What is wrong with a name and what to say instead, "" for a good one."""
    if identifier in TORCHS_OWN:
        return ""
    wrong = [word for word in words_of(identifier) if word in INSTEAD]
    return f"{identifier!r} says {wrong[0]!r}; say {INSTEAD[wrong[0]]}" if wrong else ""


def project_texts() -> list[Path]:
    files = [path for pattern in TEXTS for path in ROOT.glob(pattern)]
    for folder in OURS:
        files.extend(path for pattern in TEXTS for path in (ROOT / folder).rglob(pattern))
    return sorted(files)


def test_no_name_says_nothing() -> None:
    given = [
        (path, line, name) for path in python_files() for line, name in names_given(parsed(path))
    ]
    given += [(path, 1, path.stem) for path in python_files()]
    for path in (ROOT / "proto").rglob("*.proto"):
        given += [(path, line, name) for line, name in names_in_proto(path)]
    wrong = [f"{where(path, line)}: {why}" for path, line, name in given if (why := banned(name))]
    assert not wrong, "\n".join(wrong)


def test_everything_has_the_names_of_the_field() -> None:
    named = [(path, 1, path.stem) for path in python_files("elastic")]
    named += [
        (path, line, name)
        for path in python_files("elastic")
        for line, name in names_given(parsed(path))
    ]
    wrong = [
        f"{where(path, line)}: {name!r} says {word!r}; say {PRIVATE[word]}"
        for path, line, name in named
        for word in words_of(name)
        if word in PRIVATE
    ]
    assert not wrong, "\n".join(wrong)


NAMED_OTHERWISE = re.compile(r"elastic/(core/(events/|\w*messages)|errors|data/|train/|tune/)")
"""Classes there say what has happened or is to be done, or have their names from Ray or Arrow."""


def words_of_the_glossary() -> set[str]:
    """Every word that has an entry, or that is listed for names of classes."""
    entries, _, lists = (ROOT / "docs/glossary.md").read_text().partition("## In names of classes")
    words = re.findall(r"^\| ([^|]+) \|", entries, re.MULTILINE)
    words += re.findall(r"^[A-Z][^:]+: (.*?)\.$", lists, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(words)))


def test_each_class_is_named_by_a_word_of_the_glossary() -> None:
    known = words_of_the_glossary()
    wrong = [
        f"{where(path, node.lineno)}: {node.name}: {word!r} is no word of docs/glossary.md"
        for path in python_files("elastic")
        if not NAMED_OTHERWISE.match(path.relative_to(ROOT).as_posix())
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        and node.name[0] != "_"
        and not node.name.endswith("ed")  # What has happened.
        for word in words_of(node.name)[-1:]
        if not known & {word, word.removesuffix("s"), word.removesuffix("es"), word[:-3] + "y"}
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_for_later_in_a_comment() -> None:
    wrong = [
        f"{where(path, number)}: do it, or open an issue and say what holds until then"
        for path in project_texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_shipped_code_checks_instead_of_asserting() -> None:
    wrong = [
        f"{where(path, node.lineno)}: python -O drops assert; use elastic.errors.check"
        for path in python_files("elastic")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, "\n".join(wrong)


def sleeps(node: ast.AST, polling: bool = False) -> Iterator[ast.Call]:
    """Calls that sleep for a time, except inside functions named wait_..., which poll."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from sleeps(child, polling or child.name.startswith("wait_"))
            continue
        if isinstance(child, ast.Call) and not polling:
            name = dotted(child.func).rpartition(".")[2]
            # sleep(0) only lets others run.
            yields = [ast.unparse(value) for value in child.args] == ["0"]
            if name == "sleep" and not yields:
                yield child
        yield from sleeps(child, polling)


def test_tests_wait_for_conditions_and_never_for_time() -> None:
    # What breaks clusters at random moments, and stands for users' slow code, takes its time.
    may_sleep = {ROOT / "tests" / "chaos", ROOT / "tests" / "harness"}
    wrong = [
        f"{where(path, call.lineno)}: wait for a condition, with a deadline, in a function wait_..."
        for path in python_files("tests")
        if not may_sleep & {*path.parents}
        for call in sleeps(parsed(path))
    ]
    assert not wrong, "\n".join(wrong)

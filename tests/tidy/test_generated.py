"""The checked-in stubs are what the protos say, made by the compiler that the script pins."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

import pytest

from scripts.gen_proto import PROTO, ToolsUnavailable, generate, relocate
from tests.tidy.tree import GENERATED, ROOT

PROTOS = sorted(PROTO.rglob("*.proto"))


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.suffix in {".py", ".pyi"}
    }


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    if not PROTOS:
        pytest.skip("no protos yet")
    try:
        generate(tmp_path / "generated")
    except ToolsUnavailable as unavailable:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"cannot make the stubs here: {unavailable}")
    fresh, ours = contents(tmp_path / "generated"), contents(GENERATED)
    stale = sorted(name for name in fresh.keys() | ours if fresh.get(name) != ours.get(name))
    assert not stale, f"run `make proto` and commit the result; these differ: {stale}"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.relative_to(PROTO).as_posix())
def test_a_proto_declares_the_package_of_its_folder(proto: Path) -> None:
    # The descriptor pool is one for the whole process: names of ours must be ours alone.
    declared = re.search(r"^package ([\w.]+);", proto.read_text(), re.MULTILINE)
    assert declared
    assert declared.group(1) == ".".join(proto.parent.relative_to(PROTO).parts)


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in GENERATED.rglob("*_pb2.py")
    ],
)
def test_a_generated_module_can_be_imported_where_it_is(module: str) -> None:
    assert import_module(module).DESCRIPTOR.package.startswith("elastic.")


def test_only_imports_of_our_own_stubs_are_moved() -> None:
    before = (
        "from google.protobuf import descriptor as _descriptor\n"
        "from elastic.v1 import records_pb2 as elastic_dot_v1_dot_records__pb2\n"
    )
    after = before.replace("from elastic.v1", "from elastic.wire.generated.elastic.v1")
    assert relocate(before) == after

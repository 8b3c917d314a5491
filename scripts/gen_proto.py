"""Make the Python stubs in elastic/wire/generated from proto/**/*.proto.

Rule: the output depends on the protos and on one pinned compiler, on nothing else, so that a test
can make it again and compare (tests/tidy/test_generated.py). The compiler wants another protobuf
than the one we run with; it is therefore installed apart, under .cache, and never imported here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
OUTPUT = ROOT / "elastic" / "wire" / "generated"
PACKAGE = "elastic.wire.generated"
# Stubs of a newer compiler are refused by the older runtimes that pyproject.toml allows.
COMPILER = ("grpcio-tools==1.66.2", "protobuf==5.29.*")
# The compiler is a module in C: each Python needs its own.
TOOLS = ROOT / ".cache" / f"grpcio-tools-1.66.2-{sys.implementation.cache_tag}"


class ToolsUnavailable(Exception):
    """The pinned compiler cannot be installed here; the message is pip's."""


def install_tools(tools: Path) -> None:
    """Install the compiler into the folder `tools`, once; a half-done folder is never left there.

    Raises:
        ToolsUnavailable: pip found no wheel for this Python, or no network.
    """
    if tools.exists():
        return
    tools.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tools.parent) as scratch:
        target = Path(scratch) / "tools"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # From source the compiler would take ten minutes: wheels, or not at all.
        command = [*pip, "--only-binary", ":all:", "--target", str(target), *COMPILER]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ToolsUnavailable(f"{' '.join(COMPILER)}: {done.stderr.strip()}")
        try:
            target.rename(tools)
        except OSError:
            if not tools.exists():  # Otherwise another process was faster: the same files.
                raise


def compile_protos(proto_root: Path, output: Path, tools: Path) -> None:
    """Run protoc over every file below `proto_root`, writing below `output`.

    Raises:
        RuntimeError: protoc refused a file; the message is its own.
    """
    names = [str(file.relative_to(proto_root)) for file in sorted(proto_root.rglob("*.proto"))]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={proto_root}"]
    done = subprocess.run(
        [*protoc, f"--python_out={output}", f"--pyi_out={output}", *names],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tools)},
    )
    if done.returncode:
        raise RuntimeError(f"protoc refused {', '.join(names)}:\n{done.stderr.strip()}")


def relocate(text: str) -> str:
    """Point what one generated file says about other generated files at our package.

    protoc derives Python modules from the paths of the protos: elastic/v1/x.proto would be
    elastic.v1.x_pb2. Names in the wire format and in the descriptor pool stay as they are.
    """
    text = re.sub(
        r"^from (elastic(?:\.\w+)*) import", rf"from {PACKAGE}.\1 import", text, flags=re.M
    )
    return re.sub(r"(DESCRIPTOR, ')(elastic(?:\.\w+)*_pb2')", rf"\1{PACKAGE}.\2", text)


def finish(output: Path) -> None:
    """Rewrite the imports below `output` and make every folder a package."""
    for path in sorted([*output.rglob("*.py"), *output.rglob("*.pyi")]):
        path.write_text(relocate(path.read_text()))
    folders = [output, *(path for path in output.rglob("*") if path.is_dir())]
    for folder in sorted(folders):
        where = folder.relative_to(output).as_posix()
        source = "proto/" if where == "." else f"proto/{where}/"
        (folder / "__init__.py").write_text(
            f'"""Made from {source} by scripts/gen_proto.py; do not edit."""\n'
        )


def replace(output: Path, fresh: Path) -> None:
    """Make `output` hold what `fresh` holds; files that are equal already stay untouched."""
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in sorted(output.rglob("*")):
        if path.is_file() and path.relative_to(output) not in wanted:
            path.unlink()
    for name in sorted(wanted):
        target, content = output / name, (fresh / name).read_bytes()
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def generate(output: Path, *, proto_root: Path = PROTO, tools: Path = TOOLS) -> None:
    """Make all stubs below `output`; whatever else is there is removed.

    Raises:
        ToolsUnavailable: the compiler cannot be installed.
        RuntimeError: protoc refused a file; `output` is then as it was.
    """
    install_tools(tools)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "generated"
        fresh.mkdir()
        compile_protos(proto_root, fresh, tools)
        finish(fresh)
        replace(output, fresh)


def main() -> int:
    """Generate, and say where; exit 1 with one line if that is not possible."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder; holds nothing else")
    output: Path = parser.parse_args().output
    try:
        generate(output)
    except (ToolsUnavailable, RuntimeError) as error:
        print(f"gen_proto: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(list(output.rglob('*_pb2*.py')))} modules to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The house as CONTRIBUTING.md draws it, held against the imports that are really there.

Every import counts: at the top, inside a function, or for the type checker only.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tidy.tree import (
    ROOT,
    dotted,
    imports,
    imports_when_loaded,
    module_name,
    parsed,
    python_files,
    where,
)

BELOW = {"errors", "core", "lazy", "version"}
DRIVERS = {"store", "wire", "runtime", "storage"}
PROCESSES = {"coord", "agent", "worker", "client"}
# What each part of the house may import, itself aside. A part that is not here has no place yet.
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "version": set(),
    "core": {"errors"},
    "store": BELOW,
    "wire": BELOW,
    "runtime": BELOW,
    "storage": BELOW,
    "agent": BELOW | {"wire", "runtime"},
    "worker": BELOW | {"wire", "runtime", "storage"},
    "client": BELOW | {"wire", "runtime", "storage"},
    # The page has the texts of the commands.
    "coord": BELOW | DRIVERS | {"client"},
    "data": BELOW | DRIVERS | PROCESSES,
    "train": BELOW | DRIVERS | PROCESSES | {"data"},
    "tune": BELOW | DRIVERS | PROCESSES | {"data", "train"},
    "testing": BELOW | DRIVERS | PROCESSES | {"data", "train", "tune"},
}
# They use the package, and are not in its wheel.
OUTSIDE = ("tests", "bench", "examples", "scripts")
# Inside core: facts know no decisions, decisions know no machines.
CORE_RINGS = ("facts", "policy", "machine")
# Inside worker: each package may import those before it.
WORKER_RINGS = ("base", "group", "state", "reduce", "data", "checkpoint", "engine", "process")

# Heavy or delicate packages, and the modules that may touch them. A name stands for itself and
# all below it; a trailing * stands for modules whose name begins so.
ONLY_IN = {
    "torch": ("elastic.worker", "elastic.train", "elastic.data", "elastic.tune"),
    # Not in a worker: DataLoader forks, and gRPC does not survive that well.
    "grpc": ("elastic.runtime", "elastic.store.etcd*", "elastic.coord.server*", "elastic.client"),
    # The codec turns messages into facts at the door. The two ends of an RPC need the service
    # stubs beside it, and the etcd client speaks messages that no one else sees.
    "elastic.wire.generated": (
        "elastic.wire",
        "elastic.store.etcd*",
        "elastic.coord.server*",
        "elastic.client",
    ),
}
# The one exception to "store, wire and runtime do not know each other".
STATED = {("elastic.store.etcd*", "elastic.wire.generated")}

# What core may use of the standard library: no IO, clock, randomness, threads, loops, logging.
PURE = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "errno", "fractions",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "signal",
    "string", "struct", "types", "typing", "zlib",
}  # fmt: skip
# hash() and id() differ between two runs of one seed; of signal, core needs numbers and names.
IMPURE_CALLS = {
    "open", "print", "input", "hash", "id", "exec", "eval", "breakpoint",
    "signal.signal", "signal.alarm", "signal.setitimer", "signal.raise_signal", "signal.pause",
}  # fmt: skip

# A process starts here, so here its environment is read; it travels on as an argument.
READS_ENVIRONMENT = {"cli.py", "main.py", "__main__.py"}
ENVIRONMENT_READERS: dict[str, str] = {
    "elastic/train/cluster.py": "elastic.init: the process is the user's script, and starts here",
    "elastic/train/local_run.py": "a run in the user's process puts back what it has set",
    "elastic/train/overruled.py": "a worker's own variables say how large its job may be",
    "elastic/worker/process/import_zygote.py": "notices what asks for a place during imports",
    "elastic/worker/process/early_run.py": "notices when user code asks for its place early",
    "elastic/agent/doctor.py": "elastic-agent doctor: a process starts here",
    "elastic/client/embedded.py": "hands on what is not said of the daemons of other clusters",
    "elastic/testing/local_cluster.py": "hands its own environment on to the daemons it starts",
    "elastic/worker/process/validation_process.py": "a process starts here",
    "elastic/worker/process/tracking_process.py": "a process starts here",
    "elastic/worker/process/program.py": "hands its environment on to the program",
    "elastic/worker/process/local.py": "a run without an agent",
    "elastic/coord/__init__.py": "sets what gRPC reads at its import, unless a user has set it",
}

MODULES = {module_name(path): path for path in python_files("elastic")}


def matches(name: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern or name.startswith(pattern + ".")


def part_of(name: str) -> str:
    """The part of the house that a dotted name below elastic belongs to."""
    return name.split(".")[1]


def ring_of(name: str) -> int:
    """How far out in its part of the house a module is."""
    second, third = [*name.split("."), "", ""][1:3]
    rings = WORKER_RINGS if second == "worker" else CORE_RINGS
    return rings.index(third) if third in rings else 0


def refusal(importer: str, target: str) -> str:
    """Why `importer` must not import `target` of ours; "" if it may."""
    if target.split(".")[0] in OUTSIDE:
        return "that is not in the wheel"
    ours, theirs = part_of(importer), part_of(target)
    if ours not in MAY_IMPORT:
        return f"{ours}/ has no place in the table of tests/tidy/test_layers.py"
    if ours == theirs:
        outward = ours in ("core", "worker") and ring_of(target) > ring_of(importer)
        return " < ".join(WORKER_RINGS if ours == "worker" else CORE_RINGS) if outward else ""
    if any(matches(importer, who) and matches(target, what) for who, what in STATED):
        return ""
    return "" if theirs in MAY_IMPORT[ours] else f"{ours} stands on {sorted(MAY_IMPORT[ours])}"


def test_imports_point_only_downward() -> None:
    wrong = [
        f"{where(path, line)}: {name} imports {target}: {why}"
        for name, path in MODULES.items()
        if name != "elastic"
        for line, target in imports(path)
        if "." in target
        and target.split(".")[0] in ("elastic", *OUTSIDE)
        and (why := refusal(name, target))
    ]
    assert not wrong, "\n".join(wrong)


def module_of(target: str) -> str:
    """The module of ours that a dotted name is in or names, "" for others' names."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target


def test_no_imports_form_a_circle() -> None:
    """What two modules need of each other belongs into one, or below both."""
    needs = {
        name: {module for _, target in imports(path) if (module := module_of(target)) != name}
        for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(f"each imports the one before it: {', '.join(error.args[1])}")


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_stay_in_their_rooms(package: str) -> None:
    wrong = [
        f"{where(path, line)}: {name} imports {target}; {package} is for {ONLY_IN[package]}"
        for name, path in MODULES.items()
        for line, target in imports(path)
        if matches(target, package) and not any(matches(name, room) for room in ONLY_IN[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_core_uses_only_the_pure_part_of_the_standard_library() -> None:
    wrong = [
        f"{where(path, line)}: {target} is not pure (see PURE in tests/tidy/test_layers.py)"
        for path in [*python_files("elastic/core"), ROOT / "elastic" / "errors.py"]
        for line, target in imports(path)
        if target.split(".")[0] not in PURE | {"elastic"}
    ]
    assert not wrong, "\n".join(wrong)


def test_core_calls_nothing_that_differs_from_run_to_run() -> None:
    wrong = [
        f"{where(path, node.lineno)}: {dotted(node.func)}() has no place in core"
        for path in python_files("elastic/core")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS
    ]
    assert not wrong, "\n".join(wrong)


def environment_reads(path: Path) -> list[int]:
    """Lines that read an environment variable; setting one is no reading."""
    tree = parsed(path)
    sets: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            sets.add(node.value)
        if isinstance(node, ast.Attribute) and node.attr == "update":
            sets.add(node.value)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and dotted(node) in {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
        and node not in sets
    ] + [
        line
        for line, target in imports(path)
        if target in {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
    ]


def test_the_environment_is_read_only_where_a_process_starts() -> None:
    wrong = [
        f"{where(path, line)}: reads the environment; pass the value in from cli.py or main.py"
        for path in MODULES.values()
        if path.name not in READS_ENVIRONMENT
        and path.relative_to(ROOT).as_posix() not in ENVIRONMENT_READERS
        for line in environment_reads(path)
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(name: str) -> dict[str, str]:
    """Everything that loading a module of ours loads in the end -> the module that asks for it."""
    found: dict[str, str] = {}
    waiting = [name]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        # Loading a.b.c loads a and a.b too.
        parts = current.split(".")
        waiting.extend(".".join(parts[:count]) for count in range(1, len(parts)))
        for target in imports_when_loaded(MODULES[current]):
            found.setdefault(target, current)
            waiting.extend([target, target.rpartition(".")[0]])
    return found


@pytest.mark.parametrize(
    ("parts", "package"),
    [
        (BELOW | DRIVERS | {"coord", "agent", "client"}, "torch"),
        # A training script imports train, and a training script runs in a worker.
        ({"worker", "data", "train"}, "grpc"),
        (BELOW, "google"),
    ],
    ids=["daemons-without-torch", "workers-without-grpc", "core-without-protobuf"],
)
def test_loading_a_part_does_not_load_what_it_must_live_without(
    parts: set[str], package: str
) -> None:
    wrong = [
        f"loading {name} loads {target}, asked for by {asker}"
        for name in MODULES
        if name != "elastic" and part_of(name) in parts
        for target, asker in loaded_by(name).items()
        if matches(target, package)
    ]
    assert not wrong, "\n".join(wrong)

"""What a fresh interpreter really loads; test_layers.py says the same of the source, line by line.

Loaded modules are counted, not seconds: `import elastic` is fast because it loads nothing heavy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.tidy.tree import ROOT

TORCH = {"torch"}
GRPC = {"grpc"}
HEAVY = {"torch", "grpc", "google.protobuf", "numpy", "asyncio", "click", "rich", "fsspec"}
# What runs or is imported -> what must not come with it.
NEVER_LOADED = {
    "elastic": HEAVY,
    "elastic.errors": HEAVY,
    "elastic.coord.cli": TORCH,
    "elastic.agent.cli": TORCH,
    "elastic.client.cli": TORCH,
    # Training scripts run in workers, and a worker holds no gRPC: it does not survive forks well.
    "elastic.worker.process.main": GRPC,
    "elastic.train": GRPC,
    "elastic.tune": TORCH | GRPC,
    "elastic.tune.session": GRPC,
    # A driver waits for whatever it imports, and no sharded tensor will ever be in it.
    "elastic.train.torch": GRPC
    | {"accelerate", "lightning", "transformers", "torch.distributed.tensor"},
}


def loaded_with(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after one statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("module", [name for name in NEVER_LOADED if exists(name)])
def test_importing_a_module_leaves_heavy_packages_alone(module: str) -> None:
    assert not loaded_with(f"import {module}") & NEVER_LOADED[module]


def test_the_public_names_are_complete_sorted_and_there() -> None:
    import elastic

    assert elastic.__all__ == sorted(elastic.__all__)
    assert set(elastic.__all__) <= set(dir(elastic))


def test_an_unknown_name_is_refused_as_python_does() -> None:
    import elastic

    with pytest.raises(AttributeError, match="module 'elastic' has no attribute 'nothing_such'"):
        _ = elastic.nothing_such

"""Mutation testing: plausible bugs that are planted into the state machines.

A checker that never fails proves nothing; these bugs prove that the checkers work. The invariants
of the machines themselves are disabled meanwhile, so that the checkers must find the bugs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.core.machine import invariants

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a bug under its function's name."""
    BUGS[plant.__name__] = plant
    return plant


SEEDS_FILE = Path(__file__).with_name("caught_at.json")
CAUGHT_AT: dict[str, int] = json.loads(SEEDS_FILE.read_text())
"""For each bug, a seed that has caught it before (tests/simulation/find_seeds.py)."""


def plant(name: str, patch: Patch) -> None:
    """Plant one bug, with the machines' own invariants disabled."""
    patch.setattr(invariants, "check_cluster", lambda cluster: None)
    patch.setattr(invariants, "check_job", lambda cluster, job: None)
    patch.setattr(invariants, "check_bounds", lambda job: None)
    BUGS[name](patch)

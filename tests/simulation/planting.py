"""Bugs to plant into the machines, each the kind that a tired engineer writes.

A checker that never failed proves nothing; these prove that the checkers see. The machines' own
invariants are switched off meanwhile, so that it is the independent checkers that find them.
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
    """Enter a bug into the list under its function's name."""
    BUGS[plant.__name__] = plant
    return plant


SEEDS_FILE = Path(__file__).with_name("caught_at.json")
CAUGHT_AT: dict[str, int] = json.loads(SEEDS_FILE.read_text())
"""A seed for each bug that has caught it before (tests/simulation/find_seeds.py)."""


def plant(name: str, patch: Patch) -> None:
    """Plant one bug, with the machines' own invariants switched off."""
    patch.setattr(invariants, "check_cluster", lambda cluster: None)
    patch.setattr(invariants, "check_job", lambda cluster, job: None)
    patch.setattr(invariants, "check_bounds", lambda job: None)
    BUGS[name](patch)

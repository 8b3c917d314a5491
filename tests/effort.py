"""How much properties are tried: little in the quick run, and more where there is time."""

from __future__ import annotations

import os

EFFORT = float(os.environ.get("ELASTIC_TEST_EFFORT", "1"))
"""How many times the examples of a quick run are drawn; `make chaos` draws more."""


def examples(number: int) -> int:
    """Return how many examples a property is tried with, of which a quick run has this number."""
    return max(1, int(number * EFFORT))

"""Find a seed that catches each planted bug: `python -m tests.simulation.find_seeds`.

Any change of the state machines changes the draws of a seed. If a seed no longer catches its bug,
the test searches from 0; run this when there are many such searches. It takes minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import sys

import pytest

from elastic.errors import ElasticError
from tests.simulation import planted, planted_crowds, planted_leavers, planting
from tests.simulation.simulator import Simulation

SEEDS_MAX = 1500
PLANTED_IN = (planted, planted_crowds, planted_leavers)
"""Modules that register their bugs when they are imported."""


def catching_seed(name: str, seeds_max: int) -> int | None:
    """Return a seed that catches a bug, trying the known one first; None if none does."""
    with pytest.MonkeyPatch.context() as patch:
        planting.plant(name, patch)
        known = planting.CAUGHT_AT.get(name)
        for seed in [*([] if known is None else [known]), *range(seeds_max)]:
            try:
                Simulation(seed, keep_log=False).run()
            except ElasticError:
                return seed
    return None


def _find(name: str) -> tuple[str, int | None]:
    return name, catching_seed(name, SEEDS_MAX)


def main() -> int:
    """Write each seed as soon as it is found; return 1 if a bug was not caught."""
    found, missed = {**planting.CAUGHT_AT}, []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for name, seed in pool.imap_unordered(_find, sorted(planting.BUGS)):
            print(f"{name}: {'not caught' if seed is None else seed}", flush=True)
            if seed is None:
                missed.append(name)
            elif found.get(name) != seed:
                found[name] = seed
                text = json.dumps(dict(sorted(found.items())), indent=2)
                planting.SEEDS_FILE.write_text(text + "\n")
    print(f"not caught by {SEEDS_MAX} seeds: {', '.join(sorted(missed)) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

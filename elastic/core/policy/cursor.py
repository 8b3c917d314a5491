"""The position of a run in the data.

Rule: it is two integers, whatever the world size: see `data_plan` for the samples at it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in the data: the next step to be committed.

    Attributes:
        epoch: passes over the data that are complete.
        step: steps of this epoch that are committed.
    """

    epoch: int = 0
    step: int = 0


NO_STEP = Cursor(-1)
"""Stands for a step before all others."""

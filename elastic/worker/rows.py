"""A few numbers from everyone to everyone, with each step: wishes, logged values, flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.errors import check
from elastic.worker.wires import GlooWires, Message, NoWires, Wires

CONTROL_MAX = 32
TAG = 1_000_000
"""Above the tags of all buckets."""


class RowExchange:
    """Rows of `CONTROL_MAX` numbers, the newest of each rank."""

    def __init__(self, rank: int, world_size: int, group: Any) -> None:
        """Allocate the rows.

        Args:
            rank: ours.
            world_size: W.
            group: the process group, None for a group of one.
        """
        self._rank = rank
        self._rows = torch.zeros(world_size, CONTROL_MAX, dtype=torch.float64)
        # The same memory: writing a few numbers through a tensor takes ten times as long.
        self._mine = self._rows[rank].numpy()
        self._wires: Wires = NoWires() if group is None else GlooWires(group)

    def start(self, values: Sequence[float]) -> None:
        """Send ours; returns at once."""
        check(len(values) <= CONTROL_MAX, f"{len(values)} numbers: at most {CONTROL_MAX}")
        self._mine[: len(values)] = values
        self._mine[len(values) :] = 0.0
        mine = self._rows[self._rank]
        others = [rank for rank in range(len(self._rows)) if rank != self._rank]
        self._wires.post([Message(False, self._rows[rank], rank, TAG) for rank in others])
        self._wires.post([Message(True, mine, rank, TAG) for rank in others])

    def finish(self) -> list[tuple[float, ...]]:
        """Return everyone's, by rank.

        Raises:
            RuntimeError: the group broke.
        """
        self._wires.wait_all()
        return [tuple(row) for row in self._rows.tolist()]

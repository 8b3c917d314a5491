"""What the micro-batches of one step logged, such as losses, averaged before the optimizer steps.

Rule: values are added in the order of the tree, as gradients are: averages have the same bits at
every world size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.core.policy.microbatch import Span, additions_in
from elastic.worker.engine.logbook import VALUES_MAX, fingerprint
from elastic.worker.reduce.step_metadata import MetadataExchange
from elastic.worker.reduce.tree_exchange import MicroBatchPartition

log = logging.getLogger(__name__)

PAIR = 2
"""Numbers of a value: the sum over micro-batches, and what they count."""
Totals = dict[str, tuple[float, float]]


class StepValues:
    """The exchange of the values of steps within one group, each a small message to everyone."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rows: dict[MicroBatchPartition, MetadataExchange] = {}
        self._warned = False

    def totals(
        self, partition: MicroBatchPartition, of_micro_batches: Mapping[int, Totals]
    ) -> Totals:
        """Return (sum, weight) of each name over all micro-batches of a step, the same everywhere.

        Raises:
            RuntimeError: the group broke.
        """
        names = sorted({name for totals in of_micro_batches.values() for name in totals})[
            :VALUES_MAX
        ]
        sums = {
            (number, number + 1): _numbers(totals, names)
            for number, totals in of_micro_batches.items()
        }
        for part in partition.mine:
            for one in additions_in(part):
                sums[one.total] = sums[one.left] + sums[one.right]
        size = PAIR * VALUES_MAX
        if partition not in self._rows:
            most = max(len(parts) for parts in partition.parts)
            self._rows[partition] = MetadataExchange(
                partition.rank, partition.world_size, self._group, 1 + most * size
            )
        mine = [fingerprint(names)]
        for part in partition.mine:
            mine += [*sums[part], *[0.0] * (size - PAIR * len(names))]
        self._rows[partition].start(mine)
        rows = self._rows[partition].finish()
        if any(row[0] != mine[0] for row in rows):
            if not self._warned:
                self._warned = True
                log.warning(
                    "log_ignored names=%s: the ranks log different names in the same step",
                    ",".join(names),
                )
            return {}
        every: dict[Span, NDArray[np.float64]] = {}
        for row, parts in zip(rows, partition.parts, strict=True):
            for index, part in enumerate(parts):
                begin = 1 + index * size
                every[part] = np.array(row[begin : begin + PAIR * len(names)])
        for left, right, total in partition.additions:
            every[total] = every[left] + every[right]
        pairs = every[0, partition.num_micro_batches].reshape(-1, PAIR).tolist()
        return {name: (total, weight) for name, (total, weight) in zip(names, pairs, strict=True)}


def _numbers(totals: Totals, names: list[str]) -> NDArray[np.float64]:
    return np.array([number for name in names for number in totals.get(name, (0.0, 0.0))])

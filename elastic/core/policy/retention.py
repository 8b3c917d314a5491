"""Which checkpoints are kept: the newest always, then the best, or the newest ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from elastic.core.world import CheckpointRecord


def keep(
    records: Sequence[CheckpointRecord],
    *,
    num_to_keep: int,
    score_attribute: str = "",
    score_order: str = "max",
) -> tuple[CheckpointRecord, ...]:
    """Return the records to keep, in their order.

    Args:
        records: oldest first.
        num_to_keep: -1 for all, else >= 1.
        score_attribute: metric to rank by, "" to keep the newest ones. A checkpoint without it,
            or with one that is not a number, ranks last.
        score_order: "max" or "min" is best.

    Guarantees:
        The newest is always kept: it is what a recovery reads (test_retention).
    """
    if num_to_keep == -1 or len(records) <= num_to_keep:
        return tuple(records)
    newest = len(records) - 1
    if score_attribute:
        order = sorted(
            range(newest),
            key=lambda i: (_score(records[i], score_attribute, score_order), i),
            reverse=True,
        )
    else:
        order = list(range(newest - 1, -1, -1))
    kept = {newest, *order[: num_to_keep - 1]}
    return tuple(record for i, record in enumerate(records) if i in kept)


AUTOMATIC_KEPT = 2
"""Automatic checkpoints that are kept at least: the newest may turn out to be damaged."""


def superfluous_automatic(names: Sequence[str], num_to_keep: int) -> tuple[str, ...]:
    """Return the automatic checkpoints to delete.

    Args:
        names: oldest first.
        num_to_keep: as the user wishes, -1 for no wish.
    """
    return tuple(names[: -max(AUTOMATIC_KEPT, num_to_keep)])


def _score(record: CheckpointRecord, attribute: str, order: str) -> float:
    try:
        value = float(json.loads(record.metrics)[attribute])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -math.inf
    if math.isnan(value):
        return -math.inf
    return value if order == "max" else -value

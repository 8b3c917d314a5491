"""Which checkpoints are kept: the newest always, then the best, or the newest ones.

Rule: one with a pending validation is kept until that is over, and replaces no other meanwhile: its
score may depend on the validation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from elastic.core.facts import CheckpointRecord, CheckpointStatus

AUTOMATIC_KEPT = 2
"""Automatic checkpoints that are kept at least: the newest may turn out to be damaged."""


def keep(
    records: Sequence[CheckpointRecord],
    *,
    num_to_keep: int,
    score_attribute: str = "",
    score_order: str = "max",
) -> tuple[CheckpointRecord, ...]:
    """Return the records to keep, in their order.

    Automatic ones are counted apart, and never by score: the newest few of them are kept, so that
    one kind never pushes out the other.

    Args:
        records: oldest first.
        num_to_keep: -1 for all, else >= 1; of automatic ones at least the newest two are kept.
        score_attribute: metric to rank by, "" to keep the newest ones. A checkpoint without it,
            or with one that is not a number, ranks last.
        score_order: "max" or "min" is best.

    Guarantees:
        The newest of each kind is always kept: it is what a recovery reads (test_retention). So
        is every one whose validation is not over.
    """
    automatic = [record.path for record in records if record.automatic]
    dropped = set(superfluous_automatic(automatic, num_to_keep))
    reported = [record for record in records if not record.automatic]
    best = _best(reported, num_to_keep, score_attribute, score_order)
    names = {record.path for record in best}

    def is_kept(record: CheckpointRecord) -> bool:
        return record.path not in dropped if record.automatic else record.path in names

    return tuple(record for record in records if is_kept(record))


def _best(
    records: Sequence[CheckpointRecord], num_to_keep: int, score_attribute: str, score_order: str
) -> tuple[CheckpointRecord, ...]:
    if num_to_keep == -1 or len(records) <= num_to_keep:
        return tuple(records)
    newest = len(records) - 1
    pending = {i for i, r in enumerate(records) if r.status is CheckpointStatus.PENDING_VALIDATION}
    order = [i for i in range(newest - 1, -1, -1) if i not in pending]
    if score_attribute:
        order.sort(key=lambda i: (score(records[i], score_attribute, score_order), i), reverse=True)
    kept = {newest, *pending, *order[: num_to_keep - 1]}
    return tuple(record for i, record in enumerate(records) if i in kept)


def superfluous_automatic(names: Sequence[str], num_to_keep: int) -> tuple[str, ...]:
    """Return the automatic checkpoints to delete.

    Args:
        names: oldest first.
        num_to_keep: set by the user, -1 for not set.
    """
    return tuple(names[: -max(AUTOMATIC_KEPT, num_to_keep)])


def score(record: CheckpointRecord, attribute: str, order: str) -> float:
    """Return how good a checkpoint is: more is better; -inf without a number for this metric."""
    try:
        value = float(json.loads(record.metrics)[attribute])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -math.inf
    if math.isnan(value):
        return -math.inf
    return value if order == "max" else -value

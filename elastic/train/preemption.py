"""Preemption notices for the train function, under Ray Train's name."""

from __future__ import annotations

import time
from dataclasses import dataclass

from elastic.train.session import require_context


@dataclass(frozen=True)
class PreemptionInfo:
    """A notice that nodes of this group are about to leave.

    Attributes:
        deadline_s: seconds left until the first of them is gone, from the time of the call, >= 0;
            counted by this machine's monotonic clock.
        reason: why, such as "AWS spot instance-action terminate".
        preempted_node_to_ranks: the nodes, each with the ranks of the group that leave with it.
    """

    deadline_s: float
    reason: str
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """Return the nodes, sorted."""
        return list(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Return all ranks that leave, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


def get_preemption_info() -> PreemptionInfo | None:
    """Return which nodes of the group must leave, and when; None if none must.

    It costs a microsecond, does not block, and may be called at every step. No reaction is
    required: where enough workers stay, the others leave between two steps, and the state
    continues in those that stay; where too few stay, a checkpoint is taken automatically. Use it
    for what only the script knows of: a log to flush, an evaluation to postpone, a checkpoint of
    its own in code without `train.epochs()`.

    Ranks receive it at slightly different times, so it must not decide about a collective. In a
    group that can do without the nodes they may have left before any call: then the remaining
    ranks get the notice once, with the ranks of the previous group.

    Raises:
        UsageError: outside a train function.
    """
    context = require_context("train.get_preemption_info")
    now_ns = time.monotonic_ns()
    notice = context.link.preemption(context.generation, now_ns)
    if notice is None:
        return None
    nodes = {str(node.node_id): list(node.ranks) for node in notice.nodes}
    return PreemptionInfo(max(0, notice.deadline_ns - now_ns) / 1e9, notice.reason, nodes)

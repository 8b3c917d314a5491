"""What a train function can know of nodes that were told to leave, under Ray Train's name."""

from __future__ import annotations

import time
from dataclasses import dataclass

from elastic.train.session import require_context


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of this group are about to go.

    Attributes:
        deadline_s: seconds left until the first of them is gone, from the moment of asking, >= 0;
            counted by this machine's monotonic clock.
        reason: why, such as "AWS spot instance-action terminate".
        preempted_node_to_ranks: which nodes, and the ranks of the group that go with them.
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
        """Return all ranks that go, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


def get_preemption_info() -> PreemptionInfo | None:
    """Return which nodes of the group were told to leave, and when; None if none were.

    It costs a microsecond, waits for nobody, and may be asked at every step. Nothing has to be
    done: where enough workers stay, those that leave do so between two steps, and the state goes
    on in the others; where they do not, a checkpoint is taken by itself. It is for what only the
    script knows of: a log to flush, an evaluation to put off, a checkpoint of its own in code
    without `train.epochs()`.

    Ranks learn of it at slightly different moments, so it must not decide about a collective. In
    a group that can do without the nodes it may be over before anybody asks: then those who stay
    are told once, with the ranks of the group before.

    Raises:
        UsageError: outside a train function.
    """
    context = require_context("train.get_preemption_info")
    now_ns = time.monotonic_ns()
    told = context.link.preemption(context.generation, now_ns)
    if told is None:
        return None
    nodes = {str(node.node_id): list(node.ranks) for node in told.nodes}
    return PreemptionInfo(max(0, told.deadline_ns - now_ns) / 1e9, told.reason, nodes)

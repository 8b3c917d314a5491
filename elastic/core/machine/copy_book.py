"""The coordinator's records of the copies of one job's state, and of the orders sent for them.

Rule: like `jobs`, this module only records; decisions and orders are in `copies`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.copy_messages import Replicate
from elastic.core.facts import Generation, NodeId, SessionId
from elastic.core.policy.replication import NO_COPY
from elastic.core.view import CopyView


class PlacedCopyOrder(NamedTuple):
    """An order that was sent to a source's node.

    Attributes:
        session: the stream over which it was sent.
        generation: of the group that it is for.
        order: the order.
        holder_incarnation: of the agent that should hold the copy, which is lost with it.
    """

    session: SessionId
    generation: Generation
    order: Replicate
    holder_incarnation: int


@dataclass
class CopyBook:
    """The known copies of a job's state, in this term.

    Attributes:
        every_n_steps: as requested by its members, 0 for no copies.
        is_sharded: each node has its own rows. Then the following is by source: the node whose
            rows they are. Otherwise there is one source, "", because all have the same.
        not_before_ns: no holder is chosen earlier: a node may hold a copy and not have reported it.
        holders: the node that should hold each source's copy, "" for none.
        held: by node, its last reported copies: source -> generation and steps.
        received_ns: by node and source, when that copy was first reported.
        left_ns: nodes whose workers have left the sharded run, and when; their memory is kept for
            a while.
        granted: nodes that may receive and serve copies, and the stream of that permission.
        ordered: the last order to the node of each source.
        refused_until_ns: by source and node: until when a node that could not receive a copy is
            not chosen.
    """

    every_n_steps: int = 0
    is_sharded: bool = False
    not_before_ns: int = 0
    holders: dict[NodeId, NodeId] = field(default_factory=dict)
    held: dict[NodeId, dict[NodeId, tuple[Generation, int]]] = field(default_factory=dict)
    received_ns: dict[tuple[NodeId, NodeId], int] = field(default_factory=dict)
    left_ns: dict[NodeId, int] = field(default_factory=dict)
    granted: dict[NodeId, SessionId] = field(default_factory=dict)
    ordered: dict[NodeId, PlacedCopyOrder] = field(default_factory=dict)
    refused_until_ns: dict[tuple[NodeId, NodeId], int] = field(default_factory=dict)

    def newest(self, node_id: NodeId, source: NodeId) -> tuple[Generation, int]:
        return self.held.get(node_id, {}).get(source, NO_COPY)

    def is_settled(self, node_id: NodeId, now: dict[NodeId, tuple[Generation, int]]) -> bool:
        """Return whether nothing follows from what a node holds now, but that it is newer.

        Else a copy came or was lost, or some holder's makes others superfluous.
        """
        before = self.held.get(node_id, {})
        return (
            before.keys() == now.keys()
            and all(before[source] <= age for source, age in now.items())
            and all(self.holders.get(s) == at for at, by in self.held.items() for s in by)
        )

    def view(self, first: NodeId) -> tuple[CopyView, ...]:
        """Return the copies for the status; `first` is rank 0's node, source of unsharded state."""
        return tuple(
            CopyView(node_id, source or first, *age, self.received_ns.get((node_id, source), 0))
            for node_id in sorted(self.held)
            for source, age in sorted(self.held[node_id].items())
        )

"""What the coordinator knows of the copies of one job's state, and what it has told of them.

Rule: as `jobs`: this module keeps books; what follows is in `copies`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.copy_messages import Replicate
from elastic.core.policy.replication import NO_COPY
from elastic.core.view import CopyView
from elastic.core.world import Generation, NodeId, SessionId


class PlacedCopyOrder(NamedTuple):
    """What a source's node was told to do.

    Attributes:
        session: over which stream.
        generation: for which group.
        order: what.
        holder_life: incarnation of the agent that is to hold the copy: memory goes with its agent.
        num_lost: how often that one had lost what it held.
    """

    session: SessionId
    generation: Generation
    order: Replicate
    holder_life: int
    num_lost: int


@dataclass
class CopyBook:
    """What is known of the copies of a job's state, in this coordinator's life.

    Attributes:
        every_n_steps: as its members want it, 0 for not at all.
        is_sharded: each node has rows of its own. What follows is by source then: the node whose
            rows they are. Otherwise there is one source, "", because all have the same.
        not_before_ns: no node is chosen earlier: one may hold it already, and is about to say so.
        holders: the node where a source's copy is to lie, "" for none, and why there.
        held: sources whose copies a node has, as it said last: generation and steps.
        received_ns: of node and source, when that was said first.
        left_ns: nodes whose workers have left the sharded run, and when; what was in their memory
            is there for a while.
        granted: nodes that may take and give them, and the stream over which they were told so.
        ordered: what the node of each source was told.
        num_lost: of each source, how often the node that is to hold its copy had it no more.
        refused_until_ns: of source and node that could not take its copy: until when that node is
            passed over.
    """

    every_n_steps: int = 0
    is_sharded: bool = False
    not_before_ns: int = 0
    holders: dict[NodeId, tuple[NodeId, str]] = field(default_factory=dict)
    held: dict[NodeId, dict[NodeId, tuple[Generation, int]]] = field(default_factory=dict)
    received_ns: dict[tuple[NodeId, NodeId], int] = field(default_factory=dict)
    left_ns: dict[NodeId, int] = field(default_factory=dict)
    granted: dict[NodeId, SessionId] = field(default_factory=dict)
    ordered: dict[NodeId, PlacedCopyOrder] = field(default_factory=dict)
    num_lost: dict[NodeId, int] = field(default_factory=dict)
    refused_until_ns: dict[tuple[NodeId, NodeId], int] = field(default_factory=dict)

    def newest(self, node_id: NodeId, source: NodeId) -> tuple[Generation, int]:
        """Return generation and steps of the newest copy of a source that a node has."""
        return self.held.get(node_id, {}).get(source, NO_COPY)

    def view(self, first: NodeId) -> tuple[CopyView, ...]:
        """Return what status shows; `first` is the node of rank 0, which sends what all have."""
        return tuple(
            CopyView(node_id, source or first, *age, self.received_ns.get((node_id, source), 0))
            for node_id in sorted(self.held)
            for source, age in sorted(self.held[node_id].items())
        )

"""Messages between coordinator and agents about copies of a job's state on other nodes.

Rule: as in `messages`, each states the complete current facts, so that the newest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.facts import ALL_ALIKE, NO_GENERATION, Generation, HeldCopy, JobId, NodeId

# ---------------------------------------------------------------- agent -> coordinator


@dataclass(frozen=True)
class CopiesHeld:
    """All copies that this node holds now; sent when they change."""

    copies: tuple[HeldCopy, ...]


@dataclass(frozen=True)
class CopyFailed:
    """This node could not send a copy of a job's state to the ordered node."""

    job_id: JobId
    node_id: NodeId
    reason: str


# ---------------------------------------------------------------- coordinator -> agent


@dataclass(frozen=True)
class KeepCopy:
    """Hold copies of this job's state: accept them from, and serve them to, peers with the key.

    Attributes:
        key: a secret; the newest one counts.
    """

    job_id: JobId
    key: str = field(repr=False)


@dataclass(frozen=True)
class DropCopy:
    """Drop the copies held for this job, and accept no more.

    Attributes:
        source: drop only copies from this source node, and continue to accept; "" for all.
        generation, steps: of the newest copy to drop: if a newer one has come meanwhile, all are
            kept, and the coordinator is informed; generation 0 for no limit.
    """

    job_id: JobId
    reason: str
    source: NodeId = ALL_ALIKE
    generation: Generation = NO_GENERATION
    steps: int = 0

    def spares(self, generation: Generation, steps: int) -> bool:
        """Return whether a copy is newer than those to drop."""
        return bool(self.generation) and (generation, steps) > (self.generation, self.steps)


@dataclass(frozen=True)
class Replicate:
    """Send snapshots of this job's state, taken on this node, to another node.

    Attributes:
        node_id, address: the destination; "" to stop.
        key: a secret.
        every_n_steps: how often, >= 1.
        source: this node, if every node has rows of its own; "" if all have the same.
        generation: snapshots of earlier groups are not sent.
    """

    job_id: JobId
    node_id: NodeId
    address: str
    key: str = field(repr=False)
    every_n_steps: int
    source: NodeId = ALL_ALIKE
    generation: Generation = NO_GENERATION


CopyOrder = KeepCopy | DropCopy | Replicate

"""What coordinator and agents tell each other of copies of a job's state on other nodes.

Rule: as in `messages`: what is told is all of it, so that the newest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.world import ALL_ALIKE, NO_GENERATION, Generation, HeldCopy, JobId, NodeId


class CopyEndpoint(NamedTuple):
    """Where a node's agent takes and gives copies, as others reach it.

    Attributes:
        at: "host:port", "" if it does neither. Over TLS, but on loopback without a certificate.
        fingerprint: SHA-256 of the certificate that the agent made for itself, hexadecimal; ""
            where it shows one of the cluster's authority, or none.
    """

    at: str = ""
    fingerprint: str = ""


NO_ENDPOINT = CopyEndpoint()


# ---------------------------------------------------------------- agent -> coordinator


@dataclass(frozen=True)
class CopiesHeld:
    """All that this node holds for others now; said when it changes."""

    copies: tuple[HeldCopy, ...]


@dataclass(frozen=True)
class CopyFailed:
    """This node could not bring a copy of a job's state to the node that it was told to."""

    job_id: JobId
    node_id: NodeId
    reason: str


# ---------------------------------------------------------------- coordinator -> agent


@dataclass(frozen=True)
class KeepCopy:
    """Take copies of this job's state from whoever has the key, and give them; one lies here.

    Attributes:
        key: a secret; the newest one counts.
    """

    job_id: JobId
    key: str = field(repr=False)


@dataclass(frozen=True)
class DropCopy:
    """Free what is held for this job, and take nothing for it any more.

    Attributes:
        source: free what this node has brought, and go on taking; "" for all.
        generation, steps: of the newest copy that may be freed: if a newer one has come meanwhile,
            all stays, and the coordinator hears of it; generation 0 for whatever is held.
    """

    job_id: JobId
    reason: str
    source: NodeId = ALL_ALIKE
    generation: Generation = NO_GENERATION
    steps: int = 0

    def spares(self, generation: Generation, steps: int) -> bool:
        """Return whether a copy is newer than those that may be freed."""
        return bool(self.generation) and (generation, steps) > (self.generation, self.steps)


@dataclass(frozen=True)
class Replicate:
    """Bring snapshots of this job's state, which this node takes, to another node.

    Attributes:
        node_id, address: where to; "" to stop.
        key: a secret.
        every_n_steps: how often, >= 1.
        source: this node, if every node has rows of its own; "" if all have the same.
        generation: snapshots of earlier groups are not brought.
        fingerprint: of the certificate that is shown at the address, "" to look at none such.
    """

    job_id: JobId
    node_id: NodeId
    address: str
    key: str = field(repr=False)
    every_n_steps: int
    source: NodeId = ALL_ALIKE
    generation: Generation = NO_GENERATION
    fingerprint: str = ""


CopyOrder = KeepCopy | DropCopy | Replicate

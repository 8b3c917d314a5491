"""Messages between coordinator and agents about the links between nodes.

Rule: as in `messages`, each states the current facts, so that the newest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.world import JobId, NodeId


@dataclass(frozen=True)
class Link:
    """The link to another node.

    Attributes:
        address: "host:port" where a worker of the job listens on it.
    """

    node_id: NodeId
    address: str


@dataclass(frozen=True)
class TryLinks:
    """Probe links: connect without sending anything, and report which nodes were reached.

    Attributes:
        job_id: of the group that makes no progress.
    """

    job_id: JobId
    links: tuple[Link, ...]


@dataclass(frozen=True)
class LinksTried:
    """Reply to `TryLinks`; a node that refuses the connection counts as reached."""

    job_id: JobId
    reached: tuple[NodeId, ...] = ()
    unreachable: tuple[NodeId, ...] = ()

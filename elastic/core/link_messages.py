"""What coordinator and agents tell each other of the links between nodes.

Rule: as in `messages`: what is told is how things are, so that the newest word counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.world import JobId, NodeId


@dataclass(frozen=True)
class Link:
    """The way to another node.

    Attributes:
        address: "host:port" where a worker of the job listens on it.
    """

    node_id: NodeId
    address: str


@dataclass(frozen=True)
class TryLinks:
    """Connect to these, say nothing, and tell which could be reached.

    Attributes:
        job_id: whose group gets nowhere.
    """

    job_id: JobId
    links: tuple[Link, ...]


@dataclass(frozen=True)
class LinksTried:
    """Answer to `TryLinks`; who refuses was reached."""

    job_id: JobId
    reached: tuple[NodeId, ...] = ()
    unreachable: tuple[NodeId, ...] = ()

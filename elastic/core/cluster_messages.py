"""What a coordinator tells an agent of the cluster: who else coordinates, and that it is to leave.

Rule: as of all messages (`core.messages`, whose unions hold these): each states how things are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinators:
    """Where coordinators answer, the one that leads too. Never passes through a machine.

    Attributes:
        addresses: "host:port" each; to be kept beside those that the agent was started with.
    """

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """An operator wants this node to leave; the agent keeps that, whoever coordinates next.

    Attributes:
        timeout_ns: until it is to be gone, from the moment of sending; the nearest end counts.
    """

    reason: str
    timeout_ns: int

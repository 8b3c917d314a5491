"""Messages to agents about the cluster: the coordinators' addresses, and drains.

Rule: like all messages (`core.messages`, whose unions hold these), each states the current facts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinators:
    """The addresses of all coordinators, including the leader. Bypasses the state machines.

    Attributes:
        addresses: "host:port" each; kept in addition to those that the agent was started with.
    """

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """An operator drains this node; the agent remembers that across coordinators.

    Attributes:
        timeout_ns: time until it must be gone, from the time of sending; the earliest end counts.
    """

    reason: str
    timeout_ns: int

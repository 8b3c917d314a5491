"""Which workers understand each other, while a cluster is upgraded node by node.

What the members of a group tell each other with every step has no room for what another version
knows. So a change to it is a new dialect, and all members of a group speak the same one: nodes of
another take no workers of a job as long as it has any.
"""

from __future__ import annotations

from bisect import bisect_right

Dialect = int
"""Counted from the first one."""

SINCE_MINORS = (0, 4)
"""Minor versions of the protocol with which each dialect began; another one, another dialect."""


def dialect_of(protocol_minor: int) -> Dialect:
    """Return what workers speak that are started by an agent of this version."""
    return max(0, bisect_right(SINCE_MINORS, protocol_minor) - 1)

"""The copies of other nodes' state that this node holds, as the agent's machine knows them.

Rule: the coordinator orders which copies are held, and receives the list of held ones. An agent
without a coordinator for long drops its copies, because they could not be fetched.
"""

from __future__ import annotations

from elastic.core.config import ns
from elastic.core.copy_messages import DropCopy
from elastic.core.events.agent import AgentEffect, HandleCopy
from elastic.core.facts import HeldCopy

ORPHANED_S = 600.0
"""How long copies are held without a coordinator: longer than its upgrade takes."""


class HeldCopies:
    """The copies on this node.

    Attributes:
        held: all of them, by job.
        is_reported: the coordinator knows them.
    """

    def __init__(self, out: list[AgentEffect]) -> None:
        self.held: tuple[HeldCopy, ...] = ()
        self.is_reported = True
        self._out = out
        self._drop_at_ns: int | None = None

    def changed(self, held: tuple[HeldCopy, ...]) -> None:
        """Record the complete list of copies."""
        held = tuple(sorted(held, key=lambda copy: (copy.job_id, copy.source)))
        if held != self.held:
            self.held, self.is_reported = held, False

    def turn(self, now_ns: int, *, is_registered: bool) -> None:
        """Drop all copies after a long time without a coordinator."""
        if is_registered or not self.held:
            self._drop_at_ns = None
        elif self._drop_at_ns is None:
            self._drop_at_ns = now_ns + ns(ORPHANED_S)
        elif now_ns >= self._drop_at_ns:
            self._drop_at_ns = None
            why = f"no coordinator for {ORPHANED_S:g} s"
            self._out += [HandleCopy(DropCopy(copy.job_id, why)) for copy in self.held]

    def next_deadline_ns(self) -> int | None:
        """Return when all copies are dropped, None for never."""
        return self._drop_at_ns

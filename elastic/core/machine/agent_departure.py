"""How and when an agent ends: drained, released, or refused for good.

A node drains on SIGTERM or SIGINT to its agent (`agent.cli.ShutdownTrigger`; at once on a second
one), on a cloud's notice within the time that it gives, and on `elastic drain`. The agent reports
it, and starts no more workers. The coordinator has those of the node leave their groups at a
boundary (`policy.membership.decide`), and releases the node once it runs nothing and no copy in its
memory is needed (`machine.releasing`). An agent that no coordinator knows ends with its last
worker. At `stop_at_ns` workers that are still there are asked to end, at the deadline killed:
`stop_at_ns` is `stop_grace_s` (5 s) before the deadline, but at most a quarter of the drain.

In the worker (`machine.worker`): `_preemption_reported` calls a script's own handler of SIGTERM
when the drain begins, unless its loop continues in place; `_leave_ordered` has it leave at a
boundary; `_stop_ordered` interrupts what still trains, and the process exits within 5 s, or calls
that handler. Drawn in docs/walks.md, "A drain".

Rule: an end that has begun may come sooner, never later, and keeps its first exit code.
"""

from __future__ import annotations

from elastic.core.config import AgentConfig, ns

EXIT_REFUSED = 69
EXIT_DRAINED = 75
STOP_SHARE_OF_DRAIN = 4
"""At most this fraction of a drain is kept for asking workers to end before they are killed."""


class Departure:
    """Two stages: draining, while workers may leave at a boundary, and ending, while they stop.

    Attributes:
        reason: why the node drains, "" if it does not.
        deadline_ns: by when a draining node has left.
        stop_at_ns: when workers that are still there are asked to end, so that the deadline holds.
        is_reported: the current drain was reported to the coordinator.
        code: exit code of the end that has begun, None before.
        kill_at_ns: when what still runs is killed, set with `code`.
        why: what began the end.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.reason = ""
        self.deadline_ns: int | None = None
        self.stop_at_ns = 0
        self.is_reported = True
        self.code: int | None = None
        self.kill_at_ns = 0
        self.why = ""
        self._stop_grace_ns = ns(config.stop_grace_s)

    def is_draining(self) -> bool:
        return self.deadline_ns is not None

    def is_ending(self) -> bool:
        """Return whether workers are asked to end, and the agent after them."""
        return self.code is not None

    def drain(self, reason: str, timeout_ns: int, now_ns: int) -> bool:
        """Leave within `timeout_ns`; return False if an earlier deadline is not later."""
        timeout_ns = max(0, timeout_ns)
        deadline_ns = now_ns + timeout_ns
        if self.deadline_ns is not None and self.deadline_ns <= deadline_ns:
            return False
        self.reason = self.reason or reason or "told to leave"
        self.deadline_ns = deadline_ns
        self.stop_at_ns = deadline_ns - min(self._stop_grace_ns, timeout_ns // STOP_SHARE_OF_DRAIN)
        self.is_reported = False
        return True

    def remaining_ns(self, now_ns: int) -> int:
        """Return how much time a draining node has left; 0 if it does not drain."""
        return max(0, self.deadline_ns - now_ns) if self.deadline_ns is not None else 0

    def end(self, code: int, why: str, now_ns: int) -> bool:
        """Begin the end, or bring it forward; True if it had not begun before."""
        kill_at_ns = now_ns + self._stop_grace_ns
        if self.deadline_ns is not None:
            kill_at_ns = min(kill_at_ns, max(now_ns, self.deadline_ns))
        if self.code is not None:
            self.kill_at_ns = min(self.kill_at_ns, kill_at_ns)
            return False
        self.code, self.why, self.kill_at_ns = code, why, kill_at_ns
        return True

    def next_deadline_ns(self) -> int | None:
        if self.is_ending():
            return self.kill_at_ns
        return self.stop_at_ns if self.is_draining() else None

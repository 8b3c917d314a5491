"""The interface of a source of preemption notices, and the notice.

Rule: a source only watches. It never raises for an external fault: a server that hangs, sends
invalid replies or is down is queried again later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Notice:
    """A notice that this node must leave.

    Attributes:
        reason: text for users, with the source's own terms.
        deadline_unix_s: wall-clock time at which the machine is gone; None if unknown.
        within_s: seconds from now until it is gone, for sources that report those; None otherwise.
    """

    reason: str
    deadline_unix_s: float | None = None
    within_s: float | None = None


Notify = Callable[[Notice], None]
"""Receives a notice; returns at once."""


class NoticeSource(Protocol):
    """A source that detects that this machine will be preempted or shut down."""

    @property
    def name(self) -> str: ...

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with each new notice, until cancelled.

        Not an iterator: one that is abandoned between two notices would leak its tasks.
        """
        ...


FLOOR_S = 5.0
"""Minimum for a wall-clock deadline. If that has passed and the machine still runs, the clock is
wrong: workers still get this long to reach a step boundary."""
CEILING_S = 24 * 3600.0


def time_left_s(notice: Notice, *, now_unix_s: float, default_s: float) -> float:
    """Return the seconds within which the node must leave.

    Args:
        notice: as received.
        now_unix_s: wall clock.
        default_s: for a notice without a time.
    """
    if notice.within_s is not None:
        left_s = notice.within_s
    elif notice.deadline_unix_s is not None:
        left_s = max(FLOOR_S, notice.deadline_unix_s - now_unix_s)
    else:
        left_s = default_s
    return min(max(0.0, left_s), CEILING_S)

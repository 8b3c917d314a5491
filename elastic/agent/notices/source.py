"""What a source of notices is, and what it says.

Rule: a source only watches. It never ends by an error that the world outside can cause: a server
that hangs, lies or is away is asked again later, and disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Notice:
    """This node must leave.

    Attributes:
        reason: for people, with the words of whoever said so.
        deadline_unix_s: when the machine is gone, by the wall clock; None if nobody said.
        within_s: seconds from now until it is gone, for sources that say it so; None otherwise.
    """

    reason: str
    deadline_unix_s: float | None = None
    within_s: float | None = None


Tell = Callable[[Notice], None]
"""Takes a notice; returns at once."""


class NoticeSource(Protocol):
    """Something that knows when this machine is to be taken."""

    @property
    def name(self) -> str:
        """Return what --notices calls it."""
        ...

    async def watch(self, tell: Tell) -> None:
        """Tell of each new notice, until cancelled.

        Not an iterator: one that is given up between two notices would leave its tasks behind.
        """
        ...


FLOOR_S = 5.0
"""A deadline that is over, on a machine that still runs, is a clock that is off: workers get this
long to reach a boundary all the same."""
CEILING_S = 24 * 3600.0


def time_left_s(notice: Notice, *, now_unix_s: float, default_s: float) -> float:
    """Return within how many seconds the node must have left.

    Args:
        notice: as it came.
        now_unix_s: wall clock.
        default_s: for a notice that says no time.
    """
    if notice.within_s is not None:
        left_s = notice.within_s
    elif notice.deadline_unix_s is not None:
        left_s = max(FLOOR_S, notice.deadline_unix_s - now_unix_s)
    else:
        left_s = default_s
    return min(max(0.0, left_s), CEILING_S)

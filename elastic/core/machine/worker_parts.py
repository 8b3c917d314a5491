"""The parts of a worker's state: what it is in its group, and what it was ordered since."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.machine.worker_reports import ReportBook
from elastic.core.messages import LeaveGroup, SaveState
from elastic.core.world import NO_GENERATION, Assignment, Generation


@dataclass
class MemberState:
    """What a worker is in the group that its main thread forms, trains in, or left last.

    Attributes:
        assignment: its place there; None before the first group.
        is_cut: its main thread was told that this group is over.
        has_requested: its main thread was asked to leave it at a boundary.
        result, left: what the train function has returned, or how it was left.
        close_at_ns: when to close a group in which that was, None for never.
        reports: what was reported there, as far as it is unanswered.
    """

    assignment: Assignment | None = None
    is_cut: bool = False
    has_requested: bool = False
    result: str = ""
    left: str = ""
    close_at_ns: int | None = None
    reports: ReportBook = field(default_factory=ReportBook)


@dataclass
class GroupOrders:
    """What a worker was ordered, and its main thread may not have done yet.

    Attributes:
        newest: generation of the newest group that was announced, or is over.
        next: that group, if the main thread must first finish or leave its work.
        leave: the order to leave the newest group, if there is one.
        save: the newest checkpoint request, until the main thread can serve it.
        has_leavers: a node of the newest group is to leave.
    """

    newest: Generation = NO_GENERATION
    next: Assignment | None = None
    leave: LeaveGroup | None = None
    save: SaveState | None = None
    has_leavers: bool = False

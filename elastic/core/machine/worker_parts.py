"""The parts of a worker's state: in its group, what it was ordered since, and its loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.core.events.worker import CopiesRequested, LoopStateChanged, MicroBatchesDeclared
from elastic.core.facts import NO_GENERATION, Assignment, Generation
from elastic.core.machine.worker_reports import ReportBook
from elastic.core.messages import LeaveGroup, SaveState

NO_COPIES = CopiesRequested(0)


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


@dataclass(frozen=True)
class LoopState:
    """The training loop of this process: declared by it once, and used when its group changes.

    It holds across groups, because the loop does. A process that never enters a loop of ours
    declares nothing, and is spent once its train function was called.

    Attributes:
        in_place: the train function is inside it, and it continues when the group changes.
        keeps: this process keeps its progress from group to group.
        copies: the requested copies of the state on other nodes.
        micro_batches: per step, the minimum over its loaders; 0 before one was read.
        has_trained: the train function was called in this process.
    """

    in_place: bool = False
    keeps: bool = False
    copies: CopiesRequested = NO_COPIES
    micro_batches: int = 0
    has_trained: bool = False

    @property
    def is_spent(self) -> bool:
        """Return whether the script has run here, and is in no loop that continues in place."""
        return self.has_trained and not self.keeps

    def entered(self) -> LoopState:
        return replace(self, has_trained=True)

    def after(self, event: LoopStateChanged | CopiesRequested | MicroBatchesDeclared) -> LoopState:
        if isinstance(event, LoopStateChanged):
            return replace(self, in_place=event.inside, keeps=True)
        if isinstance(event, CopiesRequested):
            return replace(self, copies=event)
        fewest = min(event.num_micro_batches, self.micro_batches or event.num_micro_batches)
        return replace(self, micro_batches=fewest)

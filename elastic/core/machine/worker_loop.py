"""The state of a worker's training loop: declared by it once, and used when its group changes.

Rule: it holds across groups, because the loop does. A process that never enters a loop of ours
declares nothing, and is spent once its train function was called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.events.worker import CopiesRequested, LoopStateChanged, MicroBatchesDeclared

NO_COPIES = CopiesRequested(0)


@dataclass(frozen=True)
class LoopState:
    """The loop of this process.

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

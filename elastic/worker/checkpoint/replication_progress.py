"""Whether the newest snapshot of a sharded model has been replicated to another node.

The rows of one node are of use only together with those of all other nodes, of the same snapshot.
So the next snapshot is not begun before the present one has been replicated
(see `replication.is_awaited`).

Rule: a node to which the agent replicates nothing is not waited for.
"""

from __future__ import annotations

import time

from elastic.core.policy.replication import CopyMode, is_awaited
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.worker.state.arena import SnapshotSlot


class ReplicationProgress:
    """What this worker knows of the way of its group's newest snapshot.

    Attributes:
        is_awaited: the model is sharded, and its snapshots are brought to other nodes.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._newest = (0, 0)
        self._slot: SnapshotSlot | None = None
        self._since_s = 0.0

    def begin(self, mark: SnapshotMark, slot: SnapshotSlot) -> None:
        """Our part of this snapshot is there; earlier ones are none of our business any more."""
        self._newest = mark.steps, mark.generation
        self._slot = slot
        self._since_s = time.monotonic()

    def forget(self) -> None:
        """There is none yet, but of other groups: this one continues from one of those."""
        self._slot = None

    def is_missing(self) -> bool:
        """Return whether the next snapshot has to wait."""
        slot = self._slot
        if not self.is_awaited or slot is None:
            return False
        mode, arrived = slot.copy_progress()
        if mode is CopyMode.OFF or arrived == self._newest:
            return False  # Without reading all marks: this is asked after each step.
        mark = slot.whole()
        is_whole = mark is not None and (mark.steps, mark.generation) == self._newest
        waited_s = time.monotonic() - self._since_s
        return is_awaited(mode, is_whole=is_whole, waited_s=waited_s).value

"""The snapshots of this process in memory: the agent's, which outlives it, or its own.

Rule: the newest whole snapshot that the run has come from stays until a newer one is whole. One
that was begun may come to nothing: a worker of the node was lost before it had marked its part, or
memory was short.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from elastic.core.facts import SNAPSHOT_SLOTS
from elastic.runtime.snapshot_memory import SnapshotMark, slot_after
from elastic.worker.state.arena import SnapshotSlot

log = logging.getLogger(__name__)


class SnapshotSlots:
    """Slots that snapshots take in turn; opened when they are first asked for.

    Attributes:
        are_shared: they are the agent's, and the workers of this node copy parts of a state there.
        last: that of this group's last snapshot, as long as not all members are known to have
            settled that one.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Open nothing yet.

        Args:
            paths: of the agent's memory for the job, one for each slot; empty for our own.
        """
        self._paths = tuple(paths)
        self._slots: list[SnapshotSlot] = []
        self.last: SnapshotSlot | None = None

    def enter(self) -> None:
        """A new group has taken none yet."""
        self.last = None

    @property
    def are_shared(self) -> bool:
        return bool(self._paths)

    @property
    def are_open(self) -> bool:
        return bool(self._slots)

    def identity(self) -> int:
        """Return what identifies the node's shared memory, 0 if it cannot be had."""
        if not self._paths:
            return 0
        try:
            return self.all()[0].identity
        except OSError as error:
            log.warning("no_shared_memory paths=%s error=%r", self._paths, str(error))
            return 0

    def use_own(self) -> None:
        """Do without the agent's memory for good."""
        self._paths = ()
        self._slots = []
        self.last = None

    def close(self) -> None:
        self._slots = []

    def all(self) -> list[SnapshotSlot]:
        if not self._slots:
            paths = self._paths or ("",) * SNAPSHOT_SLOTS
            self._slots = [SnapshotSlot(path) for path in paths]
        return self._slots

    def know_all_settled(self) -> None:
        """All members have settled the last one: each sees alike whether it is whole."""
        self.last = None

    def take(self, number: int) -> SnapshotSlot:
        """Return where the snapshot that is taken now goes, as `next` does."""
        self.last = self.next(number)
        return self.last

    def next(self, number: int) -> SnapshotSlot:
        """Return where a snapshot goes; OSError if a slot cannot be read.

        All workers of a node that take it choose alike: what they have begun before it, each has
        marked by then or never will. Greater numbers are of a state that was left for an older one.
        """
        if self.last is not None:
            return next(one for one in self.all() if one is not self.last)
        return self.all()[slot_after([slot.whole() for slot in self.all()], number)]

    def whole(self) -> list[tuple[SnapshotSlot, SnapshotMark]]:
        """Return the whole snapshots, those of more steps first; OSError if one cannot be read."""
        marks = [(slot, slot.whole()) for slot in self.all()]
        found = [(slot, mark) for slot, mark in marks if mark is not None]
        return sorted(found, key=lambda pair: pair[1].steps, reverse=True)

    def read(self, steps: int) -> tuple[str, Any]:
        """Return the state after so many steps, and its key among those of as many.

        Its tensors are copies. ValueError if there is none of so many steps, or it is
        damaged.
        """
        for slot, mark in self.whole():
            if mark.steps == steps:
                return f"generation {mark.generation}, number {mark.number}", slot.state(mark)
        raise ValueError(f"no snapshot of step {steps} in this node's memory")

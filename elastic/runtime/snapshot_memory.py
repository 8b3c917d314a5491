"""Layout of snapshots in memory that processes share: a header of marks, then the tensors.

    0        marks: one for each worker on this node
    16320    the agent's: number of the snapshot that it is sending to another node, 0 for none
    16328    steps and generation of the snapshot here that has arrived there, 0 for none
    16344    whether the agent copies any, see `core.policy.replication.CopyMode`
    16384    tensors, end to end, each aligned to 64 bytes
             then the skeleton: everything that is no tensor

Rule: a mark is written after its data, and cleared before that data changes. A reader checks the
marks before and after it reads: if they are equal, the data did not change in between.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastic.core.policy.replication import CopyMode
from elastic.runtime import cgroup

HEADER = 16_384
MARK = struct.Struct("<QQQQQQQQ")
MARKS_MAX = HEADER // MARK.size - 1
SENT = struct.Struct("<Q")
SENT_AT = MARKS_MAX * MARK.size
ARRIVED = struct.Struct("<QQ")
ARRIVED_AT = SENT_AT + SENT.size
BRINGING = struct.Struct("<Q")
COPYING_AT = ARRIVED_AT + ARRIVED.size
MEMORY_SHARE = 0.8
"""Fraction of the available memory that may be used: the rest is for training's own allocations."""


class SnapshotMark(NamedTuple):
    """A worker's description of its part of a snapshot.

    Attributes:
        number: of the snapshot in its run, >= 1; 0 for none, or for one that is being copied, whose
            number is in `steps` then.
        generation: of the group that took it: after a loss, a number may be reused.
        steps: committed in the run when it was taken.
        parts: number of the node's workers that share it.
        data_bytes: of all tensors.
        tensors: fingerprint of the tensors and their offsets.
        skeleton_bytes: of everything that is no tensor.
        skeleton_crc: CRC-32 of the skeleton.
    """

    number: int
    generation: int
    steps: int
    parts: int
    data_bytes: int
    tensors: int
    skeleton_bytes: int
    skeleton_crc: int

    def is_with(self, other: SnapshotMark | None) -> bool:
        """Return whether both describe the same snapshot, possibly different parts of it."""
        return other is not None and self[:OF_ALL] == other[:OF_ALL]

    @classmethod
    def copying(cls, generation: int, number: int) -> SnapshotMark:
        """Return the mark of a snapshot that is being copied, which does not count; see `begun`."""
        return cls(0, generation, number, 0, 0, 0, 0, 0)

    @property
    def begun(self) -> tuple[int, int]:
        """Return generation and number of the snapshot that is here, or is being copied here."""
        return self.generation, self.number or self.steps

    @property
    def num_bytes(self) -> int:
        """Return the size of the snapshot in bytes, without the header."""
        return self.data_bytes + self.skeleton_bytes


OF_ALL = 6
"""Number of leading fields that are equal for all parts; the skeleton is local rank 0's alone."""


def whole(marks: bytes) -> SnapshotMark | None:
    """Return the mark of a complete snapshot: one that all workers of the node have marked.

    Args:
        marks: the first `HEADER` bytes of the memory; fewer give None.
    """
    if len(marks) < HEADER:
        return None
    first = SnapshotMark(*MARK.unpack_from(marks, 0))
    if not first.number or not 1 <= first.parts <= MARKS_MAX:
        return None
    for part in range(1, first.parts):
        if not SnapshotMark(*MARK.unpack_from(marks, part * MARK.size)).is_with(first):
            return None
    # A node may have more workers by now: one of them may write before the first has begun.
    behind = marks[first.parts * MARK.size : SENT_AT]
    others = MARK.iter_unpack(behind) if behind.strip(b"\0") else ()
    return None if any(SnapshotMark(*one).begun >= first.begun for one in others) else first


def slot_after(
    marks: Sequence[SnapshotMark | None], number: int, *, later_count: bool = False
) -> int:
    """Return the slot for a snapshot or its copy: not that of the newest whole one before it.

    Args:
        marks: of what is whole, by slot.
        number: of the snapshot.
        later_count: those of greater numbers, too. If not, they are of a state that was left for an
            older one, and may be overwritten.
    """
    before = [
        (mark.generation, mark.number, slot)
        for slot, mark in enumerate(marks)
        if mark is not None and (later_count or mark.number < number)
    ]
    taken = max(before)[2] if before else number - 1
    return (taken + 1) % len(marks)


def set_sent(descriptor: int, number: int) -> None:
    """Mark the snapshot that the agent is sending, 0 for none: it should not be overwritten."""
    os.pwrite(descriptor, SENT.pack(number), SENT_AT)


def set_arrived(descriptor: int, mark: SnapshotMark) -> None:
    os.pwrite(descriptor, ARRIVED.pack(mark.steps, mark.generation), ARRIVED_AT)


def forget_arrived(descriptor: int) -> None:
    """Mark no snapshot as arrived on another node."""
    os.pwrite(descriptor, ARRIVED.pack(0, 0), ARRIVED_AT)


def set_copying(descriptor: int, bringing: CopyMode) -> None:
    """Mark whether snapshots are copied to another node."""
    os.pwrite(descriptor, BRINGING.pack(bringing), COPYING_AT)


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroups: Path = cgroup.ROOT
) -> int | None:
    """Return the available bytes of this node or container, None if unknown."""
    try:
        lines = meminfo.read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        left = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    in_group = cgroup.memory_left(cgroups)
    return left if in_group is None else min(left, in_group)


def check_room(num_bytes: int, what: str, share: float = MEMORY_SHARE) -> None:
    """Fail early, where the kernel would otherwise kill a process for memory later.

    Args:
        num_bytes: requested.
        what: for the error text, such as "a snapshot".
        share: fraction of the available memory that may be used.

    Raises:
        OSError: there is too little memory.
    """
    left = available_memory()
    if left is not None and num_bytes > left * share:
        raise OSError(
            errno.ENOMEM, f"{what} needs {num_bytes} bytes, {left} are available on this node"
        )

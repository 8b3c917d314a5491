"""How snapshots lie in memory that processes share: what is written before the tensors.

    0        marks: one for each worker on this node
    16320    the agent's: number of the snapshot that it is sending to another node, 0 for none
    16328    number and generation of the one here that has arrived there, 0 for none
    16344    whether it brings any, see `core.policy.replication.Bringing`
    16384    tensors, end to end, each aligned to 64 bytes
             then all that is no tensor

Rule: a mark is written after what it stands for, and taken away before that changes. Whoever reads
looks at the marks before and after: if they are the same, so was what lies between.
"""

from __future__ import annotations

import errno
import os
import struct
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
"""Of the memory that is available: the rest is for whatever training allocates next."""


class SnapshotMark(NamedTuple):
    """What a worker says of its part of a snapshot.

    Attributes:
        number: of the snapshot in its run, >= 1; 0 for none.
        generation: of the group that took it: after a loss, a number may come again.
        steps: committed in the run when it was taken.
        parts: the node's workers that share it.
        data_bytes: of all tensors.
        tensors: fingerprint of which they are, and where each lies.
        skeleton_bytes: of all that is no tensor.
        skeleton_crc: CRC-32 of that.
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
        """Return whether both are of the same snapshot, of the same or of different parts."""
        return other is not None and self[:OF_ALL] == other[:OF_ALL]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the snapshot, behind the marks."""
        return self.data_bytes + self.skeleton_bytes


OF_ALL = 6
"""Fields of a mark that are alike for all parts; text outside of tensors is one worker's word."""


def whole(marks: bytes) -> SnapshotMark | None:
    """Return the mark of a snapshot that all workers of the node have marked alike.

    Args:
        marks: the first `HEADER` bytes of the memory; fewer hold none.
    """
    if len(marks) < HEADER:
        return None
    first = SnapshotMark(*MARK.unpack_from(marks, 0))
    if not first.number or not 1 <= first.parts <= MARKS_MAX:
        return None
    for part in range(1, first.parts):
        if not SnapshotMark(*MARK.unpack_from(marks, part * MARK.size)).is_with(first):
            return None
    return first


def set_sent(descriptor: int, number: int) -> None:
    """Say that the agent sends this snapshot now, 0 for none: it should not be written over."""
    os.pwrite(descriptor, SENT.pack(number), SENT_AT)


def set_arrived(descriptor: int, mark: SnapshotMark) -> None:
    """Say that another node has this snapshot."""
    os.pwrite(descriptor, ARRIVED.pack(mark.number, mark.generation), ARRIVED_AT)


def forget_arrived(descriptor: int) -> None:
    """Say that no node is known to have any snapshot that is here."""
    os.pwrite(descriptor, ARRIVED.pack(0, 0), ARRIVED_AT)


def set_copying(descriptor: int, bringing: CopyMode) -> None:
    """Say whether snapshots are brought to another node."""
    os.pwrite(descriptor, BRINGING.pack(bringing), COPYING_AT)


def available_memory() -> int | None:
    """Return the bytes that this node can still give away, None if that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        left = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    in_group = cgroup.memory_left()
    return left if in_group is None else min(left, in_group)


def check_room(num_bytes: int, what: str, share: float = MEMORY_SHARE) -> None:
    """Say no now, where the kernel would kill somebody later.

    Args:
        num_bytes: that are wanted.
        what: for people, such as "a snapshot".
        share: of what is available that may be taken.

    Raises:
        OSError: there is not that much memory.
    """
    left = available_memory()
    if left is not None and num_bytes > left * share:
        raise OSError(
            errno.ENOMEM, f"{what} needs {num_bytes} bytes, {left} are available on this node"
        )

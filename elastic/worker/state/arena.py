"""Snapshots of the training state in memory that outlives the processes that made them.

The memory belongs to the agent: it makes two anonymous files for each job of its node, the
workers map them, and the kernel frees them when agent and workers are gone. A snapshot goes into
one of them while the other holds the one before, which so stays whole.

How it is laid out, and what marks are, is in `elastic.runtime.snapshot_memory`. Each worker of a
node copies its part of the tensors, and marks it.

Rule: a mark is written after what it stands for, and taken away before that changes. A snapshot
is whole if all workers of the node have marked it alike; a worker that dies in the middle leaves
one that is not, and the other slot as it was.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elastic.core.policy.replication import CopyMode
from elastic.core.policy.shares import RowRange, TensorExtent, TensorRows, merged
from elastic.errors import UsageError, check
from elastic.runtime.snapshot_memory import (
    ARRIVED,
    ARRIVED_AT,
    BRINGING,
    COPYING_AT,
    HEADER,
    MARK,
    MARKS_MAX,
    SENT,
    SENT_AT,
    SnapshotMark,
    check_room,
    whole,
)
from elastic.worker.group.accelerators import Accelerator, accelerator_of
from elastic.worker.state.packing import TensorSpec, read_skeleton, tensors_of, unpack
from elastic.worker.state.sharded_state import Held, without_held

log = logging.getLogger(__name__)

ALIGN = 64
MADV_POPULATE_WRITE = 23


@dataclass(frozen=True)
class StateLayout:
    """Where the tensors of a state lie.

    Attributes:
        specs: of the tensors, by number.
        offsets: of their first bytes, from the beginning of the data.
        data_bytes: of all.
        held: rows of each that are there, None for all of them; () if all tensors are whole.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    data_bytes: int
    held: Held = ()

    @staticmethod
    def of(specs: Sequence[TensorSpec], held: Held = ()) -> StateLayout:
        """Lay tensors end to end, or what is held of them."""
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            rows = held[spec.number] if held else None
            size = size_of(spec) if rows is None else _span(rows).rows * extent_of(spec).row_bytes
            end = _aligned(end + size)
        return StateLayout(tuple(specs), tuple(offsets), end, held)

    def offset_of(self, piece: TensorRows) -> int:
        """Return where a piece begins, from the beginning of the data."""
        rows = self.held[piece.tensor] if self.held else None
        first = piece.first - (0 if rows is None else _span(rows).first)
        row_bytes = extent_of(self.specs[piece.tensor]).row_bytes
        return self.offsets[piece.tensor] + first * row_bytes

    def extents(self) -> list[TensorExtent]:
        return [extent_of(spec) for spec in self.specs]


def _span(held: Sequence[RowRange]) -> RowRange:
    """Return the rows from the first to the last one that is held."""
    return RowRange(held[0].first, held[-1].end - held[0].first) if held else RowRange(0, 0)


def size_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_of(spec).itemsize


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def extent_of(spec: TensorSpec) -> TensorExtent:
    if not spec.shape:
        return TensorExtent(1, size_of(spec))
    return TensorExtent(spec.shape[0], size_of(spec) // max(1, spec.shape[0]))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


class PinnedMemory:
    """Pages of a mapping that a device copies to directly.

    Attributes:
        spans: of bytes from the beginning of the mapping.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        spans: Sequence[RowRange],
        accelerator: Accelerator,
        device: torch.device,
    ) -> None:
        """Register whole pages, none twice, all or none; OSError if the device refuses.

        The memory stays mapped until they are released.
        """
        self.spans = tuple(spans)
        self._memory, self._accelerator = memory, accelerator
        self._addresses: list[int] = []
        first = _address_of(memory)
        try:
            for span in spans:
                accelerator.register(device, first + span.first, span.rows)
                self._addresses.append(first + span.first)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Take all of it back, before anything is unmapped."""
        while self._addresses:
            try:
                self._accelerator.unregister(self._addresses.pop())
            except OSError as error:
                log.warning("snapshot_unpinned error=%r", str(error))


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class SnapshotSlot:
    """Memory for one snapshot."""

    def __init__(self, path: str = "") -> None:
        """Open the memory.

        Args:
            path: of the agent's; "" for memory of our own.

        Raises:
            OSError: it cannot be opened.
        """
        if path:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._fd = os.memfd_create("elastic-snapshot", os.MFD_CLOEXEC)
        # Also without `close`: a writer may have it longer than its maker, and also longer
        # than functions that are registered with atexit run: threads continue meanwhile.
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        self._map: mmap.mmap | None = None
        self._pinned: PinnedMemory | None = None
        self._release: Callable[[], object] = lambda: None
        # What was copied last, and the places that it was copied to.
        self._targets: tuple[Any, list[torch.Tensor]] | None = None

    @property
    def identity(self) -> int:
        """Return a number > 0 that is equal for all who have this memory, on this machine."""
        return os.fstat(self._fd).st_ino % (1 << 62) + 1

    def close(self) -> None:
        """Release the memory; it is freed once no process has it any more."""
        self._unpin()
        self._map = self._targets = None
        self._close()

    # ------------------------------------------------------------------------------------ size

    def reserve(self, num_bytes: int) -> None:
        """Make room for so many bytes behind the marks; OSError without memory."""
        need = HEADER + num_bytes
        size = os.fstat(self._fd).st_size
        if size < need:
            check_room(need - size, "a snapshot")
            # Not `ftruncate`: a worker beside us may have made it longer since we checked, and what
            # it maps must not end under it (SIGBUS).
            os.posix_fallocate(self._fd, need - 1, 1)
        if self._map is None or len(self._map) < need:
            # What still reads the old mapping keeps it.
            self._unpin()
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)

    def warm_up(self, num_bytes: int) -> None:
        """Have the kernel find the pages now, and not when the training loop waits for them.

        Takes a while, without holding the interpreter. OSError if there is not that much
        memory.
        """
        self.reserve(num_bytes)
        os.posix_fallocate(self._fd, 0, HEADER + num_bytes)
        memory = self._mapped()
        address = ctypes.c_void_p(_address_of(memory))
        # An old kernel refuses: then the first copies are slower.
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(len(memory)), MADV_POPULATE_WRITE)

    def pin(self, layout: StateLayout, pieces: Sequence[TensorRows], device: torch.device) -> None:
        """Let a device copy to the places of these pieces directly, and to no others.

        Takes seconds for much memory, without holding the interpreter. The pages stay until the
        memory is mapped anew, or released.

        Args:
            layout: of all tensors; there is room for it.
            pieces: ours.
            device: one of those that copy.

        Raises:
            OSError: the device refuses; copies are right all the same, and slower.
        """
        accelerator = accelerator_of(device)
        if accelerator is None or self.is_pinned(layout, pieces):
            return
        self._unpin()
        spans = self._pages_of(layout, pieces)
        self._pinned = PinnedMemory(self._mapped(), spans, accelerator, device)
        # Also without `close`: what was registered must not be unmapped.
        release = self._release = weakref.finalize(self, self._pinned.release)
        release.atexit = False  # The process's end takes it back, and the device may be gone first.

    def is_pinned(self, layout: StateLayout, pieces: Sequence[TensorRows]) -> bool:
        """Return whether a device can copy to the places of these pieces directly."""
        return self._pinned is not None and self._pinned.spans == self._pages_of(layout, pieces)

    def _pages_of(self, layout: StateLayout, pieces: Sequence[TensorRows]) -> tuple[RowRange, ...]:
        """Return the spans of bytes of whole pages in which these pieces lie."""
        found = []
        for piece in pieces:
            begin = HEADER + layout.offset_of(piece)
            end = begin + piece.rows * extent_of(layout.specs[piece.tensor]).row_bytes
            if begin < end:
                first = begin // mmap.PAGESIZE * mmap.PAGESIZE
                found.append(RowRange(first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - first))
        return merged(found)

    def _unpin(self) -> None:
        self._release()
        self._pinned = None

    # ------------------------------------------------------------------------------------ marks

    def unmark(self, part: int, generation: int = 0, number: int = 0) -> None:
        """Mark a part as about to change, for a snapshot of this generation and number."""
        check(part < MARKS_MAX, f"worker {part} of a node: at most {MARKS_MAX}")
        self.reserve(0)
        begun = SnapshotMark.copying(generation, number)
        MARK.pack_into(self._mapped(), part * MARK.size, *begun)

    def mark(self, part: int, mark: SnapshotMark) -> None:
        """Mark a part as there; the number, which makes it count, is written last."""
        at = part * MARK.size
        MARK.pack_into(self._mapped(), at, *mark._replace(number=0))
        struct.pack_into("<Q", self._mapped(), at, mark.number)

    def whole(self) -> SnapshotMark | None:
        """Return the mark of the snapshot in this slot, None if it is not whole."""
        if os.fstat(self._fd).st_size < HEADER:
            return None
        self.reserve(0)
        return whole(self._mapped()[:HEADER])

    def is_sent(self) -> bool:
        """Return whether the agent is sending what is in this slot to another node."""
        if os.fstat(self._fd).st_size < HEADER:
            return False
        self.reserve(0)
        return SENT.unpack_from(self._mapped(), SENT_AT)[0] != 0

    def is_being_copied(self) -> bool:
        """Return whether a worker that may live has begun to copy to this slot, and not ended."""
        if os.fstat(self._fd).st_size < HEADER:
            return False
        self.reserve(0)
        marks = (SnapshotMark(*one) for one in MARK.iter_unpack(self._mapped()[:SENT_AT]))
        return any(one.begun != (0, 0) and not one.number for one in marks)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep out all other processes that ask for this, for a block."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def copy_progress(self) -> tuple[CopyMode, tuple[int, int]]:
        """Return whether the agent copies snapshots to another node, and which one has arrived.

        That one is given by its steps and generation.
        """
        if os.fstat(self._fd).st_size < HEADER:
            return CopyMode.UNKNOWN, (0, 0)
        self.reserve(0)
        steps, generation = ARRIVED.unpack_from(self._mapped(), ARRIVED_AT)
        mode = BRINGING.unpack_from(self._mapped(), COPYING_AT)[0]
        return CopyMode(min(mode, CopyMode.OFF)), (steps, generation)

    def fill(self, mark: SnapshotMark, read: Callable[[memoryview], object]) -> None:
        """Take a whole snapshot from elsewhere; OSError without memory."""
        self.reserve(mark.num_bytes)
        read(memoryview(self._mapped())[HEADER : HEADER + mark.num_bytes])
        self.mark(0, mark._replace(parts=1))

    def has_other_than(self, mark: SnapshotMark) -> bool:
        """Return whether a worker has marked another state as this snapshot."""
        self.reserve(0)
        found = (
            SnapshotMark(*MARK.unpack_from(self._mapped(), part * MARK.size))
            for part in range(mark.parts)
        )
        return any(one[:3] == mark[:3] and not one.is_with(mark) for one in found)

    # ------------------------------------------------------------------------------------ content

    def put(
        self, layout: StateLayout, tensors: Sequence[torch.Tensor], pieces: Sequence[TensorRows]
    ) -> None:
        """Copy pieces of tensors to their places.

        Args:
            layout: of all tensors; there is room for it.
            tensors: of the state, by number, on any device.
            pieces: ours.
        """
        what = (self._mapped(), layout, tuple(pieces))
        if self._targets is None or self._targets[0] != what:
            # For hundreds of tensors this takes a tenth of the time of the copy itself.
            self._targets = what, [self.chunk(layout, piece) for piece in pieces]
        sources = []
        for piece in pieces:
            source = tensors[piece.tensor]
            if piece.rows != (source.shape[0] if source.dim() else 1):
                source = source[piece.first : piece.first + piece.rows]
            sources.append(source)
        if sources:
            torch._foreach_copy_(self._targets[1], sources, non_blocking=True)

    def put_skeleton(self, layout: StateLayout, skeleton: bytes) -> None:
        """Copy what is no tensor behind the tensors."""
        start = HEADER + layout.data_bytes
        self._mapped()[start : start + len(skeleton)] = skeleton

    def chunk(self, layout: StateLayout, piece: TensorRows) -> torch.Tensor:
        """Return a piece as a tensor over this memory, with a storage of its own."""
        spec = layout.specs[piece.tensor]
        extent = extent_of(spec)
        shape = (piece.rows, *spec.shape[1:]) if spec.shape else ()
        num_bytes = piece.rows * extent.row_bytes
        if not num_bytes:
            return torch.empty(shape, dtype=dtype_of(spec))
        start = HEADER + layout.offset_of(piece)
        memory = memoryview(self._mapped())[start : start + num_bytes]
        return torch.frombuffer(memory, dtype=dtype_of(spec)).reshape(shape)

    def skeleton(self, mark: SnapshotMark) -> bytes:
        """Return all that is no tensor; ValueError if it is not what was put here."""
        self.reserve(mark.data_bytes + mark.skeleton_bytes)
        start = HEADER + mark.data_bytes
        text = bytes(self._mapped()[start : start + mark.skeleton_bytes])
        if zlib.crc32(text) != mark.skeleton_crc:
            raise ValueError("the snapshot's checksum does not fit")
        return text

    def state(self, mark: SnapshotMark) -> Any:
        """Return the state of a whole snapshot; its tensors are copies.

        ValueError if it is damaged, or of a sharded model.
        """
        text, held = without_held(self.skeleton(mark))
        if held is not None:
            raise ValueError(f"the snapshot of step {mark.steps} is of a sharded model")
        skeleton = read_skeleton(text)
        _, tensors = self.tensors(skeleton)
        return unpack(skeleton, [tensor.clone() for tensor in tensors])

    def tensors(self, skeleton: Any, held: Held = ()) -> tuple[StateLayout, list[torch.Tensor]]:
        """Return layout and tensors of the snapshot; they are views of this memory.

        Of a tensor that is not there as a whole only type and shape are returned.
        """
        layout = StateLayout.of(tensors_of(skeleton), held)
        found = []
        for number, (spec, extent) in enumerate(zip(layout.specs, layout.extents(), strict=True)):
            if held and held[number] is not None:
                found.append(torch.empty(spec.shape, dtype=dtype_of(spec), device="meta"))
            else:
                found.append(self.chunk(layout, TensorRows(number, 0, extent.rows)))
        return layout, found

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise UsageError("a snapshot's memory was used before it was reserved")
        return self._map

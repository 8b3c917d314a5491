"""Memory that the other ranks of a node read in place, so that buckets need not be sent to them.

Each tensor is a part of an anonymous file of its process, which the others open under
`/proc/PID/fd/N` and map, once. The kernel frees it when no process has it open any more, however
its owner ended. What a dead owner left half-written is never read, because it was not announced.

Rule: the owner writes only what its peers have finished reading, which they report by message. For
a new group the owner takes new memory, because a member of the old one may still be reading.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch

from elastic.errors import GroupBroken

PAGE = mmap.PAGESIZE
Where = tuple[int, int, int]
"""Descriptor and inode of a file in its owner's process, and the tensor's offset in it."""


class OwnMemory:
    """Tensors of this process that others can read."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("elastic-buckets", os.MFD_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._size = 0
        self._starts: dict[int, int] = {}
        weakref.finalize(self, os.close, self._fd).atexit = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor of so many elements, at least one; OSError without memory."""
        num_bytes, start = numel * dtype.itemsize, self._size
        self._size += -(-num_bytes // PAGE) * PAGE
        os.ftruncate(self._fd, self._size)
        tensor = torch.frombuffer(mmap.mmap(self._fd, num_bytes, offset=start), dtype=dtype)
        self._starts[tensor.data_ptr()] = start
        return tensor

    def where(self, tensor: torch.Tensor) -> Where:
        return self._fd, self._inode, self._starts[tensor.data_ptr()]

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._starts


class PeerMemory:
    """Tensors of another process of this node, to be read."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[Where, torch.Tensor] = {}

    def tensor(self, where: Where, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the other process; GroupBroken if the process is gone."""
        known = self._seen.get(where)
        if known is None:
            # Its owner has taken a new file: it shows nothing in the one before any more.
            self._seen = {at: one for at, one in self._seen.items() if at[1] == where[1]}
            known = self._seen[where] = self._map(where, numel, dtype)
        return known

    def _map(self, where: Where, numel: int, dtype: torch.dtype) -> torch.Tensor:
        number, inode, start = where
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._is_gone() from error
        try:
            if os.fstat(fd).st_ino != inode:  # The descriptor was reused by another file.
                raise self._is_gone()
            mapped = mmap.mmap(fd, numel * dtype.itemsize, offset=start)
        finally:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=dtype)

    def _is_gone(self) -> GroupBroken:
        return GroupBroken(f"shared memory: Connection closed by peer, process {self._pid}")

"""Memory that the other ranks of a node read in place: buckets that need not be sent to them.

Each tensor is a part of an anonymous file of its process, which the others open under
`/proc/PID/fd/N` and map, once. The kernel frees it when nobody has it any more, however its owner
ended; what a dead owner left half-written is read by nobody, for it has not said that it is ready.

Rule: the owner writes only what its peers have no reason to read: they have told that they are
through, by a message that could not be sent before. With a new group the owner takes new memory,
because a member of the old one may be anywhere in its last exchange.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch

PAGE = mmap.PAGESIZE
Where = tuple[int, int, int]
"""Descriptor and inode of a file, as its owner has them, and where a tensor begins."""


class OwnMemory:
    """Tensors of this process that others can read."""

    def __init__(self) -> None:
        """Begin with none."""
        self._fd = os.memfd_create("elastic-buckets", os.MFD_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._size = 0
        self._starts: dict[int, int] = {}
        weakref.finalize(self, os.close, self._fd).atexit = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of so many elements, at least one.

        Raises:
            OSError: there is not that much memory.
        """
        num_bytes, start = numel * dtype.itemsize, self._size
        self._size += -(-num_bytes // PAGE) * PAGE
        os.ftruncate(self._fd, self._size)
        tensor = torch.frombuffer(mmap.mmap(self._fd, num_bytes, offset=start), dtype=dtype)
        self._starts[tensor.data_ptr()] = start
        return tensor

    def where(self, tensor: torch.Tensor) -> Where:
        """Return where others find one of these tensors."""
        return self._fd, self._inode, self._starts[tensor.data_ptr()]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of these."""
        return tensor.data_ptr() in self._starts


class PeerMemory:
    """The same of another process of this node."""

    def __init__(self, pid: int) -> None:
        """Look at this process's."""
        self._pid = pid
        self._seen: dict[Where, torch.Tensor] = {}

    def tensor(self, where: Where, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of its owner's, to be read.

        Args:
            where: as its owner's `OwnMemory.where` says.
            numel: elements that it has.
            dtype: their type.

        Raises:
            RuntimeError: its owner is gone.
        """
        known = self._seen.get(where)
        if known is None:
            known = self._seen[where] = self._map(where, numel, dtype)
        return known

    def _map(self, where: Where, numel: int, dtype: torch.dtype) -> torch.Tensor:
        number, inode, start = where
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._is_gone() from error
        try:
            if os.fstat(fd).st_ino != inode:  # The number is another file's by now.
                raise self._is_gone()
            mapped = mmap.mmap(fd, numel * dtype.itemsize, offset=start)
        finally:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=dtype)

    def _is_gone(self) -> RuntimeError:
        return RuntimeError(f"shared memory: Connection closed by peer, process {self._pid}")

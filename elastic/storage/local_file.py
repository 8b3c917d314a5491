"""A new file on a local disk; a large one is written with `O_DIRECT`, without the page cache.

Checkpoints are gigabytes, and are rarely read. Writing them through the page cache costs a copy
into fresh pages, evicts the data that training reads again in the next epoch, and reaches the disk
in one burst at the end; `O_DIRECT` avoids all of that. Small files, and file systems that refuse
`O_DIRECT`, use the page cache.

Rule: the file's content is the same either way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

ALIGN = 4096
"""Alignment that `O_DIRECT` needs for offsets, sizes and addresses; a memory page is aligned."""
BUFFER_BYTES = 4 << 20
REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class LocalFile:
    """A new file that is written sequentially, once; for use in a `with` block.

    Its methods raise `OSError`.
    """

    def __init__(self, path: str, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Create the file.

        Args:
            path: of the file.
            buffer_bytes: size of the write buffer, a multiple of `ALIGN`.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._buffer_bytes = buffer_bytes
        self._used = 0
        self._is_direct = False
        self._may_be_direct = True

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, view: memoryview) -> None:
        if self._buffer is None:
            # Anonymous memory is page-aligned, as `O_DIRECT` needs it.
            self._buffer = np.frombuffer(mmap.mmap(-1, self._buffer_bytes), np.uint8)
        data = np.frombuffer(view, np.uint8)
        while data.size:
            count = min(data.size, self._buffer_bytes - self._used)
            # NumPy releases the GIL for the training loop; a memoryview slice would not.
            np.copyto(self._buffer[self._used : self._used + count], data[:count])
            self._used += count
            data = data[count:]
            if self._used == self._buffer_bytes:
                self._try_direct()
                self._write_out(self._used)

    def finish(self) -> None:
        """Write the rest of the buffer, and sync the file to the disk."""
        if self._used:
            whole = self._used - self._used % ALIGN
            if whole and self._is_direct:
                self._write_out(whole)
            self._set_direct(False)
            self._write_out(self._used)
        os.fsync(self._fd)

    def _write_out(self, count: int) -> None:
        """Write the first bytes of the buffer, and move the others to its front."""
        if self._buffer is None or not count:
            return
        done = 0
        while done < count:
            try:
                done += os.write(self._fd, self._buffer[done:count].data)
            except OSError as error:
                if not self._is_direct or error.errno not in REFUSED:
                    raise
                self._set_direct(False)  # Some file systems accept the flag but refuse the write.
                continue
            if done % ALIGN:
                self._set_direct(False)  # A short write, such as on a nearly full disk.
        remaining = self._used - count
        self._buffer[:remaining] = self._buffer[count : self._used].copy()
        self._used = remaining

    def _try_direct(self) -> None:
        if self._may_be_direct and not self._is_direct:
            self._may_be_direct = False  # Only once: afterwards the offset may be unaligned.
            self._set_direct(True)

    def _set_direct(self, wanted: bool) -> None:
        if wanted is self._is_direct:
            return
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        except OSError as error:
            if not wanted or error.errno not in REFUSED:
                raise
            return
        self._is_direct = wanted

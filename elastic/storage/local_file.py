"""A new file on a local disk, written past the page cache once it is large.

Checkpoints are written by the gigabyte and hardly ever read. Through the page cache they cost a
processor a copy into fresh pages, evict the data that training reads again in the next epoch, and
reach the disk in one burst at the end; `O_DIRECT` does none of that. Small files, and file systems
that refuse it, go the usual way.

Rule: what reaches the file is what was written, whichever way it went.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from types import TracebackType

import numpy as np
import numpy.typing as npt

ALIGN = 4096
"""What disks want of offsets, sizes and addresses; a page of memory is as large, or larger."""
BUFFER_BYTES = 4 << 20
REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class LocalFile:
    """A file that is written from its beginning to its end, once; to be used in a `with` block."""

    def __init__(self, path: str, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Begin a file, or begin one anew.

        Args:
            path: of it.
            buffer_bytes: collected before they are written, a multiple of `ALIGN`.

        Raises:
            OSError: it cannot be opened.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._buffer_bytes = buffer_bytes
        self._used = 0
        self._is_direct = False
        self._may_be_direct = True

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def write(self, view: memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: they cannot be written.
        """
        if self._buffer is None:
            # Anonymous memory begins at a page, as `O_DIRECT` wants it.
            self._buffer = np.frombuffer(mmap.mmap(-1, self._buffer_bytes), np.uint8)
        data = np.frombuffer(view, np.uint8)
        while data.size:
            count = min(data.size, self._buffer_bytes - self._used)
            # NumPy lets the training loop run meanwhile; a slice of a memoryview would not.
            np.copyto(self._buffer[self._used : self._used + count], data[:count])
            self._used += count
            data = data[count:]
            if self._used == self._buffer_bytes:
                self._try_direct()
                self._write_out(self._used)

    def finish(self) -> None:
        """Write what is left, and have all of it on the disk.

        Raises:
            OSError: it cannot be written.
        """
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
                self._set_direct(False)  # Said yes when it was asked, and means no.
                continue
            if done % ALIGN:
                self._set_direct(False)  # A short write, as before a full disk.
        rest = self._used - count
        self._buffer[:rest] = self._buffer[count : self._used].copy()
        self._used = rest

    def _try_direct(self) -> None:
        if self._may_be_direct and not self._is_direct:
            self._may_be_direct = False  # Once: a file that has left it has an odd place.
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

"""Atomic creation of files: a temporary name that is renamed, or an object written at once.

Rule: after an interruption at any point no partial file has the final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from elastic.storage.faults import is_name_taken
from elastic.storage.local_file import LocalFile

PARTIAL = ".partial"
PARTIAL_NAME = re.compile(r".*\.[0-9a-f]{8}\.partial")
"""Of a file that is being written, or was when its writer was killed."""
CHUNK_BYTES = 4 << 20
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class OutputFile:
    """A file that is being written; tracks its size and CRC-32, and whether a write failed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size, self.crc32 = 0, 0
        self.failed = False

    def write(self, data: Any) -> int:
        """Append bytes, or anything with a buffer."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        try:
            self._file.write(view)
        except Exception:
            self.failed = True
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: the end of the `with` block makes all of it durable."""


@contextlib.contextmanager
def local_output(final: str) -> Iterator[OutputFile]:
    """Yield a local file that has its final name, and is durable, after the `with` block."""
    folder = os.path.dirname(final)
    make_folder(folder)
    partial = _partial(final)
    with _removed_on_error(partial):
        with LocalFile(partial) as file:
            yield OutputFile(file)
            file.finish()
        os.replace(partial, final)
    _sync_folder(folder)


@contextlib.contextmanager
def object_output(fs: Any, final: str) -> Iterator[OutputFile]:
    """Yield an object that exists after the `with` block, and not at all if that raises."""
    file = fs.open(final, "wb")
    try:
        yield OutputFile(file)
        file.close()
    except BaseException:
        # Do not close it: that would complete a partial object under its final name.
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            file.closed = True
        raise


@contextlib.contextmanager
def renamed_output(fs: Any, final: str) -> Iterator[OutputFile]:
    """Yield a file of another file system that has its final name after the `with` block."""
    fs.makedirs(final.rpartition("/")[0], exist_ok=True)
    partial = _partial(final)
    try:
        with fs.open(partial, "wb") as file:
            yield OutputFile(file)
        fs.mv(partial, final)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(partial)
        raise


def create_local(final: str, data: bytes) -> bool:
    """Write a local file unless the name is taken; return whether it was written."""
    folder = os.path.dirname(final)
    make_folder(folder)
    partial = _partial(final)  # Of several processes that try at once, one link succeeds.
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if os.path.lexists(final):  # A file system without hard links.
                return False
            os.replace(partial, final)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)
    _sync_folder(folder)
    return True


def create_object(fs: Any, final: str, data: bytes) -> bool:
    """Write an object unless the name is taken; return whether it was written."""
    try:
        fs.pipe_file(final, data, mode="create")
    except (NotImplementedError, TypeError, OSError) as error:
        if is_name_taken(error):
            return False
        # A store or client without conditional writes.
        if isinstance(error, OSError) and error.errno != errno.ENOSYS:
            raise
        fs.invalidate_cache()
        try:
            fs.info(final)
        except FileNotFoundError:
            fs.pipe_file(final, data)
        else:
            return False
    return True


def open_regular(path: str) -> BinaryIO:
    """Open a local regular file to read.

    Raises:
        OSError: it does not exist, or is a pipe or a device, which might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def append_local(path: str, data: bytes) -> None:
    """Append lines to a local file that has no other writer; a partial append is undone.

    An unfinished line of a killed writer is ended first, so that it does not merge with ours.
    """
    make_folder(os.path.dirname(path))
    with open(path, "ab+", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        is_torn = before > 0 and os.pread(file.fileno(), 1, before - 1) != b"\n"
        try:
            remaining = memoryview(b"\n" + data if is_torn else data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def sync_local(path: str) -> None:
    """Have what was written to a local file, and its name, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(os.path.dirname(path))


def _partial(final: str) -> str:
    """Return a name that no other writer has: one of an older generation may still be writing."""
    return f"{final}.{secrets.token_hex(4)}{PARTIAL}"


@contextlib.contextmanager
def _removed_on_error(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def make_folder(folder: str) -> None:
    """Make a folder, and what is missing above it; each is durable in the one above."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        make_folder(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(above)


def _sync_folder(folder: str) -> None:
    """Make a rename durable, where the file system supports fsync of a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

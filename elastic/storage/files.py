"""Files below one directory, on any file system that fsspec has.

Rule: a name that is there is complete. Local files are written beside their name, forced to the
disk, and renamed; an object store shows an object only once it is whole. Every failure becomes a
`StorageError` that names the path and the reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.errors import StorageError
from elastic.storage.marker import StoredFile

PARTIAL = ".partial"
CHUNK_BYTES = 4 << 20


def reason_of(error: BaseException) -> str:
    """Return in words why storage refused; a full disk is called by its name."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full ({error.strerror})"
        if error.strerror:
            return error.strerror
    return f"{type(error).__name__}: {error}"


class Output:
    """A file that is being written; counts and sums up what goes through."""

    def __init__(self, file: Any) -> None:
        """Write to this file."""
        self._file = file
        self.size, self.crc32 = 0, 0

    def write(self, data: Any) -> int:
        """Append bytes, or anything with a buffer."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: the end of the `with` block makes all of it durable."""


class Files:
    """One directory; paths of its methods are relative to it, with slashes."""

    def __init__(self, path: str, filesystem: fsspec.AbstractFileSystem | None = None) -> None:
        """Touch nothing yet.

        Args:
            path: an fsspec path such as "/data/run" or "s3://bucket/run".
            filesystem: the one that `path` is in; by default the one that the path names.

        Raises:
            StorageError: no file system for such a path.
        """
        self.path = path.rstrip("/")
        if filesystem is not None:
            self.fs, self.root = filesystem, self.path
            return
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.path)
        except Exception as error:
            raise StorageError(f"storage {path}: {reason_of(error)}") from error

    @property
    def is_local(self) -> bool:
        """Return whether it lies in this machine's own file system (or one that is mounted)."""
        return isinstance(self.fs, LocalFileSystem)

    def at(self, name: str) -> str:
        """Return the path of a file or folder as the file system knows it."""
        return f"{self.root}/{name}" if name else str(self.root)

    # ---------------------------------------------------------------------------------- reading

    def exists(self, name: str) -> bool:
        """Return whether there is such a file or folder.

        Raises:
            StorageError: that cannot be found out.
        """
        with self._told(f"cannot read {self.path}/{name}"):
            self.fs.invalidate_cache()
            return bool(self.fs.exists(self.at(name)))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            StorageError: it cannot be read; `FileNotFoundError` is its cause if it is not there.
        """
        with self._told(f"cannot read {self.path}/{name}"):
            return bytes(self.fs.cat_file(self.at(name)))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Give the open file for the time of the `with` block.

        Raises:
            StorageError: it cannot be opened or read.
        """
        what = f"cannot read {self.path}/{name}"
        with self._told(what), self.fs.open(self.at(name), "rb") as file:
            yield file

    def tree(self) -> list[StoredFile]:
        """Return all files below the directory, by name, without their checksums.

        Raises:
            StorageError: the directory cannot be listed.
        """
        with self._told(f"cannot list {self.path}"):
            self.fs.invalidate_cache()
            found = self.fs.find(self.at(""), detail=True)
        skipped = len(str(self.root)) + 1
        return sorted(
            StoredFile(str(path)[skipped:], int(info["size"])) for path, info in found.items()
        )

    def checksum(self, name: str) -> StoredFile:
        """Return size and checksum of a file, after reading all of it.

        Raises:
            StorageError: it cannot be read.
        """
        size, crc32 = 0, 0
        with self.reading(name) as file:
            while chunk := file.read(CHUNK_BYTES):
                size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
        return StoredFile(name, size, crc32)

    def list(self, pattern: str) -> list[str]:
        """Return the names that match a glob pattern, sorted.

        Raises:
            StorageError: the directory cannot be listed.
        """
        with self._told(f"cannot list {self.path}/{pattern}"):
            self.fs.invalidate_cache()
            found = self.fs.glob(self.at(pattern))
        skipped = len(str(self.root)) + 1
        return sorted(str(path)[skipped:] for path in found)

    # ---------------------------------------------------------------------------------- writing

    def write(self, name: str, data: bytes) -> StoredFile:
        """Write a file, durable and whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        with self.writing(name) as output:
            output.write(data)
        return StoredFile(name, output.size, output.crc32)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Output]:
        """Give a file to write for the time of the `with` block; its name exists afterwards.

        Raises:
            StorageError: it cannot be written; nothing of that name is left then.
        """
        final = self.at(name)
        with self._told(f"cannot write {self.path}/{name}"):
            if not self.is_local:
                self.fs.makedirs(final.rpartition("/")[0], exist_ok=True)
                with self.fs.open(final, "wb") as file:
                    yield Output(file)
                return
            folder = os.path.dirname(final)
            os.makedirs(folder, exist_ok=True)
            partial = final + PARTIAL
            try:
                with open(partial, "wb") as file:
                    yield Output(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, final)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
            _sync_folder(folder)

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file.

        Raises:
            StorageError: it cannot be written.
        """
        with self._told(f"cannot write {self.path}/{name}"):
            self.fs.makedirs(self.at(name).rpartition("/")[0], exist_ok=True)
            with self.fs.open(self.at(name), "ab") as file:
                file.write(data)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it.

        Raises:
            StorageError: something cannot be deleted.
        """
        with self._told(f"cannot delete {self.path}/{name}"):
            self.fs.rm(self.at(name), recursive=True)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn what the file system raises into an error that says who, what and why."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{what}: {reason_of(error)}") from error


def _sync_folder(folder: str) -> None:
    """Make a rename durable, where the file system can do that for folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

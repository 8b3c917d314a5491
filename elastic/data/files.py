"""The files of a dataset: listed in a stable order, and read only if unchanged since.

Rule: a file is identified by its path, its size and its stamp (etag, checksum, or modification
time). One that has changed since the start of the run is refused with its name, because its rows
may differ.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from elastic.data.batches import arrow
from elastic.errors import StorageError, UsageError
from elastic.storage.faults import reason_of
from elastic.storage.files import PACKAGES
from elastic.storage.options import options_of

log = logging.getLogger(__name__)

STAMPS = ("ETag", "etag", "md5Hash", "checksum", "mtime", "LastModified", "last_modified")
"""Names, in different file systems, of a value that changes with the content; the surest first."""
TAIL_BYTES = 64 * 1024
"""Read at once from the end of a parquet file; usually includes the whole footer."""
ANONYMOUS = "://anonymous@"


class DataError(StorageError):
    """A file of a dataset cannot be read, has changed, or has unexpected content."""


@dataclass(frozen=True)
class File:
    """One file as listed.

    Attributes:
        path: with its protocol, such as "s3://bucket/a.parquet"; local ones are absolute.
        size: in bytes.
        stamp: changes with the content.
    """

    path: str
    size: int
    stamp: str


def filesystem_of(path: str, options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a path, and the path within it.

    "s3://anonymous@bucket/key", as Ray's examples have it, is read without credentials. UsageError
    if there is none for such a path, or its package is missing.
    """
    if ANONYMOUS in path:
        path = path.replace(ANONYMOUS, "://", 1)
        without = {"token": "anon"} if path.startswith(("gs://", "gcs://")) else {"anon": True}
        options = {**(options or {}), **without}
    try:
        # Rows that are kept with a run are opened as the run's directory is.
        given = {**options_of(path), **(options or {})}
        return fsspec.core.url_to_fs(path, **given)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(get_protocol(path), "")
        hint = f"; pip install {package}" if package else ""
        raise UsageError(f"elastic.data: no file system for {path!r}: {error}{hint}") from error


def find_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    extensions: Iterable[str] | None,
    options: dict[str, Any] | None = None,
) -> list[File]:
    """Return the files of paths, globs and folders, sorted within each of these.

    A folder means all files below it with one of these extensions, such as [".csv"], None for all;
    except those whose name, or whose folder's name, starts with "." or "_". DataError if a path
    matches no file.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise UsageError("elastic.data: an empty list of paths: expected at least one")
    ends = tuple("." + one.lstrip(".").lower() for one in extensions or ())
    found: list[File] = []
    for one in given:
        path = os.fspath(one)
        fs, root = filesystem_of(path, options)
        try:
            infos = _infos(fs, root)
        except FileNotFoundError:
            infos = []
        except Exception as error:
            raise DataError(f"elastic.data: cannot list {path}: {reason_of(error)}") from error
        is_one = len(infos) == 1 and infos[0]["name"].rstrip("/") == root.rstrip("/")
        if ends and not is_one:
            infos = [info for info in infos if info["name"].lower().endswith(ends)]
        if not infos:
            wanted = f" that ends with {' or '.join(ends)}" if ends else ""
            raise DataError(
                f"elastic.data: {path} leads to no file{wanted}: expected a file, a folder or a "
                f"pattern such as /data/*.parquet"
            )
        files = [_file(fs, info) for info in sorted(infos, key=lambda info: info["name"])]
        if ANONYMOUS in path:  # Their readers need to know it, too.
            files = [replace(file, path=file.path.replace("://", ANONYMOUS, 1)) for file in files]
        found.extend(files)
    return found


def _infos(fs: Any, root: str) -> list[dict[str, Any]]:
    fs.invalidate_cache()
    if glob.has_magic(root) and not fs.exists(root):
        matches = fs.glob(root, detail=True)
        return [one for name in sorted(matches) for one in _below(fs, matches[name])]
    return _below(fs, fs.info(root))


def _below(fs: Any, info: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a file itself, or all files below a folder that are not hidden ("." or "_")."""
    if info["type"] != "directory":
        return [info]
    root = info["name"].rstrip("/")
    found = fs.find(root, detail=True)
    return [
        one
        for name, one in found.items()
        if one["type"] != "directory"
        and not any(part.startswith((".", "_")) for part in PurePath(name[len(root) :]).parts)
    ]


def _file(fs: Any, info: dict[str, Any]) -> File:
    return File(fs.unstrip_protocol(info["name"]), int(info["size"] or 0), _stamp(info))


def _stamp(info: dict[str, Any]) -> str:
    for name in STAMPS:
        if info.get(name) is not None:
            return str(info[name]).strip('"')
    return ""


def check_unchanged(before: Sequence[File], now: Sequence[File], name: str) -> None:
    """Refuse a listing that differs from the one at the start of the run.

    The DataError names the first file that was added, removed or changed.
    """
    if list(before) == list(now):
        return
    old = {file.path: file for file in before}
    new = {file.path: file for file in now}
    begins = f"dataset {name!r}: the run has begun with other files:"
    ends = "put the files back as they were, or begin a new run under another name"
    for path in [*old, *new]:
        one, other = old.get(path), new.get(path)
        if one is None:
            raise DataError(f"{begins} {path} has come since; {ends}")
        if other is None:
            raise DataError(f"{begins} {path} is gone; {ends}")
        _refuse_changed(one, other, begins, ends)
    raise DataError(f"{begins} they are in another order; {ends}")


def _refuse_changed(one: File, other: File, begins: str, ends: str) -> None:
    if one != other:
        raise DataError(
            f"{begins} {one.path} had {one.size:,} bytes (stamp {one.stamp}) and has "
            f"{other.size:,} (stamp {other.stamp}) now; {ends}"
        )


@dataclass
class Reader:
    """Reads files of a dataset in this process.

    Attributes:
        options: for the file system.
        bytes_read: number of bytes read so far.
    """

    options: dict[str, Any] | None = None
    bytes_read: int = 0

    def __post_init__(self) -> None:
        """Start without checked files."""
        self._checked: set[File] = set()
        self._lock = threading.Lock()

    def check(self, file: File) -> tuple[Any, str]:
        """Check once that a file is unchanged; return its file system and its path there.

        Raises:
            DataError: it has changed, or was removed.
        """
        fs, path = filesystem_of(file.path, self.options)
        if file not in self._checked:
            try:
                fs.invalidate_cache()
                now = _file(fs, fs.info(path))
            except Exception as error:
                raise unreadable(file, error) from error
            begins = "a file of the dataset has changed since it was listed:"
            _refuse_changed(file, now, begins, "list it anew, in a new run under another name")
            self._checked.add(file)
        return fs, path

    def read(self, file: File, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of a file from `start` to `stop`; DataError if it has changed."""
        fs, path = self.check(file)
        try:
            found = bytes(fs.cat_file(path, start=start, end=stop))
        except Exception as error:
            raise unreadable(file, error) from error
        self._count(len(found))
        return found

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size

    def open(self, file: File, compression: str | None = None) -> Any:
        """Open a file for sequential reading, decompressed.

        The codec has Arrow's name, such as "gzip"; None for that of the file's name. DataError if
        it has changed, or cannot be opened.
        """
        fs, path = self.check(file)
        self._count(file.size)
        if compression is None and path.lower().endswith((".zst", ".zstd")):
            compression = "zstd"  # Which fsspec leaves to other packages.
        try:
            if compression is None:
                return fs.open(path, "rb", compression="infer")
            return arrow().CompressedInputStream(fs.open(path, "rb"), compression)
        except Exception as error:
            raise unreadable(file, error) from error


def unreadable(file: File, error: Exception) -> DataError:
    """Return the error of a file that cannot be read, with its name."""
    return DataError(f"elastic.data: cannot read {file.path}: {reason_of(error)}")


class RangedFile(io.RawIOBase):
    """A file of which one range is fetched in advance, in one request; the rest on demand."""

    def __init__(self, reader: Reader, file: File, start: int, stop: int) -> None:
        """Fetch the range.

        Args:
            reader: reads the file, and counts the bytes.
            file: the file.
            start: offset of the range, in bytes.
            stop: end of the range, exclusive.
        """
        super().__init__()
        self._reader = reader
        self._file = file
        self._start = max(0, start)
        self._held = reader.read(file, self._start, min(stop, file.size))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        remaining = self._file.size - self._at
        size = remaining if size is None or size < 0 else min(size, remaining)
        begin = self._at - self._start
        if begin >= 0 and begin + size <= len(self._held):
            found = self._held[begin : begin + size]
        else:
            found = self._reader.read(self._file, self._at, self._at + size)
        self._at += len(found)
        return found


def chunks(file: Any, size: int) -> Iterator[bytes]:
    """Yield the rest of an open file, in pieces."""
    while piece := file.read(size):
        yield piece

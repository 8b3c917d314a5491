"""Files below one directory, on any file system that fsspec supports.

Rule: an existing name is a complete file. Files are written under a temporary name, synced to the
disk if local, and renamed; an object store makes an object visible only once it is complete.
Idempotent operations are retried after a transient fault (`patience_s`); every failure becomes a
`StorageError` that names the path and the reason.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.errors import InvariantViolation, StorageError
from elastic.storage import outputs
from elastic.storage.faults import is_about_credentials, reason_of
from elastic.storage.marker import StoredFile
from elastic.storage.names import check_inside
from elastic.storage.options import options_of
from elastic.storage.outputs import CHUNK_BYTES, OutputFile
from elastic.storage.retry import TIMEOUT_S, with_timeout

log = logging.getLogger(__name__)

T = TypeVar("T")
READ_BYTES_MAX = 64 << 20
"""Limit for a file that is read as a whole: markers, manifests, records of a run."""
Names = list[str]

OBJECT_STORES = frozenset({
    "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "r2", "b2", "hf",
})  # fmt: skip
"""Schemes without folders and append, where a name exists only once its object is complete."""
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs",
    "az": "adlfs", "oss": "ossfs", "oci": "ocifs", "tos": "tosfs", "sftp": "paramiko",
    "ssh": "paramiko", "smb": "smbprotocol", "hdfs": "pyarrow", "hf": "huggingface_hub",
    "webdav": "webdav4", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip


class Files:
    """One directory; paths of its methods are relative to it, with slashes.

    What reads or writes raises `StorageError`, also for a name that leads out of the directory.

    Attributes:
        path: as given by the caller.
        fs: fsspec's file system; replaced when credentials are read again.
        root: path of the directory for the file system.
        patience_s: how long transient faults are retried.
    """

    def __init__(
        self,
        path: str,
        filesystem: fsspec.AbstractFileSystem | None = None,
        *,
        patience_s: float = TIMEOUT_S,
    ) -> None:
        """Touch nothing yet.

        Args:
            path: an fsspec path such as "/data/run" or "s3://bucket/run".
            filesystem: the one that `path` is in; by default the one that the path names.
            patience_s: how long an operation is retried after a transient fault, in seconds; 0 for
                not at all.

        Raises:
            StorageError: no file system for such a path, or the package for it is missing.
        """
        self.path = path.rstrip("/")
        self.patience_s = patience_s
        if filesystem is not None:
            self.fs, self.root = filesystem, self.path
        else:
            self.fs, self.root = _opened(self.path)
        # A file system from the caller cannot be opened again here.
        self._is_ours = filesystem is None and not self.is_local

    def folder(self, name: str) -> Files:
        """Return the files of a folder in this directory, with the same `patience_s`."""
        return Files(f"{self.path}/{check_inside(name)}", patience_s=self.patience_s)

    @property
    def is_local(self) -> bool:
        """Return whether it is in a file system of this machine, or one mounted there."""
        return isinstance(self.fs, LocalFileSystem)

    @property
    def is_object_store(self) -> bool:
        """Return whether it is in an object store: no folders, and no append."""
        protocols = self.fs.protocol
        names = (protocols,) if isinstance(protocols, str) else protocols
        return not OBJECT_STORES.isdisjoint(names)

    def at(self, name: str) -> str:
        """Return the path of a file or folder for the file system; the root for ""."""
        return f"{self.root}/{check_inside(name)}" if name else str(self.root)

    # ---------------------------------------------------------------------------------- reading

    def exists(self, name: str) -> bool:
        """Return whether there is such a file or folder."""

        def probe() -> bool:
            self.fs.invalidate_cache()
            try:
                # Not `fs.exists`: that returns False for every failure.
                self.fs.info(self.at(name))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

        return self._do(f"cannot read {self.path}/{name}", probe)

    def read(self, name: str, limit: int = READ_BYTES_MAX) -> bytes:
        """Return the content of a file.

        Args:
            name: of the file.
            limit: bytes; a longer local file is refused before it fills the memory.

        Raises:
            StorageError: it cannot be read; its cause is `FileNotFoundError` if it does not exist.
        """

        def read() -> bytes:
            if not self.is_local:
                return bytes(self.fs.cat_file(self.at(name)))
            with outputs.open_regular(self.at(name)) as file:
                if os.fstat(file.fileno()).st_size > limit:
                    raise ValueError(f"it has more than {limit} bytes")
                return file.read()

        return self._do(f"cannot read {self.path}/{name}", read)

    def read_if_there(self, name: str, limit: int = READ_BYTES_MAX) -> bytes | None:
        """Return the content of a file, None if it does not exist."""
        try:
            return self.read(name, limit)
        except StorageError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None
            raise

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Open a file for the `with` block; only opening it is retried."""
        what = f"cannot read {self.path}/{name}"
        opened = self._do(what, lambda: self._open(name))
        with self._wrap_errors(what), opened as file:
            yield file

    def _open(self, name: str) -> Any:
        """Open a file to read; a local one must be a regular file, because a pipe could hang."""
        path = self.at(name)
        return outputs.open_regular(path) if self.is_local else self.fs.open(path, "rb")

    def tree(self) -> list[StoredFile]:
        """Return all files below the directory, sorted by name, without their checksums."""

        def find() -> Any:
            self.fs.invalidate_cache()
            try:
                if self.is_object_store:
                    return self.fs.find(self.at(""), detail=True)
                return {info["name"]: info for info in self._below(self.at(""))}
            except FileNotFoundError:
                return {}

        found = self._do(f"cannot list {self.path}", find)
        skipped = len(str(self.root)) + 1
        sizes = {str(path)[skipped:]: int(info["size"]) for path, info in found.items()}
        # Consoles of object stores mark a folder by an empty object: "" here, or "folder/".
        return sorted(
            StoredFile(name, size)
            for name, size in sizes.items()
            if name and not name.endswith("/")
        )

    def _below(self, folder: str) -> Iterator[dict[str, Any]]:
        """Yield fsspec's information on each file below a folder."""
        # Not `fs.find`: that treats a folder that cannot be read as an empty one.
        for info in self.fs.ls(folder, detail=True):
            if info["type"] == "directory":
                yield from self._below(info["name"])
            else:
                yield info

    def checksum(self, name: str) -> StoredFile:
        """Read a file, and return its size and checksum."""

        def sum_up() -> StoredFile:
            size, crc32 = 0, 0
            with self._open(name) as file:
                while chunk := file.read(CHUNK_BYTES):
                    size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
            return StoredFile(name, size, crc32)

        return self._do(f"cannot read {self.path}/{name}", sum_up)

    def list(self, pattern: str) -> Names:
        """Return the names that match a pattern, sorted; a `*` does not match slashes.

        A missing directory counts as empty.
        """
        what = f"cannot list {self.path}/{pattern}"
        self.fs.invalidate_cache()
        found = [""]
        for part in pattern.split("/"):
            if "*" in part:
                found = [
                    f"{folder}{name}/"
                    for folder in found
                    for name in self._do(what, functools.partial(self._names, folder))
                    if fnmatch.fnmatchcase(name, part)
                ]
            else:
                found = [f"{folder}{part}/" for folder in found]
        names = sorted(name[:-1] for name in found)
        is_listed = "*" in pattern.rpartition("/")[2]
        return names if is_listed else [name for name in names if self.exists(name)]

    def _names(self, folder: str) -> Names:
        path = self.at(folder.rstrip("/"))
        try:
            # Not `fs.glob`: that treats a folder that cannot be read as an empty one.
            found = self.fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        inside = [str(one).rstrip("/") for one in found if str(one).startswith(f"{path}/")]
        return [name for one in inside if (name := one[len(path) + 1 :])]

    # ---------------------------------------------------------------------------------- writing

    def write(self, name: str, data: bytes) -> StoredFile:
        """Write a file atomically and durably."""
        return self.put(name, lambda output: output.write(data))

    def put(self, name: str, produce: Callable[[OutputFile], object]) -> StoredFile:
        """Write a file by a function, which is called again after a transient fault.

        Args:
            name: of the file.
            produce: writes the whole content to its argument, the same each time.
        """

        def write_all() -> StoredFile:
            with self._open_output(name) as output:
                produce(output)
            return StoredFile(name, output.size, output.crc32)

        return self._do(f"cannot write {self.path}/{name}", write_all)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[OutputFile]:
        """Open a file to write for the `with` block; its name exists afterwards.

        The block cannot be repeated, so a transient fault fails it; `put` retries.
        """
        of_block: Exception | None = None
        try:
            with self._open_output(name) as output:
                try:
                    yield output
                except Exception as error:
                    of_block = None if output.failed else error
                    raise
        except Exception as error:
            if error is of_block or isinstance(error, StorageError):
                raise
            raise self._failure(f"cannot write {self.path}/{name}", error) from error

    def create(self, name: str, data: bytes) -> bool:
        """Write a file if there is none of this name.

        Exactly one of several callers succeeds, on local disks and on object stores with
        conditional writes, such as S3. Elsewhere it is a check followed by a write, not atomic.

        Returns:
            Whether it was written here. After a lost reply this may be False although it was: read
            the file to find out.
        """

        def create() -> bool:
            if self.is_local:
                return outputs.create_local(self.at(name), data)
            if self.is_object_store:
                return outputs.create_object(self.fs, self.at(name), data)
            if self.exists(name):
                return False
            with self._open_output(name) as output:
                output.write(data)
            return True

        return self._do(f"cannot write {self.path}/{name}", create)

    def append(self, name: str, data: bytes) -> None:
        """Append to a file that has no other writer; all of the data or nothing.

        Raises:
            StorageError: it cannot be written, or this is an object store.
        """
        what = f"cannot write {self.path}/{name}"
        if self.is_object_store:
            raise StorageError(f"{what}: objects cannot be appended to; use MetricsLog")
        if self.is_local:
            self._do(what, lambda: outputs.append_local(self.at(name), data))
            return
        with self._wrap_errors(what):
            self.fs.makedirs(self.at(name).rpartition("/")[0], exist_ok=True)
            with self.fs.open(self.at(name), "ab") as file:
                file.write(data)

    def sync(self, name: str) -> None:
        """Have what was appended to a file on the disk, if it is in a file system of ours.

        Raises:
            StorageError: that failed, or there is no such file.
        """
        if self.is_local:
            what = f"cannot write {self.path}/{name}"
            self._do(what, lambda: outputs.sync_local(self.at(name)))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content; it must exist.

        Raises:
            InvariantViolation: there is no name, which would be the whole directory.
        """
        if not name:
            raise InvariantViolation(f"all of {self.path} was to be deleted: expected a name in it")
        attempts = 0

        def remove() -> None:
            nonlocal attempts
            attempts += 1
            self.fs.invalidate_cache()
            try:
                if glob.has_magic(self.at(name)) and not self.is_local:
                    self._delete_literally(self.at(name))
                else:
                    self.fs.rm(self.at(name), recursive=True)
            except FileNotFoundError:
                if attempts == 1:
                    raise  # Otherwise an earlier attempt deleted it, and its reply was lost.

        self._do(f"cannot delete {self.path}/{name}", remove)

    def delete_if_there(self, name: str) -> None:
        """Delete a file or folder, if it exists; another process may do the same meanwhile."""
        try:
            if self.exists(name):
                self.delete(name)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or self.exists(name):
                raise

    def _delete_literally(self, path: str) -> None:
        """Delete a path that fsspec would read as a pattern: "run[1]" would also match "run1"."""
        if self.fs.info(path)["type"] != "directory":
            self.fs.rm_file(path)
            return
        # Not `fs.find`: that treats a folder that cannot be read as an empty one.
        for one in self.fs.ls(path, detail=True):
            if one["name"].rstrip("/") != path.rstrip("/"):
                self._delete_literally(one["name"].rstrip("/"))
        try:
            self.fs.rmdir(path)
        except FileNotFoundError:
            pass  # Object stores have no folder once its objects are deleted.
        except (OSError, NotImplementedError):
            if not self.is_object_store:
                raise

    # ---------------------------------------------------------------------------------- inside

    def _open_output(self, name: str) -> contextlib.AbstractContextManager[OutputFile]:
        final = self.at(name)
        if self.is_local:
            return outputs.local_output(final)
        if self.is_object_store:
            return outputs.object_output(self.fs, final)
        return outputs.renamed_output(self.fs, final)

    def _do(self, what: str, action: Callable[[], T]) -> T:
        """Run an idempotent operation with retries; see `with_timeout`."""
        try:
            return with_timeout(lambda: self._accepted(action), self.patience_s, what)
        except Exception as error:
            raise self._failure(what, error) from error

    def _accepted(self, action: Callable[[], T]) -> T:
        """Run the action; if its credentials are refused, read them again and repeat it once."""
        try:
            return action()
        except Exception as error:
            if not self._is_ours or not is_about_credentials(error):
                raise
            log.warning("credentials_read_anew path=%s reason=%r", self.path, reason_of(error))
            self._forget_credentials()
            return action()

    def _forget_credentials(self) -> None:
        """Open the file system again; fsspec otherwise caches it for the life of the process."""
        type(self.fs).clear_instance_cache()
        self.fs, self.root = _opened(self.path)

    @contextlib.contextmanager
    def _wrap_errors(self, what: str) -> Iterator[None]:
        """Turn the file system's errors into a `StorageError` with operation, path and reason."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> StorageError:
        advice = ""
        if self._is_ours and is_about_credentials(error):
            self._forget_credentials()
            advice = (
                "; the storage does not accept the credentials of this process: renew them where "
                "it finds them (environment, file, role of the machine); the next attempt reads "
                "them anew, nothing has to be restarted"
            )
        return StorageError(f"{what}: {reason_of(error)}{advice}")


def _opened(path: str) -> tuple[Any, str]:
    """Return fsspec's file system for a path, and the path within it."""
    try:
        fs, root = fsspec.core.url_to_fs(path, **_options(path))
        return fs, str(root)
    except ImportError as error:
        scheme = path.partition("://")[0]
        package = PACKAGES.get(scheme, "")
        advice = f": pip install {package}, on every node" if package else ""
        raise StorageError(
            f"storage {path}: a package that {scheme}:// needs is not installed{advice} ({error})"
        ) from error
    except Exception as error:
        raise StorageError(f"storage {path}: {reason_of(error)}") from error


def _options(path: str) -> dict[str, Any]:
    """Return options to open the file system with, beside the user's own configuration."""
    scheme, given = path.partition("://")[0], options_of(path)
    configured = {**fsspec.config.conf.get(scheme, {}), **given}
    if scheme not in ("s3", "s3a") or "config_kwargs" in configured:
        return given
    # Disable botocore's own retries (up to a minute, repeated by s3fs), so that `patience_s` alone
    # sets the total. s3fs's own pauses, two seconds in all, remain.
    once = {"retries": {"mode": "standard", "total_max_attempts": 1}}
    return {**given, "config_kwargs": once}

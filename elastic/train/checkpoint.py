"""A checkpoint as scripts see it: a directory somewhere, local or behind an fsspec URL."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastic.errors import StorageError, UsageError

MARKER = "_COMMITTED"
"""Written last into a checkpoint directory; without it the directory is no checkpoint."""


class Checkpoint:
    """A directory with what a training run saved.

    Made by the script (`from_directory`) and handed to `train.report`, or got from
    `train.get_checkpoint` and `Result.checkpoint`.
    """

    def __init__(
        self, path: str | Path, filesystem: fsspec.AbstractFileSystem | None = None
    ) -> None:
        """Point at a directory; nothing is read.

        Args:
            path: local path or fsspec URL; with `filesystem`, a path inside it.
            filesystem: found from the URL if not given.
        """
        if filesystem is None:
            filesystem, found = url_to_fs(str(path))
            self.path = str(found)
        else:
            self.path = str(path)
        self.filesystem = filesystem

    @classmethod
    def from_directory(cls, path: str | Path) -> Checkpoint:
        """Take a local directory that the script has written.

        Raises:
            UsageError: there is no such directory.
        """
        if not Path(path).is_dir():
            raise UsageError(
                f"Checkpoint.from_directory({str(path)!r}): no such directory; write the files "
                f"first, then hand the directory over"
            )
        return cls(str(Path(path).absolute()))

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copy the checkpoint into a local directory and return its path.

        Args:
            path: where to; by default a new temporary directory, which is yours to delete.

        Raises:
            StorageError: the checkpoint cannot be read, or the directory not be written.
        """
        try:
            if not self.filesystem.isdir(self.path):
                raise FileNotFoundError("no such directory")
            if path is None:
                target = Path(tempfile.mkdtemp(prefix="checkpoint_"))
            else:
                target = Path(path)
                target.mkdir(parents=True, exist_ok=True)
            if not self.is_local:
                self.filesystem.get(self.path.rstrip("/") + "/", str(target), recursive=True)
            elif Path(self.path).resolve() != target.resolve():
                shutil.copytree(self.path, target, dirs_exist_ok=True)
        except OSError as error:
            where = f" to {path}" if path is not None else ""
            raise StorageError(
                f"checkpoint {self.path} cannot be copied{where}: {error}"
            ) from error
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Give a local directory for the time of the `with` block: read only.

        A local checkpoint is used where it is; any other is copied, and the copy deleted.
        """
        if self.is_local:
            if not Path(self.path).is_dir():
                raise StorageError(f"checkpoint {self.path} is not there: no such directory")
            yield self.path
            return
        copy = self.to_directory()
        try:
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    @property
    def is_local(self) -> bool:
        """Return whether it lies in this machine's own file system, where `path` can be opened."""
        return isinstance(self.filesystem, LocalFileSystem)

    def __repr__(self) -> str:
        """Show where it is."""
        return f"Checkpoint(path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        """Two checkpoints are equal if they are at the same place."""
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.path == other.path and type(self.filesystem) is type(other.filesystem)

    def __hash__(self) -> int:
        """Hash by place."""
        return hash(self.path)

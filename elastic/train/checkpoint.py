"""A checkpoint as scripts use it: a directory, local or behind an fsspec URL.

Rule: a checkpoint with a commit marker is verified against it before it is returned, so that no
run resumes from a truncated or changed file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.core.facts import CheckpointStatus
from elastic.errors import StorageError, UsageError
from elastic.storage.files import Files
from elastic.storage.filesystems import as_fsspec, opened, without_query
from elastic.storage.integrity import read_marker, verify
from elastic.storage.marker import METADATA, OURS, CheckpointMarker
from elastic.storage.run_directory import read_metadata
from elastic.train.dict_checkpoint import read_dict, write_dict

log = logging.getLogger(__name__)

ReportedCheckpointStatus = CheckpointStatus
"""Ray Train's name for it."""


def metadata_text(metadata: Mapping[str, Any], what: str) -> str:
    """Return metadata as JSON; a UsageError begins with `what`."""
    try:
        return json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} not JSON-serializable ({error}); expected a dict of text, numbers, lists and "
            f"dicts"
        ) from error


class Checkpoint:
    """A directory with the files that a training run saved.

    Created by the script (`from_directory`, `from_dict`) and passed to `train.report`, or returned
    by `train.get_checkpoint` and `Result.checkpoint`.
    """

    def __init__(
        self, path: str | Path, filesystem: fsspec.AbstractFileSystem | Any | None = None
    ) -> None:
        """Point at a directory; nothing is read.

        Args:
            path: local path or fsspec URL; with `filesystem`, a path inside it.
            filesystem: of fsspec or pyarrow; found from the URL if not given.
        """
        if filesystem is None:
            filesystem, self.path = opened(without_query(str(path)), "Checkpoint")
        else:
            filesystem, self.path = as_fsspec(filesystem, str(path))
        self.filesystem: fsspec.AbstractFileSystem = filesystem

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Write a dict into a temporary directory, which is deleted with this object.

        Args:
            data: numbers, text, bytes, tensors, and lists, tuples, sets and dicts of them:
                whatever can be read back without running code.

        Raises:
            UsageError: a value is something else; names its key.
        """
        directory = tempfile.mkdtemp(prefix="checkpoint_")
        try:
            write_dict(data, Path(directory))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return cls.temporary(directory)

    @classmethod
    def temporary(cls, directory: str) -> Checkpoint:
        """Take a local directory that is deleted with this object."""
        checkpoint = cls(directory)
        weakref.finalize(checkpoint, shutil.rmtree, directory, ignore_errors=True)
        return checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `from_dict` was given; tensors are on the CPU.

        Nothing in the file is executed. A committed checkpoint is verified first.

        Raises:
            UsageError: the checkpoint was not made by `from_dict`.
            StorageError: it cannot be read, or is damaged.
        """
        with self.as_directory() as directory:
            return read_dict(Path(directory))

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copy the checkpoint into a local directory and return its path.

        A committed checkpoint is verified: every file must have the size and the checksum that
        its marker names. The copy has no marker, and may be changed freely.

        Args:
            path: the target; by default a new temporary directory, which you must delete.

        Raises:
            StorageError: the checkpoint cannot be read or is damaged, or the directory cannot be
                written.
        """
        source = Files(self.path, self.filesystem)
        target = Path(path) if path is not None else None
        try:
            if not self.filesystem.isdir(self.path):
                raise FileNotFoundError("no such directory")
            marker = _marker_of(source)
            if target is None:
                target = Path(tempfile.mkdtemp(prefix="checkpoint_"))
            target.mkdir(parents=True, exist_ok=True)
            if self.is_local and Path(self.path).resolve() == target.resolve():
                if marker is not None:
                    verify(source, marker)
                return str(target)
            self._copy(target)
            if marker is not None:
                verify(Files(str(target)), marker)
        except OSError as error:
            where = f" to {path}" if path is not None else ""
            raise StorageError(
                f"checkpoint {self.path} cannot be copied{where}: {error}"
            ) from error
        except StorageError as error:
            if path is None and target is not None:
                shutil.rmtree(target, ignore_errors=True)
            raise StorageError(f"checkpoint {self.path} cannot be copied: {error}") from error
        return str(target)

    def _copy(self, target: Path) -> None:
        if self.is_local:
            source = self.path
            shutil.copytree(
                source,
                target,
                dirs_exist_ok=True,
                ignore=lambda folder, names: OURS if folder == source else (),
            )
            return
        self.filesystem.get(self.path.rstrip("/") + "/", str(target), recursive=True)
        for name in OURS:
            (target / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Provide a read-only local directory for the duration of the `with` block.

        A local checkpoint is used in place; any other is copied, and the copy deleted. A committed
        one is verified first, as in `to_directory`.

        Raises:
            StorageError: the checkpoint cannot be read, or is damaged.
        """
        if self.is_local:
            if not Path(self.path).is_dir():
                raise StorageError(f"checkpoint {self.path} is not there: no such directory")
            files = Files(self.path)
            marker = _marker_of(files)
            if marker is not None:
                verify(files, marker)
            yield self.path
            return
        copy = self.to_directory()
        try:
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    # ------------------------------------------------------------ notes beside the files

    def get_metadata(self) -> dict[str, Any]:
        """Return what `set_metadata` wrote, {} if it was never called.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            return read_metadata(Files(self.path, self.filesystem))
        except ValueError as error:
            raise StorageError(
                f"metadata of checkpoint {self.path} cannot be read: {METADATA}: {error}"
            ) from error

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write metadata beside the files, replacing any; also possible after the commit.

        Args:
            metadata: a JSON-serializable dict.

        Raises:
            UsageError: it is not JSON-serializable.
            StorageError: it cannot be written.
        """
        text = metadata_text(metadata, "Checkpoint.set_metadata:")
        Files(self.path, self.filesystem).write(METADATA, text.encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the existing metadata, overriding equal keys; raises as `set_metadata`."""
        self.set_metadata({**self.get_metadata(), **metadata})

    # ------------------------------------------------------------ place

    @property
    def is_local(self) -> bool:
        """Return whether it is in this machine's own file system, where `path` can be opened."""
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def url(self) -> str:
        """Return a path that is valid in every process: a local one, or an fsspec URL."""
        return self.path if self.is_local else str(self.filesystem.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        """Show its place, as Ray does."""
        protocol = self.filesystem.protocol
        kind = protocol if isinstance(protocol, str) else protocol[0]
        return f"Checkpoint(filesystem={'local' if self.is_local else kind}, path={self.path})"

    def __eq__(self, other: object) -> bool:
        """Two checkpoints are equal if their path and kind of file system are."""
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.path == other.path and type(self.filesystem) is type(other.filesystem)

    def __hash__(self) -> int:
        """Hash by path."""
        return hash(self.path)


@dataclass(frozen=True)
class ReportedCheckpoint:
    """A checkpoint that was reported and is committed.

    Attributes:
        checkpoint: its files.
        metrics: what was reported with it, and what its validation returned.
        status: whether it was validated.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def _marker_of(files: Files) -> CheckpointMarker | None:
    """Return the marker that a checkpoint is verified against, None if it was never committed.

    Logs a warning if it is missing in a run directory: then the files are not verified.
    """
    marker = read_marker(files)
    folder, _, name = files.path.rstrip("/").rpartition("/")
    if marker is None and name and folder.endswith("/checkpoints"):
        log.warning(
            "checkpoint_unverified path=%s reason='it lies in a run directory and was never "
            "committed, or its marker is gone: it is unknown whether its files are whole'",
            files.path,
        )
    return marker

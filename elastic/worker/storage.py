"""The run directory: metrics of every report, and checkpoints that count once they are marked.

    RUN/metrics.jsonl            what rank 0 reported, one JSON object a line
    RUN/metrics-rank3.jsonl      the same of rank 3
    RUN/checkpoints/NAME/        files of one checkpoint
    RUN/checkpoints/NAME/_COMMITTED    written last: a directory without it does not exist
    RUN/checkpoints/NAME/_RECORDED     the coordinator has it in its records, as far as we heard

Rule: every failure of the storage below becomes a `StorageError` that names the path and the
reason. Only this module knows fsspec, so any of its file systems will do.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from elastic.core.world import CheckpointRecord
from elastic.errors import StorageError

MARKER = "_COMMITTED"
RECORDED = "_RECORDED"
MARKER_FORMAT = 1
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Marker:
    """What `_COMMITTED` says of a checkpoint.

    Attributes:
        files: (path relative to the checkpoint, bytes), sorted.
        metrics: JSON object: what was reported with it.
        unix_ns: when it was committed.
    """

    job_id: str
    generation: int
    index: int
    world_size: int
    unix_ns: int
    metrics: str
    files: tuple[tuple[str, int], ...]

    def to_json(self) -> str:
        """Return the text of the file."""
        fields = {**vars(self), "metrics": json.loads(self.metrics), "files": dict(self.files)}
        return json.dumps({"format": MARKER_FORMAT, **fields}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Marker:
        """Read the text of the file.

        Raises:
            ValueError: it is torn, or of another format.
        """
        fields: Any = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != MARKER_FORMAT:
            raise ValueError(f"expected an object with format {MARKER_FORMAT}")
        try:
            files = tuple(sorted(fields.pop("files").items()))
            return cls(**{**fields, "metrics": json.dumps(fields["metrics"])}, files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


def reason_of(error: BaseException) -> str:
    """Return in words why storage refused; a full disk is called by its name."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full ({error.strerror})"
        if error.strerror:
            return error.strerror
    return f"{type(error).__name__}: {error}"


class RunDirectory:
    """One run's directory, on any file system that fsspec has."""

    def __init__(self, path: str) -> None:
        """Touch nothing yet.

        Args:
            path: storage_path/name, as an fsspec path such as "/data/run" or "s3://b/run".

        Raises:
            StorageError: no file system for such a path.
        """
        self.path = path.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.path)
        except Exception as error:
            raise StorageError(f"run directory {path}: {reason_of(error)}") from error

    def checkpoint_path(self, name: str) -> str:
        """Return the path under which users find a checkpoint."""
        return f"{self.path}/{CHECKPOINTS}/{name}"

    def append_metrics(self, rank: int, record: dict[str, Any]) -> None:
        """Add a line to this rank's metrics.

        Raises:
            StorageError: it cannot be written.
        """
        name = "metrics.jsonl" if rank == 0 else f"metrics-rank{rank}.jsonl"
        line = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            with self._fs.open(f"{self._root}/{name}", "ab") as file:
                file.write(line.encode())
        except Exception as error:
            raise StorageError(
                f"rank {rank} cannot write metrics to {self.path}/{name}: {reason_of(error)}"
            ) from error

    def upload(
        self, source: Path, name: str, *, claim: Callable[[str], bool]
    ) -> tuple[tuple[str, int], ...]:
        """Copy the files below `source` into a checkpoint that is not committed yet.

        Args:
            source: a local directory.
            name: of the checkpoint.
            claim: is asked for each relative path; those that it refuses are some other
                member's to write.

        Returns:
            (relative path, bytes) of every file of ours, claimed or not.

        Raises:
            StorageError: something cannot be read or written.
        """
        target = f"{self._root}/{CHECKPOINTS}/{name}"
        current = str(source)
        try:
            if not source.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is not a directory", str(source))
            self._fs.makedirs(target, exist_ok=True)
            files = []
            for path in sorted(p for p in source.rglob("*") if p.is_file()):
                current = str(path)
                relative = path.relative_to(source).as_posix()
                if relative in (MARKER, RECORDED):
                    continue  # The directory is a copy of an older checkpoint.
                files.append((relative, path.stat().st_size))
                if claim(relative):
                    parent = f"{target}/{relative}".rpartition("/")[0]
                    self._fs.makedirs(parent, exist_ok=True)
                    self._fs.put_file(current, f"{target}/{relative}")
            return tuple(files)
        except Exception as error:
            raise StorageError(
                f"cannot store {current} in {self.checkpoint_path(name)}: {reason_of(error)}"
            ) from error

    def is_committed(self, name: str) -> bool:
        """Return whether a checkpoint of this name counts already.

        Raises:
            StorageError: the directory cannot be read.
        """
        try:
            return bool(self._fs.exists(f"{self._root}/{CHECKPOINTS}/{name}/{MARKER}"))
        except Exception as error:
            raise StorageError(
                f"cannot read {self.checkpoint_path(name)}: {reason_of(error)}"
            ) from error

    def commit(self, name: str, marker: Marker) -> str:
        """Make a checkpoint count, once all its files are there.

        Returns:
            Its path.

        Raises:
            StorageError: the marker cannot be written.
        """
        final = f"{self._root}/{CHECKPOINTS}/{name}/{MARKER}"
        try:
            # Renamed into place: a reader finds all of it, or nothing.
            self._fs.pipe_file(f"{final}.partial", marker.to_json().encode())
            self._fs.mv(f"{final}.partial", final)
        except Exception as error:
            raise StorageError(
                f"cannot commit {self.checkpoint_path(name)}: {reason_of(error)}"
            ) from error
        return self.checkpoint_path(name)

    def discard(self, name: str) -> None:
        """Remove what there is of a checkpoint that will not be committed, if that is possible."""
        try:
            self._fs.rm(f"{self._root}/{CHECKPOINTS}/{name}", recursive=True)
        except Exception:
            # Without a marker it does not exist for anyone; it only takes up room.
            return

    def remove(self, name: str) -> None:
        """Delete a committed checkpoint; it ceases to exist before its first file goes.

        Raises:
            StorageError: something cannot be deleted.
        """
        folder = f"{self._root}/{CHECKPOINTS}/{name}"
        try:
            self._fs.rm_file(f"{folder}/{MARKER}")
            self._fs.rm(folder, recursive=True)
        except Exception as error:
            raise StorageError(
                f"cannot delete {self.checkpoint_path(name)}: {reason_of(error)}"
            ) from error

    def mark_recorded(self, name: str) -> None:
        """Remember beside a committed checkpoint that the coordinator has recorded it.

        Raises:
            StorageError: the note cannot be written.
        """
        try:
            self._fs.pipe_file(f"{self._root}/{CHECKPOINTS}/{name}/{RECORDED}", b"")
        except Exception as error:
            raise StorageError(
                f"cannot write to {self.checkpoint_path(name)}: {reason_of(error)}"
            ) from error

    def recorded(self, job_id: str) -> list[tuple[str, Marker]]:
        """Return name and marker of a job's checkpoints that are recorded, in that order.

        Raises:
            StorageError: the directory cannot be listed.
        """
        try:
            known = {
                str(path).split("/")[-2]
                for path in self._fs.glob(f"{self._root}/{CHECKPOINTS}/*/{RECORDED}")
            }
        except Exception as error:
            raise StorageError(f"cannot read {self.path}: {reason_of(error)}") from error
        found = [(n, m) for n, m in self._markers() if m.job_id == job_id and n in known]
        return sorted(found, key=lambda pair: (pair[1].generation, pair[1].index))

    def records(self, job_id: str = "") -> tuple[CheckpointRecord, ...]:
        """Return the committed checkpoints of a job, or of all for "", in the order of commits.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = [(name, m) for name, m in self._markers() if job_id in ("", m.job_id)]
        found.sort(key=lambda pair: (pair[1].generation, pair[1].index))
        return tuple(
            CheckpointRecord(self.checkpoint_path(name), m.generation, m.index, m.metrics)
            for name, m in found
        )

    def newest_checkpoint(self) -> str:
        """Return the path of the checkpoint that was committed last, "" if there is none.

        Raises:
            StorageError: the directory cannot be listed.
        """
        newest = max(((m.unix_ns, name) for name, m in self._markers()), default=(0, ""))
        return self.checkpoint_path(newest[1]) if newest[1] else ""

    def _markers(self) -> list[tuple[str, Marker]]:
        """Return name and marker of every checkpoint whose marker can be read."""
        found = []
        try:
            self._fs.invalidate_cache()
            for path in self._fs.glob(f"{self._root}/{CHECKPOINTS}/*/{MARKER}"):
                try:
                    marker = Marker.from_json(self._fs.cat_file(path).decode())
                except (ValueError, FileNotFoundError):
                    continue  # Torn; or pruned by another member since we listed it.
                found.append((str(path).split("/")[-2], marker))
        except Exception as error:
            raise StorageError(f"cannot read {self.path}: {reason_of(error)}") from error
        return found

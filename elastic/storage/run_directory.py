"""The run directory: metrics of every report, and checkpoints, valid once they are recorded.

    RUN/run.json                 state of the run; see `run_record`
    RUN/metrics.jsonl            reports of rank 0, one JSON object a line
    RUN/metrics-rank3.jsonl      the same of rank 3
    RUN/metrics/*-rank0.jsonl    the same in parts, on object stores (see `metrics`)
    RUN/events.jsonl             event log of the run; see `events`
    RUN/feeders/JOB.json         addresses of the feeders of a job, while it runs
    RUN/profiles/*.json          samples of `elastic profile`, for speedscope
    RUN/checkpoints/NAME/        files of one checkpoint
    RUN/checkpoints/NAME/_PREPARED     the text of the marker, until that is written
    RUN/checkpoints/NAME/_COMMITTED    the marker, written last, once the coordinator has a record
    RUN/checkpoints/NAME/_DAMAGED      instead of both, how its files were found changed
    RUN/checkpoints/NAME/_VALIDATED    result of its validation (see `validation`)

Rule: every failure of the storage below becomes a `StorageError` that names the path and the
reason.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.core.facts import CheckpointRecord
from elastic.errors import StorageError
from elastic.storage.faults import reason_of
from elastic.storage.files import Files
from elastic.storage.marker import (
    DAMAGED,
    MARKER,
    METADATA,
    OURS,
    PREPARED,
    VALIDATED,
    CheckpointMarker,
    StoredFile,
)
from elastic.storage.metrics import MetricsWriter, read_metrics
from elastic.storage.names import check_one
from elastic.storage.outputs import CHUNK_BYTES, PARTIAL_NAME, OutputFile
from elastic.storage.retry import TIMEOUT_S
from elastic.storage.run_record import read_run
from elastic.storage.validation import completed

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
AUTOMATIC = "auto-"
"""Prefix of the names of automatic checkpoints."""


class RunDirectory:
    """One run's directory, on any file system that fsspec has.

    What reads or writes raises `StorageError`; also a write to a checkpoint that is committed.

    Attributes:
        metrics: writes what this process reports.
    """

    def __init__(self, path: str, *, patience_s: float = TIMEOUT_S) -> None:
        """Touch nothing yet.

        Args:
            path: storage_path/name, as an fsspec path such as "/data/run" or "s3://b/run".
            patience_s: how long transient faults of the storage are retried, in seconds.
        """
        self.files = Files(path, patience_s=patience_s)
        self.path = self.files.path
        self.metrics = MetricsWriter(self.files)
        self._unreadable: set[str] = set()

    def checkpoint_path(self, name: str) -> str:
        return f"{self.path}/{CHECKPOINTS}/{name}"

    def name_of(self, path: str) -> str:
        """Return the name of the checkpoint at a path, "" if it is not one of this run."""
        name = path.rpartition("/")[2]
        return name if name and path == self.checkpoint_path(name) else ""

    def checkpoint(self, name: str) -> Files:
        return self.files.folder(_folder(name))

    def read_metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the reports of a rank, oldest first; a torn line is left out."""
        return read_metrics(self.files, rank)

    def upload(
        self, source: Path, name: str, *, claim: Callable[[str], bool]
    ) -> tuple[StoredFile, ...]:
        """Copy the files below `source` into a checkpoint that is not committed yet.

        Args:
            source: a local directory.
            name: of the checkpoint.
            claim: called for each relative path; returns False for files that another member
                writes.

        Returns:
            Every file of the source, claimed or not; claimed ones with their checksums.
        """
        self.check_free(name)
        target = self.checkpoint(name)
        current = str(source)
        try:
            if not source.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is not a directory", str(source))
            if target.is_local and Path(target.root).resolve().is_relative_to(source.resolve()):
                raise StorageError(
                    "the run's checkpoints lie in it, and it would be copied into itself: write "
                    "what is to be kept into a directory of its own, such as one in "
                    "train.get_context().get_trial_dir()"
                )
            files = []
            for path in sorted(_files_below(source)):
                current = str(path)
                relative = path.relative_to(source).as_posix()
                if relative in OURS:
                    continue  # The directory is a copy of an older checkpoint.
                if claim(relative):
                    files.append(self._copied(path, target, name, relative))
                else:
                    files.append(StoredFile(relative, path.stat().st_size))
            return tuple(files)
        except Exception as error:
            reason = str(error) if isinstance(error, StorageError) else reason_of(error)
            raise StorageError(
                f"cannot store {current} in {self.checkpoint_path(name)}: {reason}"
            ) from error

    def _copied(self, path: Path, target: Files, name: str, relative: str) -> StoredFile:
        def copy(output: OutputFile) -> None:
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    output.write(chunk)
            # Before the file gets its name: a process of an older generation may have been stopped
            # while a newer one committed a checkpoint with the same name, chosen by the script.
            self.check_free(name)

        return target.put(relative, copy)

    def weigh(self, name: str, *, claim: Callable[[str], bool]) -> tuple[StoredFile, ...]:
        """Return the files of a checkpoint that the script has written itself, with checksums.

        Args:
            name: of the checkpoint.
            claim: called for each relative path; returns False for files that another member
                reads.
        """
        target = self.checkpoint(name)
        with _as("cannot read", target.path):
            stored = [
                target.checksum(file.path) if claim(file.path) else file
                for file in target.tree()
                if file.path not in OURS and not PARTIAL_NAME.fullmatch(file.path)
            ]
        if not stored:
            raise StorageError(f"there are no files in {target.path}: write them before the report")
        return tuple(stored)

    def is_committed(self, name: str) -> bool:
        return self.checkpoint(name).exists(MARKER)

    def check_free(self, name: str) -> None:
        """Refuse to overwrite a committed checkpoint."""
        if self.is_committed(name):
            raise StorageError(f"{self.checkpoint_path(name)} exists already; use another name")

    def prepare(self, name: str, marker: CheckpointMarker) -> None:
        """Write the text of the marker as `_PREPARED`, beside the checkpoint's files."""
        self.check_free(name)
        files = self.checkpoint(name)
        with _as("cannot commit", self.checkpoint_path(name)):
            # Left by a checkpoint that had this name before, and was set aside.
            for sign in (DAMAGED, VALIDATED):
                files.delete_if_there(sign)
            files.write(PREPARED, marker.to_json().encode())

    def prepared(self, name: str) -> CheckpointMarker | None:
        """Return the prepared marker of a checkpoint, None if there is none."""
        files = self.checkpoint(name)
        text = files.read_if_there(PREPARED)
        if text is None:
            return None
        try:
            return CheckpointMarker.from_json(text.decode())
        except ValueError as error:
            self.set_aside(name, f"what was prepared of it cannot be read: {error}")
            log.warning("checkpoint_damaged path=%s error=%r", files.path, str(error))
            return None

    def finish(self, name: str, own: CheckpointMarker | None = None) -> bool:
        """Write the marker of a checkpoint that the coordinator has recorded; idempotent.

        Args:
            name: of the checkpoint.
            own: what this member prepared; another one may have prepared a checkpoint of this name
                since, which the coordinator has not recorded.

        Returns:
            Whether it has one now: not if it was set aside, or if nothing was prepared.
        """
        files = self.checkpoint(name)
        if files.exists(MARKER):
            return True
        if files.exists(DAMAGED):
            return False
        marker = self.prepared(name)
        if marker is None:
            return files.exists(MARKER)  # Another member may have finished it just now.
        self.commit(name, own or marker)
        return True

    def commit(self, name: str, marker: CheckpointMarker) -> str:
        """Write the marker, once all files are written; idempotent.

        Raises:
            StorageError: it cannot be written, or another checkpoint of this name is committed.
        """
        data = marker.to_json().encode()
        files = self.checkpoint(name)
        with _as("cannot commit", self.checkpoint_path(name)):
            # An existing marker may be our own, written by a try whose reply was lost.
            if not files.create(MARKER, data) and (other := files.read(MARKER)) != data:
                raise StorageError(
                    f"{_owner(other)} has committed a checkpoint of this name already; give it "
                    f"another name, or remove the old one"
                )
        with contextlib.suppress(StorageError):  # It is redundant now.
            files.delete(PREPARED)
        return self.checkpoint_path(name)

    def clear(self, name: str, *, kept: Collection[str]) -> None:
        """Before a commit, remove files that an earlier attempt left in the checkpoint's folder.

        With a name chosen by the script an earlier attempt may have been killed while it wrote
        other files: a reader of the whole folder would take them for a part of the checkpoint.
        """
        files = self.checkpoint(name)
        for file in files.tree():
            if file.path not in (*kept, MARKER, METADATA):
                files.delete(file.path)

    def add_metadata(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Add to what a checkpoint has as metadata; keys that it has already stay as they are."""
        files = self.checkpoint(name)
        try:
            known = read_metadata(files)
        except ValueError:
            return  # Whatever it is, it is the script's.
        files.write(METADATA, json.dumps({**metadata, **known}).encode())

    def discard(self, name: str) -> None:
        """Remove the files of a checkpoint that was not committed; try it once, in silence.

        Without a marker it is no checkpoint, and only takes up space: training need not wait for
        storage that is away.
        """
        once = RunDirectory(self.path, patience_s=0)
        with contextlib.suppress(StorageError):
            if not once.is_committed(name):  # Scripts choose names, too.
                once.files.delete(_folder(name))

    def remove(self, name: str) -> None:
        """Delete a committed checkpoint: its marker first, then its files."""
        # `_PREPARED` before the marker: otherwise the checkpoint could be finished without files.
        for sign in (PREPARED, MARKER):
            self.checkpoint(name).delete_if_there(sign)
        self.files.delete(_folder(name))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all checkpoints, committed or not."""
        found = self.files.list(f"{CHECKPOINTS}/{prefix}*")
        return [path.split("/")[1] for path in found]

    def reported(self) -> list[tuple[str, CheckpointMarker]]:
        """Return name and marker of the reported checkpoints of all attempts, oldest first."""
        return [(name, marker) for name, marker in self.committed() if not marker.automatic]

    def committed(self, prefix: str = "") -> list[tuple[str, CheckpointMarker]]:
        """Return name and marker of every committed checkpoint, in the order of commits."""
        jobs, found = self.jobs(), self.markers(prefix)
        # Attempts that the run's record does not list are ordered by their first commits.
        began: dict[str, int] = {}
        for _, marker in found:
            began[marker.job_id] = min(marker.unix_ns, began.get(marker.job_id, marker.unix_ns))

        def age(pair: tuple[str, CheckpointMarker]) -> tuple[int, int, str, int, bool, int]:
            # Within an attempt clocks are not used: those of two nodes differ, and may be set back.
            job_id, order = pair[1].job_id, (pair[1].generation, pair[1].automatic, pair[1].index)
            if job_id in jobs:
                return jobs.index(job_id), 0, job_id, *order
            return -1, began[job_id], job_id, *order

        return sorted(found, key=age)

    def automatic(self) -> list[tuple[str, CheckpointMarker]]:
        """Return name and marker of the automatic checkpoints, oldest first."""
        return [(name, marker) for name, marker in self.committed(AUTOMATIC) if marker.automatic]

    def jobs(self) -> tuple[str, ...]:
        record = read_run(self.files)
        return record.jobs if record is not None else ()

    def records(self) -> tuple[CheckpointRecord, ...]:
        """Return the committed checkpoints of all attempts, in the order of commits."""
        return tuple(self.record(name, marker) for name, marker in self.committed())

    def record(self, name: str, marker: CheckpointMarker) -> CheckpointRecord:
        return marker.record(self.checkpoint_path(name))

    def newest_checkpoint(self) -> str:
        """Return the path of the reported checkpoint that was committed last, "" for none."""
        reported = self.reported()
        return self.checkpoint_path(reported[-1][0]) if reported else ""

    def newest_generation(self, job_id: str) -> int:
        """Return the last generation of an attempt that has a checkpoint here, 0 if none has."""
        of_job = (marker for _, marker in self.markers() if marker.job_id == job_id)
        return max((marker.generation for marker in of_job), default=0)

    def set_aside(self, name: str, reason: str) -> None:
        """Replace the marker of a damaged checkpoint by `_DAMAGED`; its files stay."""
        files = self.checkpoint(name)
        files.write(DAMAGED, reason.encode())
        for sign in (MARKER, PREPARED):
            files.delete_if_there(sign)

    def markers(self, prefix: str = "") -> list[tuple[str, CheckpointMarker]]:
        """Return name and marker of every checkpoint whose marker can be read; see `marker`."""
        found = []
        for name in self.names(prefix):
            marker = self.marker(name)
            if marker is not None:
                found.append((name, marker))
        return found

    def marker(self, name: str) -> CheckpointMarker | None:
        """Return a checkpoint's marker, None if it has none that can be read.

        Includes the result of its validation, if known.
        """
        files = self.checkpoint(name)
        text = files.read_if_there(MARKER)
        if text is None:
            return None  # Not committed, or pruned by another member since we listed it.
        try:
            return completed(files, CheckpointMarker.from_json(text.decode()))
        except ValueError as error:
            if files.path not in self._unreadable:
                self._unreadable.add(files.path)
                log.warning(
                    "marker_unreadable path=%s error=%r: the checkpoint is passed over",
                    files.path,
                    str(error),
                )
            return None


def read_metadata(checkpoint: Files) -> dict[str, Any]:
    """Return the metadata of a checkpoint, {} if it has none.

    Raises:
        ValueError: they are not a JSON object.
    """
    data = checkpoint.read_if_there(METADATA)
    found = json.loads(b"{}" if data is None else data)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, expected a JSON object")
    return found


def _folder(name: str) -> str:
    return f"{CHECKPOINTS}/{check_one('checkpoint', name)}"


def _files_below(folder: Path, above: tuple[os.stat_result, ...] = ()) -> Iterator[Path]:
    """Yield all files, following symlinks to folders; a file is yielded under each of its paths.

    A symlink to a parent folder (a cycle) is skipped.

    Raises:
        OSError: a broken symlink, or neither a file nor a folder.
    """
    about = folder.stat()
    if any(os.path.samestat(about, other) for other in above):
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, (*above, about))
        elif path.is_file():
            yield path
        else:
            os.stat(path)  # Raises for a broken symlink.
            raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _owner(data: bytes) -> str:
    """Return the group that wrote a marker, as text."""
    try:
        marker = CheckpointMarker.from_json(data.decode())
    except ValueError:
        return "somebody"
    return f"generation {marker.generation} of job {marker.job_id}"


@contextlib.contextmanager
def _as(what: str, path: str) -> Iterator[None]:
    """Prefix errors with the caller's text and path."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{what} {path}: {error}") from error

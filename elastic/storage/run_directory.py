"""The run directory: metrics of every report, and checkpoints that count once they are marked.

    RUN/run.json                 what became of the run; see `run_record`
    RUN/metrics.jsonl            what rank 0 reported, one JSON object a line
    RUN/metrics-rank3.jsonl      the same of rank 3
    RUN/metrics/*-rank0.jsonl    the same in parts, on object stores (see `metrics`)
    RUN/events.jsonl             what happened to the run; see `events`
    RUN/profiles/*.json          what `elastic profile` has sampled, for speedscope
    RUN/checkpoints/NAME/        files of one checkpoint
    RUN/checkpoints/NAME/_COMMITTED    written last: a directory without it does not exist
    RUN/checkpoints/NAME/_RECORDED     the coordinator has it in its records, as far as we heard
    RUN/checkpoints/NAME/_VALIDATED    what its validation found out (see `validation`)

Rule: every failure of the storage below becomes a `StorageError` that names the path and the
reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic.core.world import CheckpointRecord
from elastic.errors import StorageError
from elastic.storage.faults import reason_of
from elastic.storage.files import Files
from elastic.storage.marker import (
    DAMAGED,
    MARKER,
    METADATA,
    OURS,
    RECORDED,
    Marker,
    StoredFile,
)
from elastic.storage.metrics import MetricsLog, read_metrics
from elastic.storage.names import check_one
from elastic.storage.outputs import CHUNK_BYTES, Output
from elastic.storage.patience import PATIENCE_S
from elastic.storage.run_record import read_run
from elastic.storage.validation import completed

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


class RunDirectory:
    """One run's directory, on any file system that fsspec has."""

    def __init__(self, path: str, *, patience_s: float = PATIENCE_S) -> None:
        """Touch nothing yet.

        Args:
            path: storage_path/name, as an fsspec path such as "/data/run" or "s3://b/run".
            patience_s: how long passing faults of the storage are waited out, in seconds.

        Raises:
            StorageError: no file system for such a path.
        """
        self.files = Files(path, patience_s=patience_s)
        self.path = self.files.path
        self._logs: dict[int, MetricsLog] = {}
        self._unreadable: set[str] = set()

    def checkpoint_path(self, name: str) -> str:
        """Return the path under which users find a checkpoint."""
        return f"{self.path}/{CHECKPOINTS}/{name}"

    def checkpoint(self, name: str) -> Files:
        """Return the files of a checkpoint.

        Raises:
            StorageError: the name leads elsewhere.
        """
        return self.files.folder(_folder(name))

    def append_metrics(self, rank: int, record: dict[str, Any]) -> None:
        """Add a line to this rank's metrics; on an object store it may be seen a little later.

        Raises:
            StorageError: it cannot be written now; it is kept, and written with a later one.
        """
        log = self._logs.setdefault(rank, MetricsLog(self.files, rank))
        try:
            log.append(record)
        except StorageError as error:
            raise StorageError(f"rank {rank} {error}") from error

    def flush_metrics(self) -> None:
        """Let every line that was added be seen; for the end of a train function.

        Raises:
            StorageError: they cannot be written.
        """
        for log in self._logs.values():
            log.flush()

    def read_metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank reported, oldest first; a torn line is left out.

        Raises:
            StorageError: it is there and cannot be read.
        """
        return read_metrics(self.files, rank)

    def upload(
        self, source: Path, name: str, *, claim: Callable[[str], bool]
    ) -> tuple[StoredFile, ...]:
        """Copy the files below `source` into a checkpoint that is not committed yet.

        Args:
            source: a local directory.
            name: of the checkpoint.
            claim: is asked for each relative path; those that it refuses are some other
                member's to write.

        Returns:
            Every file of ours, claimed or not; those claimed with their checksums.

        Raises:
            StorageError: something cannot be read or written, or a checkpoint of this name counts.
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
                    files.append(_copied(path, target, relative))
                else:
                    files.append(StoredFile(relative, path.stat().st_size))
            return tuple(files)
        except Exception as error:
            reason = str(error) if isinstance(error, StorageError) else reason_of(error)
            raise StorageError(
                f"cannot store {current} in {self.checkpoint_path(name)}: {reason}"
            ) from error

    def weigh(self, name: str, *, claim: Callable[[str], bool]) -> tuple[StoredFile, ...]:
        """Return the files of a checkpoint that somebody else has written, and that do not change.

        Args:
            name: of the checkpoint.
            claim: is asked for each relative path; those that it refuses are some other member's
                to read.

        Raises:
            StorageError: something cannot be read, or there is nothing.
        """
        target = self.checkpoint(name)
        with _as("cannot read", target.path):
            stored = [
                target.checksum(file.path) if claim(file.path) else file
                for file in target.tree()
                if file.path not in OURS
            ]
        if not stored:
            raise StorageError(f"there are no files in {target.path}: write them before the report")
        return tuple(stored)

    def is_committed(self, name: str) -> bool:
        """Return whether a checkpoint of this name counts already.

        Raises:
            StorageError: the directory cannot be read.
        """
        return self.checkpoint(name).exists(MARKER)

    def check_free(self, name: str) -> None:
        """Refuse to write over a checkpoint that counts.

        Raises:
            StorageError: there is one of this name, or that cannot be found out.
        """
        if self.is_committed(name):
            raise StorageError(f"{self.checkpoint_path(name)} exists already; use another name")

    def commit(self, name: str, marker: Marker) -> str:
        """Make a checkpoint count, once all its files are there; the same twice is no error.

        Returns:
            Its path.

        Raises:
            StorageError: the marker cannot be written, or somebody else has committed a
                checkpoint under this name.
        """
        data = marker.to_json().encode()
        with _as("cannot commit", self.checkpoint_path(name)):
            files = self.checkpoint(name)
            # What is there may be ours: written, with an answer that was lost.
            if not files.create(MARKER, data) and (other := files.read(MARKER)) != data:
                raise StorageError(
                    f"{_owner(other)} has committed a checkpoint of this name already; give it "
                    f"another name, or remove the old one"
                )
        return self.checkpoint_path(name)

    def clear(self, name: str, *, kept: Collection[str]) -> None:
        """Remove from a checkpoint that is to be committed what an attempt before it has left.

        Under a name that a script chose one may have been killed, with other files: whoever then
        reads all that is there would take them for a part of it.

        Args:
            name: of the checkpoint.
            kept: relative paths of its files.

        Raises:
            StorageError: the directory cannot be listed, or something in it not be deleted.
        """
        files = self.checkpoint(name)
        for file in files.tree():
            if file.path not in (*kept, MARKER, METADATA):
                files.delete(file.path)

    def discard(self, name: str) -> None:
        """Remove what there is of a checkpoint that will not be committed, if that is possible."""
        # Without a marker it does not exist for anyone; it only takes up room.
        with contextlib.suppress(StorageError):
            self.files.delete(_folder(name))

    def remove(self, name: str) -> None:
        """Delete a committed checkpoint; it ceases to exist before its first file goes.

        Raises:
            StorageError: something cannot be deleted.
        """
        if self.is_committed(name):
            self.files.delete(f"{_folder(name)}/{MARKER}")
        self.files.delete(_folder(name))

    def mark_recorded(self, name: str) -> None:
        """Remember beside a committed checkpoint that the coordinator has recorded it.

        Raises:
            StorageError: the note cannot be written.
        """
        self.checkpoint(name).write(RECORDED, b"")

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of checkpoints, also of those that were never committed.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = self.files.list(f"{CHECKPOINTS}/{prefix}*")
        return [path.split("/")[1] for path in found]

    def recorded(self, job_id: str) -> list[tuple[str, Marker]]:
        """Return name and marker of reported checkpoints that are recorded, in that order.

        Of a job those that are noted as recorded, and those that its generations committed before
        them; those of earlier attempts of the same run, because nobody is left to do it.

        Raises:
            StorageError: the directory cannot be listed.
        """
        known, jobs = self._noted(), self.jobs()
        earlier = set(jobs[: jobs.index(job_id)]) if job_id in jobs else set()
        found = self.reported()
        reached = _reached(found, job_id, known)
        return [
            (name, marker)
            for name, marker in found
            if marker.job_id in earlier
            or (marker.job_id == job_id and marker.index <= reached.get(marker.generation, -1))
        ]

    def lost(self, job_id: str) -> list[str]:
        """Return the names of a job's checkpoints that can never be recorded.

        Their generation committed them when it was over already, or had no time to; of a later one
        something is recorded.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = [(name, marker) for name, marker in self.reported() if marker.job_id == job_id]
        reached = _reached(found, job_id, self._noted())
        present = max(reached, default=0)
        late = [
            name
            for name, marker in found
            if marker.generation < present and marker.index > reached.get(marker.generation, -1)
        ]
        whole = {path.split("/")[1] for path in self.files.list(f"{CHECKPOINTS}/*/{MARKER}")}
        named = re.compile(rf"checkpoint-{re.escape(job_id)}-g(\d+)-")
        torn = [
            name
            for name in self.names(f"checkpoint-{job_id}-g")
            if name not in whole and (begun := named.match(name)) and int(begun[1]) < present
        ]
        aside = {path.split("/")[1] for path in self.files.list(f"{CHECKPOINTS}/*/{DAMAGED}")}
        return [*late, *(name for name in torn if name not in aside)]

    def counting(self, job_id: str, generation: int, newest: str) -> list[tuple[str, Marker]]:
        """Return name and marker of all reported checkpoints but those that cannot be recorded.

        What a generation committed when it was over already, as far as the coordinator knew, is
        left out: the run has gone on from an older one. Of a generation that is over, those count
        that are noted as recorded, and those before them.

        Args:
            job_id: of the present attempt.
            generation: the present one: all that it has committed count.
            newest: name of the checkpoint that it began with, "" for none of this run.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = self.reported()
        reached = _reached(found, job_id, {*self._noted(), newest}) | {generation: math.inf}
        return [
            (name, marker)
            for name, marker in found
            if marker.job_id != job_id or marker.index <= reached.get(marker.generation, -1)
        ]

    def _noted(self) -> set[str]:
        """Return the names of what is noted as recorded."""
        return {path.split("/")[1] for path in self.files.list(f"{CHECKPOINTS}/*/{RECORDED}")}

    def reported(self) -> list[tuple[str, Marker]]:
        """Return name and marker of what all attempts reported and committed, oldest first.

        Raises:
            StorageError: the directory cannot be listed.
        """
        return [(name, marker) for name, marker in self.committed() if not marker.automatic]

    def committed(self) -> list[tuple[str, Marker]]:
        """Return name and marker of every checkpoint that counts, in the order of commits.

        Raises:
            StorageError: the directory cannot be listed.
        """
        jobs, found = self.jobs(), self.markers()
        # Where nobody has noted the order of attempts, it is that of their first commits.
        began: dict[str, int] = {}
        for _, marker in found:
            began[marker.job_id] = min(marker.unix_ns, began.get(marker.job_id, marker.unix_ns))

        def age(pair: tuple[str, Marker]) -> tuple[int, int, str, int, int]:
            # Inside an attempt no clock counts: those of two nodes differ, and may be set back.
            job_id, order = pair[1].job_id, (pair[1].generation, pair[1].index)
            if job_id in jobs:
                return jobs.index(job_id), 0, job_id, *order
            return -1, began[job_id], job_id, *order

        return sorted(found, key=age)

    def automatic(self) -> list[tuple[str, Marker]]:
        """Return name and marker of what was committed without a report, oldest first.

        Raises:
            StorageError: the directory cannot be listed.
        """
        return [(name, marker) for name, marker in self.committed() if marker.automatic]

    def jobs(self) -> tuple[str, ...]:
        """Return the ids of the run's attempts, in order; () if it has no record.

        Raises:
            StorageError: the record cannot be read.
        """
        record = read_run(self.files)
        return record.jobs if record is not None else ()

    def records(self) -> tuple[CheckpointRecord, ...]:
        """Return the checkpoints that count, of all attempts, in the order of commits.

        Without those that can never be recorded.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = self.committed()
        lost = {name for job in {m.job_id for _, m in found} for name in self.lost(job)}
        return tuple(self.record(name, marker) for name, marker in found if name not in lost)

    def record(self, name: str, marker: Marker) -> CheckpointRecord:
        """Return a checkpoint as the coordinator knows it."""
        path = self.checkpoint_path(name)
        return CheckpointRecord(
            path, marker.generation, marker.index, marker.metrics, marker.status
        )

    def newest_checkpoint(self) -> str:
        """Return the path of the reported checkpoint that was committed last, "" for none.

        Raises:
            StorageError: the directory cannot be listed.
        """
        reported = self.reported()
        return self.checkpoint_path(reported[-1][0]) if reported else ""

    def newest_generation(self, job_id: str) -> int:
        """Return the last generation of an attempt that has a checkpoint here, 0 if none has.

        Raises:
            StorageError: the directory cannot be listed.
        """
        of_job = (marker for _, marker in self.markers() if marker.job_id == job_id)
        return max((marker.generation for marker in of_job), default=0)

    def set_aside(self, name: str, reason: str) -> None:
        """Let a damaged checkpoint not exist any more; its files stay where they are.

        Raises:
            StorageError: its marker cannot be replaced.
        """
        self.checkpoint(name).write(DAMAGED, reason.encode())
        self.checkpoint(name).delete(MARKER)

    def markers(self) -> list[tuple[str, Marker]]:
        """Return name and marker of every checkpoint whose marker can be read; see `marker`.

        Raises:
            StorageError: the directory cannot be read.
        """
        found = []
        for name in self.names():
            marker = self.marker(name)
            if marker is not None:
                found.append((name, marker))
        return found

    def marker(self, name: str) -> Marker | None:
        """Return a checkpoint's marker, None if it has none that can be read.

        With what its validation found out, as far as that is known.

        Raises:
            StorageError: storage cannot be read.
        """
        files = self.checkpoint(name)
        try:
            return completed(files, Marker.from_json(files.read(MARKER).decode()))
        except ValueError as error:
            if files.path not in self._unreadable:
                self._unreadable.add(files.path)
                log.warning(
                    "marker_unreadable path=%s error=%r: the checkpoint is passed over",
                    files.path,
                    str(error),
                )
            return None
        except StorageError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None  # Not committed, or pruned by another member since we listed it.
            raise


def _folder(name: str) -> str:
    return f"{CHECKPOINTS}/{check_one('checkpoint', name)}"


def _reached(
    found: Sequence[tuple[str, Marker]], job_id: str, known: Collection[str]
) -> dict[int, float]:
    """Return, of each generation of a job, the index of the last checkpoint that is known."""
    reached: dict[int, float] = {}
    for name, marker in found:
        if marker.job_id == job_id and name in known:
            reached[marker.generation] = max(
                marker.index, reached.get(marker.generation, marker.index)
            )
    return reached


def _files_below(folder: Path, above: tuple[os.stat_result, ...] = ()) -> Iterator[Path]:
    """Yield all files, also behind links to folders, under each of their names.

    A link to a folder that it is in leads nowhere new, and is passed over.

    Raises:
        OSError: a link that leads nowhere, or what is neither a file nor a folder.
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
            os.stat(path)  # A link to nothing says so itself.
            raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _copied(path: Path, target: Files, relative: str) -> StoredFile:
    def copy(output: Output) -> None:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                output.write(chunk)

    return target.put(relative, copy)


def _owner(data: bytes) -> str:
    """Return who wrote a marker, in words."""
    try:
        marker = Marker.from_json(data.decode())
    except ValueError:
        return "somebody"
    return f"generation {marker.generation} of job {marker.job_id}"


@contextlib.contextmanager
def _as(what: str, path: str) -> Iterator[None]:
    """Say what was tried, in words of the caller."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{what} {path}: {error}") from error

"""Checks a checkpoint against its marker: existence, size and checksum of every file.

Rule: files are only read, a few megabytes at a time, never loaded as pickle or tensors. Each
damaged file is named with its fault; an intact checkpoint is what was committed, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import NotFound, StorageError
from elastic.storage.faults import reason_of
from elastic.storage.files import Files
from elastic.storage.marker import MARKER, METADATA, UNKNOWN, CheckpointMarker, StoredFile
from elastic.storage.retry import TIMEOUT_S
from elastic.storage.run_directory import CHECKPOINTS
from elastic.storage.run_record import RUN_FILE

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FileDamage(NamedTuple):
    """A damaged file of a checkpoint.

    Attributes:
        file: relative to the checkpoint.
        how: text, such as "missing".
    """

    file: str
    how: str


@dataclass(frozen=True)
class VerifyResult:
    """Result of verifying one checkpoint.

    Attributes:
        path: of its directory.
        marker: its marker, None if that cannot be read.
        damages: by file; empty if it is intact.
        unchecked: files of the right size without a recorded checksum.
    """

    path: str
    marker: CheckpointMarker | None
    damages: tuple[FileDamage, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.damages

    def __str__(self) -> str:
        if self.is_whole:
            return f"checkpoint {self.path} is whole"
        return f"checkpoint {self.path} is damaged: " + "; ".join(
            f"{file}: {how}" for file, how in self.damages
        )


def verify(path: str, *, patience_s: float = TIMEOUT_S) -> VerifyResult:
    """Read all of a checkpoint and compare it with its marker.

    Args:
        path: of its directory, an fsspec path.
        patience_s: how long transient faults of the storage are retried.

    Returns:
        The result; a file that cannot be read counts as damaged.
    """
    files = Files(path, patience_s=patience_s)
    try:
        marker = CheckpointMarker.from_json(files.read(MARKER).decode())
    except StorageError as error:
        return VerifyResult(
            path, None, (FileDamage(MARKER, _unreadable(error, "never committed")),)
        )
    except ValueError as error:
        return VerifyResult(path, None, (FileDamage(MARKER, f"torn or changed ({error})"),))
    damages, unchecked = [], []
    for expected in marker.files:
        try:
            how = damage_of(files, expected)
        except StorageError as error:
            how = _unreadable(error, "missing")
        if how:
            damages.append(FileDamage(expected.path, how))
        elif expected.crc32 == UNKNOWN:
            unchecked.append(expected.path)
    return VerifyResult(path, marker, tuple(damages), tuple(unchecked))


def checkpoints_at(path: str) -> tuple[str, ...]:
    """Return the checkpoints that a path names: itself, or all of a run directory.

    Of a run directory every checkpoint folder is returned, with or without a marker.

    Raises:
        NotFound: it is neither.
    """
    files = Files(path)
    if files.exists(MARKER):
        return (files.path,)
    if files.exists(CHECKPOINTS) or files.exists(RUN_FILE):
        return tuple(f"{files.path}/{name}" for name in files.list(f"{CHECKPOINTS}/*"))
    if files.exists(""):
        raise NotFound(
            f"{path} is neither a checkpoint (it has no {MARKER}: it was never committed) nor a "
            f"run directory (it has no folder {CHECKPOINTS}); give the path of one"
        )
    raise NotFound(f"{path} does not exist; give the path of a checkpoint or of a run directory")


def damage_of(files: Files, expected: StoredFile) -> str:
    """Return how a file of a checkpoint is damaged, "" if it is intact.

    Raises:
        StorageError: it cannot be read; the file itself may be intact.
    """
    if expected.path == METADATA:
        return ""  # Users may write it at any time.
    try:
        found = files.checksum(expected.path)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return "missing"
        raise
    if found.size < expected.size:
        return f"truncated: {found.size} bytes instead of {expected.size}"
    if found.size > expected.size:
        return f"grown: {found.size} bytes instead of {expected.size}"
    if expected.crc32 not in (UNKNOWN, found.crc32):
        return f"changed: checksum {found.crc32:08x} instead of {expected.crc32:08x}"
    return ""


def _unreadable(error: StorageError, absent: str) -> str:
    cause = error.__cause__
    if isinstance(cause, ABSENT):
        return absent
    return f"cannot be read ({reason_of(cause) if cause else error})"

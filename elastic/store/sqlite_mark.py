"""The mark beside an embedded store: the newest acknowledged revision.

SQLite does not detect lost commits: it ends the recovery of a write-ahead log at the first damaged
frame, and treats a missing or empty log or file as an empty one.

Rule: a store that lacks acknowledged commits is not opened. The mark is written after each commit
and before its acknowledgement. It is not synced to the disk: after a power cut it may be behind the
store, never ahead of it.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import CorruptRecord, StoreUnavailable, UsageError

MARK = struct.Struct(">8sQI")
MAGIC = b"ELSTREV1"


class StoreMark:
    """The mark of an open store."""

    def __init__(self, path: Path) -> None:
        """Open the mark, created if missing.

        Raises:
            UsageError: it cannot be created.
        """
        self.path = mark_path(path)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"store {path}: {self.path} cannot be made: {error.strerror}"
            ) from None

    def write(self, revision: int) -> None:
        """Write a revision, before it is acknowledged.

        Raises:
            StoreUnavailable: it cannot be written now.
        """
        body = MARK.pack(MAGIC, revision, zlib.crc32(struct.pack(">8sQ", MAGIC, revision)))
        try:
            os.pwrite(self._file, body, 0)
        except OSError as error:
            raise StoreUnavailable(
                f"store mark {self.path}: {error.strerror}; it recovers by itself once there is "
                f"free space, and the disk works"
            ) from error

    def close(self) -> None:
        os.close(self._file)


def mark_path(path: Path) -> Path:
    """Return the path of a store's mark."""
    return path.with_name(path.name + ".revision")


def read_mark(path: Path) -> int:
    """Return the newest acknowledged revision of a store, 0 if there is no mark.

    Raises:
        CorruptRecord: the mark is damaged.
    """
    try:
        body = mark_path(path).read_bytes()
    except FileNotFoundError:
        return 0
    if not body:
        return 0  # A power cut came between its creation and the first write.
    if len(body) == MARK.size:
        magic, revision, crc32 = MARK.unpack(body)
        if magic == MAGIC and crc32 == zlib.crc32(body[:-4]):
            return int(revision)
    raise CorruptRecord(
        f"store {path}: {mark_path(path)} is damaged, so it is unknown whether all that was "
        f"acknowledged is there; {advice(path)}"
    )


def check_mark(path: Path) -> None:
    """Refuse a store that lacks acknowledged commits; read-only.

    Raises:
        CorruptRecord: with both revisions, and advice.
    """
    acknowledged = read_mark(path)
    if not acknowledged:
        return
    found, why = read_revision(path)
    if found < acknowledged:
        raise CorruptRecord(
            f"store {path} holds revision {found}, and revision {acknowledged} was acknowledged: "
            f"{why or 'its write-ahead log is damaged, cut or gone'}; {advice(path)}"
        )


def advice(path: Path) -> str:
    """Return the advice for a store that lacks acknowledged commits."""
    return (
        f"move the file away, with {path.name}-wal and {mark_path(path).name}, and put a backup in "
        f"its place ('elastic-coord restore'), or continue with what is left ('elastic-coord store "
        f"salvage --store sqlite:{path}')"
    )


def read_revision(path: Path) -> tuple[int, str]:
    """Return the newest readable revision, and a reason if there is none; read-only."""
    if not path.exists():
        return 0, "the file is gone"
    if not path.stat().st_size:
        return 0, "the file is empty"
    database: sqlite3.Connection | None = None
    try:
        # Read-only: otherwise the last close would write back the log and delete it.
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        row = database.execute("SELECT value FROM numbers WHERE name = 'revision'").fetchone()
        return (int(row[0]), "") if row is not None else (0, "it has no revision")
    except (sqlite3.DatabaseError, ValueError) as error:
        return 0, f"it cannot be read ({error})"
    finally:
        if database is not None:
            database.close()


@dataclass(frozen=True)
class SalvageReport:
    """Result of salvaging a store.

    Attributes:
        acknowledged: the newest acknowledged revision, 0 if unknown.
        found: the newest readable revision.
        copies: paths of the copies of the original files.
    """

    acknowledged: int
    found: int
    copies: tuple[Path, ...]


def set_aside(path: Path) -> SalvageReport:
    """Copy the files of a store, and reset its mark so that it can be opened with what is left.

    Raises:
        UsageError: there is no readable store, or a copy cannot be written.
    """
    try:
        acknowledged = read_mark(path)
    except CorruptRecord:
        acknowledged = 0
    found, why = read_revision(path)
    if not found:
        raise UsageError(f"nothing can be salvaged from store {path}: {why}")
    copies = []
    number = next(n for n in range(1, 1 << 20) if not _aside(path, n).exists())
    for one in (path, path.with_name(path.name + "-wal"), mark_path(path)):
        if one.exists():
            target = _aside(one, number)
            try:
                file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(file, "wb") as copy:
                    copy.write(one.read_bytes())
            except OSError as error:
                raise UsageError(f"{target} cannot be written: {error.strerror}") from error
            copies.append(target)
    mark = StoreMark(path)
    mark.write(found)
    mark.close()
    return SalvageReport(acknowledged, found, tuple(copies))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.damaged-{number}")

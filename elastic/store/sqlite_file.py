"""The file of the embedded store: its lock, and checks of its owner, version and integrity.

Rule: nothing is repaired or guessed. A file that is in use by another process, belongs to another
program, was written by another version, or is damaged, is refused with its path and advice.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import CorruptRecord, StoreError, StoreUnavailable, UsageError

APPLICATION_ID = 0x454C5354
"""Marks a SQLite file as ours: "ELST"."""
SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO numbers VALUES ('revision', 1);

CREATE TABLE entries (
    key BLOB PRIMARY KEY,
    value BLOB NOT NULL,
    mod_revision INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
"""

DAMAGED = ("not a database", "malformed", "no such table", "no such column", "has no column")
ADVICE = "move the file away (and those beside it) for an empty store, or put a copy of it back"


class FileLock:
    """An exclusive lock, which ends with the process.

    The lock is on a separate file beside the store, which is never deleted: deleting a lock file
    could break the lock of a process that has just opened it.
    """

    def __init__(self, path: Path) -> None:
        """Lock, and write our pid into the lock file.

        Raises:
            UsageError: another process holds it, or the lock file cannot be created.
        """
        self.path = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"store {path} cannot be opened: {error.strerror} ({error.filename}); name a file "
                f"in a folder where this user may write"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise UsageError(
                f"store {path} is in use by the process with pid {holder}, and can have only one; "
                f"stop that process, name another file, or use etcd for several coordinators"
            ) from None
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            # On a full disk the lock still holds; only the pid is missing.
            return

    def release(self) -> None:
        os.close(self._file)


@contextmanager
def own_errors(path: Path) -> Iterator[None]:
    """Turn sqlite's errors into ours.

    Raises:
        CorruptRecord: the file is damaged, or no SQLite file.
        StoreUnavailable: disk full, I/O error, no permission: it may work later.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if any(words in str(error) for words in DAMAGED):
            raise CorruptRecord(f"store {path} is damaged ({error}); {ADVICE}") from error
        if isinstance(error, sqlite3.OperationalError):
            raise StoreUnavailable(
                f"store {path}: {error}; it is not known whether the last commit was written; it "
                f"goes on by itself once there is free space, the disk works, and no other program "
                f"holds it"
            ) from error
        raise StoreError(f"store {path}: {error}; {ADVICE}") from error


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file, created if missing or empty; for the calling thread only.

    Raises:
        UsageError: not a file, or it cannot be opened.
        CorruptRecord: damaged, or no SQLite file.
        StoreError: another program's file, or one of another version of ours.
        StoreUnavailable: disk full or I/O error.
    """
    try:
        # Created here for its mode: entries may contain private data that users submitted.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UsageError(
            f"store {path} cannot be opened: {error.strerror}; name a file that this user may write"
        ) from None
    with own_errors(path):
        database = sqlite3.connect(path, isolation_level=None)
        # We store no text: what damage has turned into text is refused by its key, also if it is no
        # UTF-8, which SQLite would take for an error that may pass.
        database.text_factory = _lenient_text
        try:
            _prepare(database, path)
        except BaseException:
            database.close()
            raise
    return database


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    owner = int(database.execute("PRAGMA application_id").fetchone()[0])
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    tables = int(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if owner != APPLICATION_ID and (owner or version or tables):
        raise StoreError(
            f"store {path} is the SQLite file of another program (application id {owner:#x}, "
            f"{tables} tables); it was left as it is; name another file"
        )
    if owner == APPLICATION_ID and version != SCHEMA_VERSION:
        raise StoreError(
            f"store {path} has schema {version}, this version of elastic-torch reads schema "
            f"{SCHEMA_VERSION}; install the version that wrote it, or name another file"
        )
    database.execute("PRAGMA journal_mode=WAL")
    # Each commit is durable before it is acknowledged.
    database.execute("PRAGMA synchronous=FULL")
    if owner != APPLICATION_ID:
        _create(database)
        return
    # Move all commits from the log into the file, where damage of the log cannot lose them.
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    verdict = str(database.execute("PRAGMA integrity_check(1)").fetchone()[0])
    if verdict != "ok":
        raise CorruptRecord(f"store {path} is damaged ({verdict.splitlines()[-1]}); {ADVICE}")


def _lenient_text(data: bytes) -> str:
    return data.decode(errors="replace")


def _create(database: sqlite3.Connection) -> None:
    """Write the schema and our application id in one transaction: a file has both or none."""
    script = (
        f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id={APPLICATION_ID}; "
        f"PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
    )
    database.executescript(script)

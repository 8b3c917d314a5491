"""The store in a SQLite file: the default for one coordinator, durable at every commit.

Rule: one process holds the file, one thread of it uses SQLite, and each commit is one SQLite
transaction, durable before it is acknowledged. Rows have checksums: a damaged row is refused with
its key.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from elastic.errors import CorruptRecord
from elastic.store.interface import CommitResult, Compare, Delete, Entry, StoreSnapshot, Write
from elastic.store.rules import check_commit, closed, encode_prefix, end_of_prefix, refusal
from elastic.store.sqlite_file import ADVICE, FileLock, open_database, own_errors
from elastic.store.sqlite_mark import StoreMark, check_mark

COLUMNS = "key, value, mod_revision, checksum"

Row = tuple[bytes, bytes, int, int]
Answer = TypeVar("Answer")


async def sqlite_store(path: Path) -> SqliteStore:
    """Open the store in a file, created if missing.

    Args:
        path: the file; beside it are SQLite's PATH-wal and PATH-shm, and our PATH.lock and
            PATH.revision.

    Raises:
        UsageError: another process uses the file, or it cannot be opened.
        CorruptRecord: the file is damaged, or lacks acknowledged commits.
        StoreError: the file belongs to another program, or to another version of this one.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-store")
    opening = asyncio.get_running_loop().run_in_executor(thread, SqliteFile, path)
    try:
        return SqliteStore(await opening, thread)
    except BaseException:
        thread.shutdown(wait=False)
        raise


class SqliteStore:
    """A `Store` on a file; its thread alone uses the file, one call after the other."""

    def __init__(self, file: SqliteFile, thread: Executor) -> None:
        """Take ownership of both; the thread has opened the file."""
        self._file = file
        self._thread = thread
        self._is_closed = False

    async def read(self, prefix: str) -> StoreSnapshot:
        encode_prefix(prefix)
        return await self._run(lambda: self._file.read(prefix))

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Apply all writes if all comparisons hold; durable when it returns."""
        check_commit(compares, writes)
        given = tuple(compares), tuple(writes)
        return await self._run(lambda: self._file.commit(*given))

    async def close(self) -> None:
        """Close the file, after queued calls."""
        if self._is_closed:
            return
        closing = self._run(self._file.close)
        self._is_closed = True
        await closing
        self._thread.shutdown(wait=False)

    def _run(self, call: Callable[[], Answer]) -> asyncio.Future[Answer]:
        if self._is_closed:
            raise closed()
        running = asyncio.get_running_loop().run_in_executor(self._thread, call)
        # A commit that runs cannot be stopped, only its caller cancelled.
        return asyncio.shield(running)


class SqliteFile:
    """Entries in one file; only for the thread that created it."""

    def __init__(self, path: Path) -> None:
        """Lock and open the file; see `sqlite_store` for the errors."""
        self._path = path
        self._lock = FileLock(path)
        try:
            check_mark(path)
            self._database = open_database(path)
            with self._errors_undone():
                self._revision = self._read_revision()
            self._mark = StoreMark(path)
            self._mark.write(self._revision)
        except BaseException:
            self._lock.release()
            raise

    def read(self, prefix: str) -> StoreSnapshot:
        with self._errors_undone():
            bounds, values = _range(prefix)
            rows = self._database.execute(
                f"SELECT {COLUMNS} FROM entries WHERE {bounds} ORDER BY key", values
            ).fetchall()
            return StoreSnapshot(tuple(self._entry(row) for row in rows), self._revision)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        with self._errors_undone():
            if refused := refusal(compares, self._lookup, self._revision):
                return refused
            revision = self._revision + 1
            self._database.execute("BEGIN IMMEDIATE")
            for write in writes:
                self._write(write, revision)
            self._database.execute(
                "UPDATE numbers SET value = ? WHERE name = 'revision'", (revision,)
            )
            self._database.execute("COMMIT")
        # After the commit: earlier, readers could act on a revision that a power cut undoes.
        self._revision = revision
        self._mark.write(revision)
        return CommitResult(True, revision)

    def close(self) -> None:
        try:
            self._mark.close()
            with own_errors(self._path):
                self._database.close()
        finally:
            self._lock.release()

    def _write(self, write: Write, revision: int) -> None:
        key = write.key.encode()
        if isinstance(write, Delete):
            self._database.execute("DELETE FROM entries WHERE key = ?", (key,))
            return
        self._database.execute(
            f"INSERT OR REPLACE INTO entries ({COLUMNS}) VALUES (?, ?, ?, ?)",
            (key, write.value, revision, _checksum(key, write.value, revision)),
        )

    def _lookup(self, key: str) -> Entry | None:
        row = self._database.execute(
            f"SELECT {COLUMNS} FROM entries WHERE key = ?", (key.encode(),)
        ).fetchone()
        return self._entry(row) if row is not None else None

    def _read_revision(self) -> int:
        row = self._database.execute("SELECT value FROM numbers WHERE name = 'revision'").fetchone()
        if row is None or not isinstance(row[0], int):
            raise CorruptRecord(f"store {self._path} has lost its revision; {ADVICE}")
        return int(row[0])

    def _entry(self, row: Row) -> Entry:
        key, value, mod_revision, checksum = row
        name = key.decode(errors="replace") if isinstance(key, bytes) else key
        if [type(one) for one in row[:3]] != [bytes, bytes, int]:
            raise CorruptRecord(
                f"store {self._path}: the record of key {name!r} is damaged, or another program "
                f"has written it; {ADVICE}"
            )
        if _checksum(key, value, mod_revision) != checksum:
            raise CorruptRecord(
                f"store {self._path}: the record of key {name!r} at revision {mod_revision} "
                f"does not match its checksum; {ADVICE}"
            )
        return Entry(name, value, mod_revision)

    @contextmanager
    def _errors_undone(self) -> Iterator[None]:
        """On an error, roll back the open transaction, and raise the error as ours."""
        with own_errors(self._path):
            try:
                yield
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


def _range(prefix: str) -> tuple[str, tuple[bytes, ...]]:
    """Return the SQL condition for keys under a prefix, and its values."""
    start = encode_prefix(prefix)
    end = end_of_prefix(start)
    return ("key >= ?", (start,)) if end is None else ("key >= ? AND key < ?", (start, end))


def _checksum(key: bytes, value: bytes, mod_revision: int) -> int:
    """Return the CRC-32 of all fields of an entry; the key's length separates key and value."""
    numbers = struct.pack("<qq", len(key), mod_revision)
    return zlib.crc32(value, zlib.crc32(key, zlib.crc32(numbers)))

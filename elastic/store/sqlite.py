"""The store in a SQLite file: the default for one coordinator, durable at every commit.

Rule: one process holds the file, one thread of it uses SQLite, and each commit is one SQLite
transaction, durable before it is acknowledged. Rows have checksums: a damaged row is refused with
its key.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import Compacted, CorruptRecord
from elastic.store.interface import (
    Change,
    ChangeKind,
    CommitResult,
    Compare,
    Entry,
    Lease,
    StoreSnapshot,
    Write,
)
from elastic.store.local import HistoryPage, LocalStore
from elastic.store.rules import deletion, encode_prefix, end_of_prefix, plan_commit
from elastic.store.sqlite_file import ADVICE, FileLock, open_database, own_errors
from elastic.store.sqlite_mark import StoreMark, check_mark

PAGE_CHANGES = 500
"""Changes that a watch reads from the history at once; a revision is never split."""

ENTRY_COLUMNS = "key, value, create_revision, mod_revision, lease, checksum"
CHANGE_COLUMNS = f"{ENTRY_COLUMNS}, kind"

Row = tuple[bytes, bytes, int, int, int, int]


async def sqlite_store(path: Path, clock: Callable[[], float] = time.monotonic) -> LocalStore:
    """Open the store in a file, created if missing.

    Args:
        path: the file; beside it are SQLite's PATH-wal and PATH-shm, and our PATH.lock and
            PATH.revision.
        clock: monotonic seconds, for leases.

    Raises:
        UsageError: another process uses the file, or it cannot be opened.
        CorruptRecord: the file is damaged, or lacks acknowledged commits.
        StoreError: the file belongs to another program, or to a newer version of this one.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-store")
    opening = asyncio.get_running_loop().run_in_executor(executor, SqliteEngine, path)
    try:
        return LocalStore(await opening, executor=executor, clock=clock)
    except BaseException:
        executor.shutdown(wait=False)
        raise


class SqliteEngine:
    """Entries and their history in one file; only for the thread that created it."""

    def __init__(self, path: Path) -> None:
        """Lock and open the file; see `sqlite_store` for the errors."""
        self._path = path
        self._lock = FileLock(path)
        try:
            check_mark(path)
            self._database = open_database(path)
            with self._errors_undone():
                self.revision = self._number("revision")
            self._mark = StoreMark(path)
            self._mark.write(self.revision)
        except BaseException:
            self._lock.release()
            raise

    def read(self, prefix: str) -> StoreSnapshot:
        """Return the entries under a prefix."""
        with self._errors_undone():
            bounds, values = _range(prefix)
            rows = self._database.execute(
                f"SELECT {ENTRY_COLUMNS} FROM entries WHERE {bounds} ORDER BY key", values
            ).fetchall()
            return StoreSnapshot(tuple(self._entry(row) for row in rows), self.revision)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Compare and write; durable when it returns."""
        with self._errors_undone():
            plan = plan_commit(
                compares,
                writes,
                lookup=self._lookup,
                lease_exists=self._lease_exists,
                revision=self.revision,
            )
            if isinstance(plan, CommitResult):
                return plan
            self._apply(plan)
            return CommitResult(True, self.revision)

    def history(self, prefix: str, from_revision: int) -> HistoryPage:
        """Return the first changes since a revision."""
        with self._errors_undone():
            oldest = self._number("oldest")
            if from_revision < oldest:
                raise Compacted(from_revision, oldest)
            bounds, values = _range(prefix)
            select = f"SELECT {CHANGE_COLUMNS} FROM history WHERE {bounds}"
            order = "ORDER BY mod_revision, position"
            rows = self._database.execute(
                f"{select} AND mod_revision >= ? {order} LIMIT ?",
                (*values, from_revision, PAGE_CHANGES),
            ).fetchall()
            next_revision = max(from_revision, self.revision + 1)
            if len(rows) == PAGE_CHANGES:
                last = rows[-1][3]
                whole = self._database.execute(
                    f"{select} AND mod_revision = ? {order}", (*values, last)
                ).fetchall()
                rows = [row for row in rows if row[3] < last] + whole
                next_revision = last + 1
            changes = (Change(ChangeKind(row[6]), self._entry(row[:6])) for row in rows)
            return HistoryPage(tuple(changes), next_revision)

    def compact(self, revision: int) -> None:
        """Drop changes older than a revision."""
        with self._transaction():
            self._database.execute("DELETE FROM history WHERE mod_revision < ?", (revision,))
            self._database.execute(
                "UPDATE numbers SET value = max(value, ?) WHERE name = 'oldest'", (revision,)
            )

    def grant_lease(self, ttl_s: float) -> int:
        """Create a lease; ids always increase, also over restarts."""
        with self._transaction():
            made = self._database.execute("INSERT INTO leases (ttl_s) VALUES (?)", (ttl_s,))
            return int(made.lastrowid or 0)

    def leases(self) -> tuple[Lease, ...]:
        with self._errors_undone():
            rows = self._database.execute("SELECT lease, ttl_s FROM leases ORDER BY lease")
            return tuple(Lease(int(lease_id), float(ttl_s)) for lease_id, ttl_s in rows)

    def end_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys."""
        with self._errors_undone():
            rows = self._database.execute(
                f"SELECT {ENTRY_COLUMNS} FROM entries WHERE lease != 0 AND lease = ? ORDER BY key",
                (lease_id,),
            ).fetchall()
            keys = [self._entry(row).key for row in rows]
            changes = tuple(deletion(key, self.revision + 1) for key in keys)
            if changes or self._lease_exists(lease_id):
                self._apply(changes, ended_lease=lease_id)

    def close(self) -> None:
        """Close the file, and release its lock."""
        try:
            self._mark.close()
            with own_errors(self._path):
                self._database.close()
        finally:
            self._lock.release()

    def _apply(self, changes: tuple[Change, ...], *, ended_lease: int = 0) -> None:
        """Write changes, all at the next revision, in one transaction."""
        revision = self.revision + 1
        if ended_lease and not changes:
            revision = self.revision
        with self._transaction():
            for position, change in enumerate(changes):
                self._write(change, position)
            self._database.execute("DELETE FROM leases WHERE lease = ?", (ended_lease,))
            self._database.execute(
                "UPDATE numbers SET value = ? WHERE name = 'revision'", (revision,)
            )
        # After the commit: earlier, readers could act on a revision that a power cut undoes.
        self.revision = revision
        self._mark.write(revision)

    def _write(self, change: Change, position: int) -> None:
        row = _row(change.entry)
        if change.kind is ChangeKind.PUT:
            self._database.execute(
                f"INSERT OR REPLACE INTO entries ({ENTRY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row
            )
        else:
            self._database.execute("DELETE FROM entries WHERE key = ?", (row[0],))
        self._database.execute(
            f"INSERT INTO history ({CHANGE_COLUMNS}, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, change.kind.value, position),
        )

    def _lookup(self, key: str) -> Entry | None:
        row = self._database.execute(
            f"SELECT {ENTRY_COLUMNS} FROM entries WHERE key = ?", (key.encode(),)
        ).fetchone()
        return self._entry(row) if row is not None else None

    def _lease_exists(self, lease_id: int) -> bool:
        found = self._database.execute("SELECT 1 FROM leases WHERE lease = ?", (lease_id,))
        return found.fetchone() is not None

    def _number(self, name: str) -> int:
        row = self._database.execute("SELECT value FROM numbers WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise CorruptRecord(f"store {self._path} has lost its {name} number; {ADVICE}")
        return int(row[0])

    def _entry(self, row: Row) -> Entry:
        key, value, create_revision, mod_revision, lease, checksum = row
        if not (isinstance(key, bytes) and isinstance(value, bytes)):
            raise CorruptRecord(
                f"store {self._path}: another program has written to key {key!r}; {ADVICE}"
            )
        entry = Entry(
            bytes(key).decode(errors="replace"), bytes(value), create_revision, mod_revision, lease
        )
        if _checksum(entry) != checksum:
            raise CorruptRecord(
                f"store {self._path}: the record of key {entry.key!r} at revision {mod_revision} "
                f"does not match its checksum; {ADVICE}"
            )
        return entry

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors_undone():
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")

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


def _row(entry: Entry) -> Row:
    return (
        entry.key.encode(),
        entry.value,
        entry.create_revision,
        entry.mod_revision,
        entry.lease,
        _checksum(entry),
    )


def _checksum(entry: Entry) -> int:
    """Return the CRC-32 of all fields of an entry; the key's length separates key and value."""
    key = entry.key.encode()
    numbers = struct.pack("<qqqq", len(key), entry.create_revision, entry.mod_revision, entry.lease)
    return _chain((numbers, key, entry.value))


def _chain(parts: Iterable[bytes]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum

"""Backup and restore of the embedded store; a backup may be taken while a coordinator runs.

Rule: a file appears complete, checked, and under an unused name, or not at all. A restored store
gets a new history id: its terms repeat earlier ones, and agents must not take them for those of
replaced coordinators.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.coord.journal import Journal
from elastic.coord.leadership import LeaderKey, Leadership, term_of
from elastic.errors import ConfigError, StoreError, StoreUnavailable, UsageError
from elastic.runtime.clock import SystemClock
from elastic.store.etcd_wire import DEFAULT_ROOT, KeySpace
from elastic.store.interface import Compare, Delete
from elastic.store.open import etcd_address, sqlite_path
from elastic.store.sqlite import sqlite_store
from elastic.store.sqlite_file import APPLICATION_ID, SCHEMA_VERSION, FileLock, own_errors
from elastic.store.sqlite_mark import SalvageReport, StoreMark, check_mark, read_mark, set_aside

ETCD_ADVICE = (
    "etcd keeps copies on its members and has tools of its own: 'etcdctl snapshot save FILE' and "
    "'etcdctl snapshot restore'; after a restore delete the key {key}, so that "
    "agents do not take the terms that begin anew for those of a coordinator that was replaced"
)


@dataclass(frozen=True)
class BackupSummary:
    """The contents of a copy.

    Attributes:
        revision: of the store when it was taken.
        term: the last one in it, 0 if there was none.
        jobs: number of jobs, including ended ones.
    """

    revision: int
    term: int
    jobs: int


async def back_up(store: str, prefix: str, target: Path) -> BackupSummary:
    """Copy a consistent snapshot of a store into a file, also while a coordinator writes to it.

    Raises:
        ConfigError: the store is not an embedded one.
        UsageError: there is no such store, or the target exists.
        CorruptRecord: a record of the store cannot be read; nothing was written.
        StoreError: not a store of this version.
    """
    source = _file_of(store, prefix)
    with _draft_for(target) as draft:
        _copy(source, draft)
        copied = await _checked(draft, prefix)
        _put(draft, target)
    return copied


async def restore(source: Path, store: str, prefix: str) -> BackupSummary:
    """Create a store from a backup.

    Raises:
        ConfigError: the store is not an embedded one.
        UsageError: there is no such backup, or the store exists or is in use.
        CorruptRecord: the backup is damaged; nothing was written.
        StoreError: not a copy of a store, or one of another version.
    """
    target = _file_of(store, prefix)
    lock = FileLock(target)
    try:
        with _draft_for(target) as draft:
            _copy(source, draft)
            copied = await _checked(draft, prefix, begin_history=True)
            mark = StoreMark(target)  # It may still be that of the lost store.
            mark.write(copied.revision)
            mark.close()
            _put(draft, target)
    finally:
        lock.release()
    return copied


async def check(store: str, prefix: str) -> tuple[BackupSummary, int]:
    """Read and verify a whole store, also while a coordinator writes to it; change nothing.

    Returns:
        Its contents, and the newest acknowledged revision, 0 if none is recorded.

    Raises:
        CorruptRecord: something is damaged, or an acknowledged write is missing.
        As `back_up` does.
    """
    source = _file_of(store, prefix)
    acknowledged = read_mark(source)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        _copy(source, draft)
        copied = await _checked(draft, prefix)
    if copied.revision < acknowledged:
        check_mark(source)
    return copied, acknowledged


async def salvage(store: str, prefix: str) -> tuple[BackupSummary, SalvageReport]:
    """Make a store usable again that lacks acknowledged writes, with its remaining contents.

    Raises:
        UsageError: a coordinator uses it, or nothing is left.
        CorruptRecord: the remaining contents cannot be read either.
    """
    source = _file_of(store, prefix)
    lock = FileLock(source)
    try:
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft"
            _copy(source, draft)
            copied = await _checked(draft, prefix)
        return copied, set_aside(source)
    finally:
        lock.release()


def _file_of(store: str, prefix: str) -> Path:
    if store.startswith("etcd:"):
        keys = KeySpace(etcd_address(store)[1] or DEFAULT_ROOT)
        raise ConfigError(ETCD_ADVICE.format(key=keys.key(f"{prefix}/history").decode()))
    if not store.startswith("sqlite:"):
        raise ConfigError(f"store {store!r} has nothing to copy; expected sqlite:PATH")
    return sqlite_path(store)


@contextlib.contextmanager
def _draft_for(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the target's folder, for writing before the rename."""
    for path in (target, target.with_name(target.name + "-wal")):
        if path.exists():
            raise UsageError(
                f"{path} exists already and is left as it is; name another file, or move it away"
            )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    with folder as name:
        try:
            yield Path(name) / "draft"
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def _copy(source: Path, draft: Path) -> None:
    """Copy a consistent snapshot, without blocking writers of the source."""
    if not source.exists():
        raise UsageError(f"{source} does not exist; name the file of a store, or a copy of one")
    with own_errors(source), contextlib.closing(_reader(source)) as reader:
        owner = int(reader.execute("PRAGMA application_id").fetchone()[0])
        if owner != APPLICATION_ID:
            raise StoreError(f"{source} is no store of elastic-torch; it was left as it is")
        schema = int(reader.execute("PRAGMA user_version").fetchone()[0])
        if schema != SCHEMA_VERSION:
            raise StoreError(
                f"{source} has schema {schema}, this version reads {SCHEMA_VERSION}: use the "
                f"version that wrote it; it was left as it is"
            )
        # Created here for its mode: entries may hold what a user submitted.
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(draft)) as writer:
            try:
                reader.backup(writer)
            except sqlite3.OperationalError as error:
                raise StoreUnavailable(
                    f"{source} could not be copied into {draft.parent.parent}: {error}; see that "
                    f"there is free space, then try again; nothing was left behind"
                ) from error


def _reader(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


async def _checked(draft: Path, prefix: str, *, begin_history: bool = False) -> BackupSummary:
    """Read every entry and record; raise CorruptRecord with the key if one does not decode."""
    store = await sqlite_store(draft)
    try:
        everything = await store.read("")
        terms = [term_of(e) for e in everything.entries if e.key == f"{prefix}/term"]
        placeholder = LeaderKey("nobody", "", 0, "")
        leadership = Leadership(store, prefix, placeholder, SystemClock())
        records = await Journal(store, prefix, leadership).load()
        for entry in everything.entries if begin_history else ():
            if entry.key == f"{prefix}/history":
                await store.commit([Compare(entry.key, entry.mod_revision)], [Delete(entry.key)])
    finally:
        await store.close()
    return BackupSummary(everything.revision, max(terms, default=0), len(records))


def _put(draft: Path, target: Path) -> None:
    """Flush the draft to disk and link it to its name, unless that exists by now."""
    with own_errors(draft), contextlib.closing(sqlite3.connect(draft)) as database:
        # A copy must be a single file, without a write-ahead log beside it.
        database.execute("PRAGMA journal_mode=DELETE")
    _force_to_disk(draft)
    try:
        os.link(draft, target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    _force_to_disk(target.parent)


def _force_to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

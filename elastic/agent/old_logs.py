"""Prunes the logs of former workers: the newest are kept, up to a limit.

Rule: a log that is being written or read is never removed (writers and readers of all processes
hold a lock on it), nor a log of another node in the same folder, nor the target of a symlink.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.log_marks import marks_path

log = logging.getLogger(__name__)

NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
"""Errors of flock on file systems without locks, or where locks need write access (NFS)."""


@dataclass(frozen=True, kw_only=True)
class OldLogLimits:
    """How much output of a node's former workers is kept, and in how many files."""

    bytes_max: int = 4 * 1024**3
    files_max: int = 10_000


@dataclass(frozen=True)
class LogPart:
    """One file of a rotated log: number 0 is the newest, and has the log's own name."""

    path: str
    number: int
    num_bytes: int
    written_ns: int

    @property
    def log(self) -> str:
        return self.path.removesuffix(f".{self.number}") if self.number else self.path


def prune_logs(log_dir: Path, node_id: str, limits: OldLogLimits | None = None) -> int:
    """Remove the oldest logs of a node's former workers; return how many.

    Args:
        log_dir: with a folder for each job name, see `Logs`.
        node_id: the node whose workers' logs are pruned.
        limits: how much is kept.
    """
    limits = limits or OldLogLimits()
    removed = kept_bytes = kept_files = 0
    files = _found(log_dir, node_id)
    if _fits(len(files), sum(file.num_bytes for file in files), limits):
        return 0
    for parts in _logs_of(files):
        if _is_used(parts[0].path):
            continue  # A log in use has a limit of its own.
        surplus = []
        for part in parts:
            kept_bytes, kept_files = kept_bytes + part.num_bytes, kept_files + 1
            if not _fits(kept_files, kept_bytes, limits):
                surplus.append(part.path)
        # The oldest first; stop at a file that is being read: its reader needs the newer ones.
        with contextlib.suppress(OSError):  # It is in use, or was removed by hand.
            for path in reversed(surplus):
                _remove(path)
                removed += 1
    if removed:
        log.info("old_logs_removed files=%d folder=%s", removed, log_dir)
    return removed


def hold(fd: int) -> None:
    """Lock an open log against removal until it is closed.

    Raises:
        FileNotFoundError: it was removed just now.
    """
    with contextlib.suppress(OSError):  # Some network file systems have no locks.
        fcntl.flock(fd, fcntl.LOCK_SH)
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError("the log was removed")


def _fits(num_files: int, num_bytes: int, limits: OldLogLimits) -> bool:
    return num_files <= limits.files_max and num_bytes <= limits.bytes_max


def _logs_of(files: list[LogPart]) -> list[list[LogPart]]:
    """Return the parts of each log, newest first, and the logs likewise."""
    logs: dict[str, list[LogPart]] = {}
    for file in sorted(files, key=lambda file: file.number):
        logs.setdefault(file.log, []).append(file)
    return sorted(logs.values(), key=lambda parts: parts[0].written_ns, reverse=True)


def _found(log_dir: Path, node_id: str) -> list[LogPart]:
    """Return all logs of the node's workers."""
    found = []
    name = re.compile(re.escape(node_id) + r"-\d+\.log(?:\.(\d+))?")
    with contextlib.suppress(OSError), os.scandir(log_dir) as folders:
        for folder in folders:
            if not folder.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    named = name.fullmatch(file.name)
                    if named and file.is_file(follow_symlinks=False):
                        about = file.stat(follow_symlinks=False)
                        number = int(named[1] or 0)
                        found.append(LogPart(file.path, number, about.st_size, about.st_mtime_ns))
    return found


def _is_used(path: str) -> bool:
    """Return whether a log is open in any process."""
    try:
        with _locked(path):
            return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            _warn_no_locks(os.path.dirname(path))
        return True


@functools.cache
def _warn_no_locks(folder: str) -> None:
    log.warning(
        "old_logs_kept folder=%s: its file system has no locks, so logs of former workers are not "
        "removed; have --log-dir on a local disk, or remove them yourself",
        folder,
    )


def _remove(path: str) -> None:
    """Remove a file of a log, unless it or the newest file of that log is open.

    Raises:
        OSError: one of them is open.
    """
    with contextlib.ExitStack() as locks:
        newest = re.sub(r"\.\d+$", "", path)
        if newest != path:
            with contextlib.suppress(FileNotFoundError):
                locks.enter_context(_locked(newest))
        fd = locks.enter_context(_locked(path))
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.unlink(marks_path(Path(path)))


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Hold an exclusive lock on a file within the block.

    Raises:
        OSError: it is locked, or does not exist.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)

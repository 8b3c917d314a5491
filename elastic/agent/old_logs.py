"""Logs of workers that are gone: as many are kept as there is room for, the newest.

Rule: what somebody writes or reads is never touched (both hold a lock on it, whichever process they
are in), nor what another node wrote to the same folder, nor what a link leads to.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OldLogLimits:
    """How much output of a node's former workers is kept, and in how many files."""

    bytes_max: int = 4 * 1024**3
    files_max: int = 10_000


def prune_logs(log_dir: Path, node_id: str, limits: OldLogLimits | None = None) -> int:
    """Remove the oldest logs of a node's former workers; return how many.

    Args:
        log_dir: with a folder for each job name, see `Logs`.
        node_id: whose workers.
        limits: what is kept.
    """
    limits = limits or OldLogLimits()
    removed = kept_bytes = kept_files = 0
    for _, size, path in sorted(_found(log_dir, node_id), reverse=True):
        kept_bytes, kept_files = kept_bytes + size, kept_files + 1
        if kept_bytes > limits.bytes_max or kept_files > limits.files_max:
            with contextlib.suppress(OSError):  # Somebody uses it, or it was removed by hand.
                _remove(path)
                removed += 1
    if removed:
        log.info("old_logs_removed files=%d folder=%s", removed, log_dir)
    return removed


def hold(fd: int) -> None:
    """Keep others from removing an open log until it is closed.

    Raises:
        FileNotFoundError: it was removed just now.
    """
    with contextlib.suppress(OSError):  # Some network file systems have no locks.
        fcntl.flock(fd, fcntl.LOCK_SH)
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError("the log was removed")


def _found(log_dir: Path, node_id: str) -> Iterator[tuple[int, int, str]]:
    """Yield (time of the last write, bytes, path) of each log of the node's workers."""
    name = re.compile(re.escape(node_id) + r"-\d+\.log(\.\d+)?")
    with contextlib.suppress(OSError), os.scandir(log_dir) as folders:
        for folder in folders:
            if not folder.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    if name.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        about = file.stat(follow_symlinks=False)
                        yield about.st_mtime_ns, about.st_size, file.path


def _remove(path: str) -> None:
    """Remove a log that nobody has open, nor the newest part of it.

    Raises:
        OSError: somebody has.
    """
    with contextlib.ExitStack() as locks:
        newest = re.sub(r"\.\d+$", "", path)
        if newest != path:
            with contextlib.suppress(FileNotFoundError):
                locks.enter_context(_locked(newest))
        fd = locks.enter_context(_locked(path))
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.unlink(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Have a file for oneself.

    Raises:
        OSError: somebody else has it open, or it is not there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)

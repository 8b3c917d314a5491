"""One agent per node id on a host: a locked file, which also stores the agent's incarnation.

Rule: the kernel releases the lock when the process ends, so a crash leaves nothing to clean up. The
file is never removed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.core.config import check_name
from elastic.errors import NameTaken, UsageError

NS_PER_MS = 1_000_000
WORDS_CHARS = 64


@contextmanager
def hold_node(run_dir: Path, node_id: str, unix_ns: int) -> Iterator[int]:
    """Hold the node id on this host inside the `with` block.

    Yields:
        The incarnation of this run of the agent: milliseconds since 1970, and greater than that of
        any earlier run here, even if the host's clock was set back.

    Raises:
        NameTaken: another agent runs with this node id.
        UsageError: the directory cannot be used.
    """
    check_name("node", node_id)
    make_private(run_dir)
    path = run_dir / f"agent-{node_id}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error}; pass another --run-dir") from error
    try:
        pid, last = read_words(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NameTaken(
                f"an agent of node {node_id} runs on this host already, as process {pid} "
                f"(lock file {path}); end that one, or pass another --node-id"
            ) from error
        pid, last = read_words(fd)
        incarnation = max(unix_ns // NS_PER_MS, last + 1)
        try:
            _write_words(fd, f"{os.getpid()} {incarnation}")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error}; pass another --run-dir") from error
        yield incarnation
    finally:
        os.close(fd)


def _write_words(fd: int, words: str) -> None:
    """Overwrite the file in place; it is never empty, so that an incarnation is never lost.

    The length is constant, so that the write succeeds on a full disk too.
    """
    os.pwrite(fd, f"{words:<{WORDS_CHARS - 1}}\n".encode(), 0)
    os.ftruncate(fd, WORDS_CHARS)


def read_words(fd: int) -> tuple[str, int]:
    """Return (pid as text, incarnation) of the last holder; ("?", 0) if the file is not valid."""
    words = os.pread(fd, 100, 0).decode("ascii", "replace").split()
    if len(words) == 2 and words[1].isdigit():
        return words[0], int(words[1])
    return "?", 0


def make_private(folder: Path) -> None:
    """Create a directory that only this user can write to, or check that it is one.

    The default lies under /tmp, where another user may have created it first.

    Raises:
        UsageError: it cannot be created, belongs to another user, or is writable by others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot use {folder}: {error}; pass another --run-dir") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UsageError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: "
            f"expected user {os.getuid()} and no one else to write there; pass another --run-dir"
        )

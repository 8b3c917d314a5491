"""Where torch's `@record` writes down what a script raised.

Rule: there is a name as long as a script runs, and a file only if one was written: a worker is
killed at any moment, and what it has made then stays. What is raised is reported without it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"


@contextmanager
def error_file() -> Iterator[None]:
    """Name a file in the environment for as long as a script runs; removed after it."""
    directory = _directory()
    if directory is None:
        yield
        return
    file = directory / f"{os.getpid()}.json"
    file.unlink(missing_ok=True)  # Of an earlier process with this number.
    os.environ[VARIABLE] = str(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _directory() -> Path | None:
    """Return a directory of this user's alone, None if there is no room for one."""
    try:
        directory = Path(tempfile.gettempdir()) / f"elastic-errors-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return None
    # In a folder that all may write to, another user may have made it.
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return directory if is_ours and not found.st_mode & 0o077 else None

"""Processes that a worker has started for work beside its own."""

from __future__ import annotations

import contextlib
import subprocess

KILLED_S = 2.0


def kill(process: subprocess.Popen[bytes]) -> None:
    """End it; one that is in a call of storage that does not answer ends with that call."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)

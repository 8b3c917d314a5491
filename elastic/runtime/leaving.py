"""Exit of a daemon's process: immediate, after its output is flushed.

A normal shutdown of an interpreter with grpc takes a fifth of a second, which delays every process
that waits for the daemon: a script with its own cluster waits for coordinator and agent.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def run_process(command: Callable[[], object]) -> None:
    """Run a command that ends by `sys.exit`, then end the process; only for `python -m`."""
    code: object = 0
    try:
        command()
    except SystemExit as end:
        code = end.code or 0
    if not isinstance(code, int):
        sys.exit(str(code))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

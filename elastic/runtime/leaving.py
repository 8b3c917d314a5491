"""The end of a daemon's process: at once, when all that it had to say is written.

To take an interpreter with grpc apart costs a fifth of a second, for which whoever waits for the
daemon waits too: a script with a cluster of its own waits for both.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def run_process(command: Callable[[], object]) -> None:
    """Run a command that ends by `sys.exit`, and then the process; for `python -m` alone."""
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

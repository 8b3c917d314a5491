"""A snapshot's memory outlives functions that are registered with atexit: a writer may read it."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import DEADLINE_S

CODE = """
import atexit, os
from elastic.worker.state.arena import SnapshotSlot

slot = SnapshotSlot()
number = slot._fd
atexit._run_exitfuncs()  # As a worker does on its way out, beside the thread that writes.
os.fstat(number)
"""


def test_functions_at_exit_take_no_memory_from_who_writes_it() -> None:
    command = [sys.executable, "-c", CODE]
    subprocess.run(command, check=True, timeout=DEADLINE_S)

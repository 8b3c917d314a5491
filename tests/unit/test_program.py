"""What a program of a user's own leaves behind, if the worker around it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from elastic.agent.kernel import kill_quietly, session_members

WORKER = """
import os
from elastic.worker.process.program import _wait_for
_wait_for(["sh", "-c", "sleep 1000 & echo $!; wait"], dict(os.environ))
"""


def test_what_it_has_started_is_in_the_workers_session_for_the_agent_to_sweep() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, start_new_session=True
    )
    assert worker.stdout is not None
    started = int(worker.stdout.readline())
    try:
        os.killpg(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # Its id stays taken.
        assert started in session_members(worker.pid)
    finally:
        kill_quietly(started)
        worker.wait()
        worker.stdout.close()

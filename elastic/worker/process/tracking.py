"""Trackers beside training: rank 0 keeps a process that sends them what the run reports.

A tracker may be slow, or away, and its code may leak or fork: so it has a process of its own, which
reads the run directory. The next rank 0 starts another, which continues where that one was.

Rule: nothing here is used by the training loop. The end of a train function waits for what is left
to be sent, at most `FINISH_S`; `elastic track` sends the remainder, or all of it, later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys

from elastic.worker.base.children import kill

log = logging.getLogger(__name__)

FINISH_S = 10.0
MODULE = "elastic.worker.process.tracking_process"


class Trackers:
    """The tracking process of one worker, while that is rank 0."""

    def __init__(self, run_path: str, wanted: str) -> None:
        self._run_path, self._wanted = run_path, wanted
        self._process: subprocess.Popen[bytes] | None = None

    def enter(self, rank: int) -> None:
        """Be this rank from here on; called from the thread that outlives the group."""
        if rank != 0 or not self._wanted:
            self.close()
        elif self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", MODULE, str(os.getpid()), self._run_path]
            # A line of input, or its end, asks it to finish.
            self._process = subprocess.Popen(
                [*command, self._wanted], stdin=subprocess.PIPE, start_new_session=False
            )
            log.info("tracking_started trackers=%s pid=%d", self._wanted, self._process.pid)

    def finish(self) -> None:
        """Wait for all reports to be sent, with a time limit."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                # The end of its input is not enough: DataLoader workers have inherited this pipe.
                process.stdin.write(b"\n")
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FINISH_S)
        if process.poll() != 0:
            log.warning(
                "tracking_left trackers=%s: not everything was sent in %.0f s; "
                "'elastic track %s' does",
                self._wanted, FINISH_S, self._run_path,
            )  # fmt: skip
            kill(process)

    def close(self) -> None:
        """Send nothing any more: another worker is rank 0, and continues."""
        process, self._process = self._process, None
        if process is not None:
            kill(process)

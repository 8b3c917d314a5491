"""Kills of workers under Ray Train: three workers, its controller starts all of them again.

Rule: tuned in favour of Ray: its controller looks ten times a second, not once in two seconds, and
nothing but the workers asks for resources.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.marks import Marks
from bench.peers.kills import TIMEOUT_S, Peer
from bench.peers.torchrun import EVERY
from elastic.testing.local_cluster import descendants

JOB = Path(__file__).with_name("ray_train_job.py")
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running(directory: Path, world: int, step_s: float) -> Iterator[Marks]:
    """Start Ray and the job, and wait until all workers train; end all of it at the end.

    Raises:
        RuntimeError: it did not come up; shows its log.
    """
    directory.mkdir(parents=True)
    # Ray's sockets lie in there, and their paths must be short.
    scratch = tempfile.mkdtemp(prefix="ray-")
    command = [
        sys.executable, str(JOB), "--world", str(world), "--scratch", scratch,
        "--storage", str(directory), "--marks", str(directory / "marks"),
        "--checkpoint", str(directory / "checkpoint.pt"), "--every", str(EVERY),
        "--pace", str(step_s),
    ]  # fmt: skip
    tuned = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "PYTHONPATH": str(ROOT)}
    with (directory / "log").open("wb") as log:
        driver = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ, **tuned},
            start_new_session=True,
        )
    marks = Marks(directory / "marks")
    try:
        if marks.wait(-1, world=world, timeout_s=2 * TIMEOUT_S) is None:
            text = (directory / "log").read_text(errors="replace")
            raise RuntimeError(f"Ray does not train after {2 * TIMEOUT_S:g} s: {text[-2000:]}")
        yield marks
    finally:
        for pid in [driver.pid, *descendants(driver.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.wait()
        shutil.rmtree(scratch, ignore_errors=True)


PEER = Peer("Ray Train", running)

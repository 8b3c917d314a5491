"""Kills of workers under torchft: three replicas of one worker, and a lighthouse.

Rule: tuned in favour of torchft: a silent replica is given up after half a second, not five, and
one that died is started again at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from bench.marks import Marks
from bench.peers.kills import TIMEOUT_S, Peer

JOB = Path(__file__).with_name("torchft_job.py")
ROOT = Path(__file__).parents[2]
POLL_S = 0.05
LIGHTHOUSE = """
import time
from torchft._torchft import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20,
    heartbeat_timeout_ms=500,
)
print(server.address(), flush=True)
time.sleep(1e6)
"""


class Replicas:
    """Replicas that are started again whenever one ends."""

    def __init__(self, command: list[str], log: Path, world: int) -> None:
        """Start them."""
        self._command, self._log = command, log
        self._over = threading.Event()
        self._processes = [self._start(number) for number in range(world)]
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> None:
        """End them."""
        self._over.set()
        self._thread.join()
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._command, "--number", str(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)},
            )

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._processes[number] = self._start(number)


@contextlib.contextmanager
def running(directory: Path, world: int, step_s: float) -> Iterator[Marks]:
    """Start a lighthouse and the replicas, and wait until all train; end all at the end.

    Raises:
        RuntimeError: they did not come up; shows their log.
    """
    directory.mkdir(parents=True)
    lighthouse = subprocess.Popen(
        [sys.executable, "-c", LIGHTHOUSE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert lighthouse.stdout is not None
    address = lighthouse.stdout.readline().strip()
    command = [
        sys.executable, str(JOB), "--lighthouse", address, "--marks", str(directory / "marks"),
        "--checkpoint", "", "--world", str(world), "--pace", str(step_s),
    ]  # fmt: skip
    log = directory / "log"
    replicas = Replicas(command, log, world)
    marks = Marks(directory / "marks")
    try:
        if marks.wait(-1, world=world, timeout_s=TIMEOUT_S) is None:
            text = log.read_text(errors="replace")
            raise RuntimeError(f"torchft does not train after {TIMEOUT_S:g} s: {text[-2000:]}")
        yield marks
    finally:
        replicas.close()
        lighthouse.kill()
        lighthouse.wait()


PEER = Peer("torchft", running)

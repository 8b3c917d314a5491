"""Kills of workers under torchrun: one node, three workers, its agent restarts all of them.

Rule: tuned as far as it goes in favour of torchrun: one node, so that no agents have to agree, and
without the shared store, with which most jobs never recover from a kill on one machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.marks import Marks
from bench.peers.kills import TIMEOUT_S, Peer
from elastic.testing.local_cluster import descendants

JOB = Path(__file__).with_name("torchrun_job.py")
EVERY = 10
"""Steps between two checkpoints."""


@contextlib.contextmanager
def running(directory: Path, world: int, step_s: float) -> Iterator[Marks]:
    """Start torchrun and wait until all workers train; end all of it at the end.

    Raises:
        RuntimeError: it did not come up; shows its log.
    """
    directory.mkdir(parents=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1",
        f"--nproc-per-node={world}", "--max-restarts=100", "--monitor-interval=0.1", str(JOB),
        "--marks", str(directory / "marks"), "--checkpoint", str(directory / "checkpoint.pt"),
        "--every", str(EVERY), "--pace", str(step_s),
    ]  # fmt: skip
    tuned = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (directory / "log").open("wb") as log:
        agent = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **tuned},
            start_new_session=True,
        )
    marks = Marks(directory / "marks")
    try:
        if marks.wait(-1, world=world, timeout_s=TIMEOUT_S) is None:
            text = (directory / "log").read_text(errors="replace")
            raise RuntimeError(f"torchrun does not train after {TIMEOUT_S:g} s: {text[-2000:]}")
        yield marks
    finally:
        for pid in [agent.pid, *descendants(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


PEER = Peer("torchrun", running)

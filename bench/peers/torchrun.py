"""Kills of workers under torchrun: one node, three workers, its agent restarts all of them.

Rule: tuned as far as it goes in favour of torchrun: one node, so that no agents have to agree, and
without the shared store, with which most jobs never recover from a kill on one machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.marks import Marks, Row
from elastic.testing.local_cluster import descendants

JOB = Path(__file__).with_name("torchrun_job.py")
SYSTEM = "torchrun"
PATIENCE_S = 60.0
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
        if marks.wait(-1, world=world, timeout_s=PATIENCE_S) is None:
            text = (directory / "log").read_text(errors="replace")
            raise RuntimeError(f"torchrun does not train after {PATIENCE_S:g} s: {text[-2000:]}")
        yield marks
    finally:
        for pid in [agent.pid, *descendants(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def measure(
    directory: Path, kills: int, *, step_s: float, world: int, rng: random.Random
) -> tuple[Row, Row, float]:
    """Kill a worker so many times.

    Args:
        directory: for logs, marks and checkpoints; one for each time that torchrun is started.
        kills: how many.
        step_s: what a step sleeps.
        world: workers.
        rng: draws victims and moments.

    Returns:
        What came of it, until the next step and until the whole group trains, which is the same
        here; and the milliseconds of a step.
    """
    row = Row("worker SIGKILL: next step", SYSTEM)
    step_ms: list[float] = []
    number = 0
    while len(row.seconds) < kills:
        number += 1
        with running(directory / str(number), world, step_s) as marks:
            while len(row.seconds) < kills and _kill(marks, row, world, rng):
                print(f"{SYSTEM}: {row.event}: {row.seconds[-1]:.3f} s", file=sys.stderr)
            step_ms.append(marks.step_ms(world))
    full = Row("worker SIGKILL: full group", SYSTEM, row.seconds, row.again)
    full.changed, full.survivors = row.changed, row.survivors
    return row, full, statistics.median(step_ms)


def _kill(marks: Marks, row: Row, world: int, rng: random.Random) -> bool:
    """Kill one worker; return whether the job went on."""
    time.sleep(rng.uniform(2.0, 3.0))
    before = marks.newest()
    pids = marks.lives[before].pids
    victim = rng.choice(sorted(pids))
    began_ns = time.time_ns()
    os.kill(victim, signal.SIGKILL)
    after = marks.wait(before, world=world, timeout_s=PATIENCE_S)
    if after is None:
        row.seconds.append(math.inf)
        print(f"{SYSTEM}: not back after {PATIENCE_S:g} s, started anew", file=sys.stderr)
        return False
    row.seconds.append((marks.lives[after].began_ns - began_ns) / 1e9)
    row.again.append(marks.steps_again(before))
    row.count_pids(pids - {victim}, marks.lives[after].pids)
    return True

"""Kills of the workers of a peer, and how long each takes it.

Rule: the same draws of victims and moments for every system, and nothing that knows which it is.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.marks import Marks, Row

TIMEOUT_S = 60.0
STARTS_MAX = 20
"""So often a system is started anew that did not come back."""


@dataclass(frozen=True)
class Peer:
    """A system that trains the same beside ours.

    Attributes:
        name: as in the table.
        running: starts it in a directory, with so many workers and seconds of sleep in a step;
            yields its marks once all workers train, and ends all of it.
    """

    name: str
    running: Callable[[Path, int, float], AbstractContextManager[Marks]]

    def measure(
        self, directory: Path, kills: int, *, step_s: float, world: int, rng: random.Random
    ) -> tuple[list[Row], float]:
        """Kill a worker so many times.

        Args:
            directory: for logs, marks and checkpoints; one for each time that it is started.
            kills: how many.
            step_s: what a step sleeps.
            world: workers.
            rng: draws victims and moments.

        Returns:
            What came of it, until the next step and until the whole group trains; and the
            milliseconds of a step.
        """
        rows = [
            Row("worker SIGKILL: next step", self.name),
            Row("worker SIGKILL: full group", self.name),
        ]
        step_ms: list[float] = []
        for number in range(STARTS_MAX):
            with self.running(directory / str(number), world, step_s) as marks:
                while len(rows[0].seconds) < kills and self._kill(marks, rows, world, rng):
                    times = ", ".join(f"{row.seconds[-1]:.3f} s" for row in rows)
                    print(f"{self.name}: worker SIGKILL: {times}", file=sys.stderr)
                step_ms.append(marks.step_ms(world))
            if len(rows[0].seconds) >= kills:
                break
        return rows, statistics.median(step_ms)

    def _kill(self, marks: Marks, rows: list[Row], world: int, rng: random.Random) -> bool:
        """Kill one worker; return whether the job went on."""
        time.sleep(rng.uniform(2.0, 3.0))
        before = marks.newest()
        pids = marks.lives[before].pids
        victim = rng.choice(sorted(pids))
        began_ns = time.time_ns()
        os.kill(victim, signal.SIGKILL)
        for row, size in zip(rows, (0, world), strict=True):
            after = marks.wait(before, world=size, timeout_s=TIMEOUT_S)
            if after is None:
                row.seconds.append(math.inf)
                print(f"{self.name}: not back after {TIMEOUT_S:g} s", file=sys.stderr)
                return False
            row.seconds.append((marks.lives[after].began_ns - began_ns) / 1e9)
            row.again.append(marks.steps_again(before))
            row.count_pids(pids - {victim}, marks.lives[after].pids)
        return True

"""What both sides of a bench are measured by: a file with one line per optimizer step and rank.

Rule: a line is "unix_ns rank life step pid world". A life is what ends with a kill: a generation of
ours, a restart of torchrun's. Steps count from the first of the run, 1 is the first. Whoever trains
only appends, and whatever is measured is computed from these lines, the same for everybody.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.02


class Mark(NamedTuple):
    """One optimizer step of one rank, at its end."""

    unix_ns: int
    rank: int
    life: int
    step: int
    pid: int
    world: int


@dataclass
class Life:
    """What one group did.

    Attributes:
        world: ranks that it has.
        first: mark of each rank's first step; of each later one only the newest is kept.
        last: the newest mark of each rank.
        steps: the smallest and the largest number of a step that somebody has done.
        gaps_ns: from step to step of rank 0.
    """

    world: int
    first: dict[int, Mark] = field(default_factory=dict)
    last: dict[int, Mark] = field(default_factory=dict)
    steps: tuple[int, int] = (0, 0)
    gaps_ns: list[int] = field(default_factory=list)

    def add(self, mark: Mark) -> None:
        """Take one more line."""
        if mark.rank == 0 and 0 in self.last:
            self.gaps_ns.append(mark.unix_ns - self.last[0].unix_ns)
        low, high = self.steps if self.first else (mark.step, mark.step)
        self.steps = min(low, mark.step), max(high, mark.step)
        self.first.setdefault(mark.rank, mark)
        self.last[mark.rank] = mark

    @property
    def is_whole(self) -> bool:
        """Return whether every rank has done a step."""
        return len(self.first) == self.world

    @property
    def began_ns(self) -> int:
        """Return when the last rank had done its first step."""
        return max(mark.unix_ns for mark in self.first.values())

    @property
    def pids(self) -> set[int]:
        """Return the processes in which it trained."""
        return {mark.pid for mark in self.first.values()}


class Marks:
    """The lines of one run, read as they come."""

    def __init__(self, path: Path) -> None:
        """Read this file; it need not be there yet."""
        self.path = path
        self.lives: dict[int, Life] = {}
        self._offset = 0

    def read(self) -> None:
        """Take what was appended since."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode().splitlines():
            mark = Mark(*map(int, line.split()))
            self.lives.setdefault(mark.life, Life(mark.world)).add(mark)

    def wait(self, after: int, *, world: int = 0, timeout_s: float) -> int | None:
        """Wait until a group of a later life has done its first step, on all its ranks.

        Args:
            after: a life.
            world: ranks that the group must have, 0 for any number.
            timeout_s: how long to wait.

        Returns:
            The group's life, None if none came.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.read()
            for number, life in sorted(self.lives.items()):
                if number > after and life.is_whole and world in (0, life.world):
                    return number
            time.sleep(POLL_S)
        return None

    def newest(self) -> int:
        """Return the newest life of which there is a line, -1 if there is none."""
        self.read()
        return max(self.lives, default=-1)

    def steps_again(self, before: int) -> int:
        """Return how many steps that were done by the end of life `before` were done after it."""
        done = max(life.steps[1] for number, life in self.lives.items() if number <= before)
        again = min(life.steps[0] for number, life in self.lives.items() if number > before)
        return max(0, done - again + 1)

    def pause_s(self, before: int, after: int) -> float:
        """Return the longest time between two steps of a process that is in both groups."""
        last = {mark.pid: mark.unix_ns for mark in self.lives[before].last.values()}
        first = {mark.pid: mark.unix_ns for mark in self.lives[after].first.values()}
        return max(first[pid] - last[pid] for pid in sorted(last.keys() & first.keys())) / 1e9

    def step_ms(self, world: int) -> float:
        """Return the median time of a step of groups of this size, as rank 0 saw it."""
        gaps = [gap for life in self.lives.values() if life.world == world for gap in life.gaps_ns]
        return statistics.median(gaps) / 1e6 if gaps else 0.0


@dataclass
class Row:
    """What was measured of one event in one system.

    Attributes:
        event: what was done, and until when time was taken.
        system: who was to survive it.
        seconds: of each time; infinite if it never went on.
        again: steps that were complete and were done once more, each time.
        changed: survivors that ended up in another process.
        survivors: all of them.
    """

    event: str
    system: str
    seconds: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    changed: int = 0
    survivors: int = 0

    def count_pids(self, survivors: set[int], now: set[int]) -> None:
        """Count the survivors whose process is not in the group any more."""
        self.changed += len(survivors - now)
        self.survivors += len(survivors)

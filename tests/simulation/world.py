"""The simulated world's clock and dice: a heap of moments, one seeded random source.

Rule: nothing here knows the runtime. Time jumps to the next moment; equal moments happen in the
order they were asked for; so a seed and a commit replay every run exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial

MS = 1_000_000
S = 1_000_000_000


class Timeline:
    """Virtual time.

    Attributes:
        now_ns: the present.
        rng: the only source of chance.
        log: one line per thing that happened, for the transcript.
    """

    def __init__(self, seed: int, *, keep_log: bool = True) -> None:
        """Begin at zero."""
        self.now_ns = 0
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self._keep_log = keep_log
        self._heap: list[tuple[int, int, partial[None]]] = []
        self._sequence = 0

    def at(self, moment_ns: int, action: Callable[..., None], *args: object) -> None:
        """Do `action(*args)` at a moment, not before now."""
        self._sequence += 1
        todo = partial(action, *args)
        heapq.heappush(self._heap, (max(moment_ns, self.now_ns), self._sequence, todo))

    def after(self, delay_ns: int, action: Callable[..., None], *args: object) -> None:
        """Do `action(*args)` after a delay."""
        self.at(self.now_ns + delay_ns, action, *args)

    def between(self, low_ns: int, high_ns: int) -> int:
        """Draw a duration."""
        return self.rng.randint(low_ns, max(low_ns, high_ns))

    def chance(self, probability: float) -> bool:
        """Throw a coin."""
        return self.rng.random() < probability

    def run_until(self, until_ns: int, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True if `stop` held before `until_ns`.

        Events at one moment are all done before `stop` is asked.
        """
        while self._heap and self._heap[0][0] <= until_ns:
            moment, _, action = heapq.heappop(self._heap)
            self.now_ns = moment
            action()
            if stop is not None and stop():
                return True
        self.now_ns = max(self.now_ns, until_ns)
        return False

    def tell(self, who: str, what: str) -> None:
        """Write a line into the transcript."""
        if self._keep_log:
            self.log.append(f"{self.now_ns / S:10.4f} {who:<12} {what}")


class Alarm:
    """Rings at the next deadline of a machine, never for one that is gone."""

    def __init__(self, timeline: Timeline, ring: Callable[[], None]) -> None:
        """Begin silent."""
        self._timeline = timeline
        self._ring = ring
        self._due_ns: int | None = None
        self._life = 0

    def set(self, due_ns: int | None) -> None:
        """Ring then, and not at the moment before it; None leaves that as it is."""
        if due_ns is None or due_ns == self._due_ns:
            return
        self._due_ns = due_ns
        self._timeline.at(max(due_ns, self._timeline.now_ns + 1), self._come, self._life, due_ns)

    def reset(self) -> None:
        """Another machine begins: what was set for the one before does not ring."""
        self._due_ns = None
        self._life += 1

    def _come(self, life: int, due_ns: int) -> None:
        if life == self._life and self._due_ns == due_ns:
            self._due_ns = None
            self._ring()

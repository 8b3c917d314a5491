"""Virtual time and randomness of the simulation: a heap of events, one seeded random source.

Rule: nothing here depends on the runtime. Time jumps to the next event; events at the same time
happen in the order in which they were scheduled; so a seed and a commit replay a run exactly.
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
        now_ns: the current time.
        rng: the only random source.
        log: one line per event, for the transcript.
    """

    def __init__(self, seed: int, *, keep_log: bool = True) -> None:
        """Start at time 0."""
        self.now_ns = 0
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self._keep_log = keep_log
        self._heap: list[tuple[int, int, partial[None]]] = []
        self._sequence = 0

    def at(self, moment_ns: int, action: Callable[..., None], *args: object) -> None:
        """Schedule `action(*args)` at a time, not before now."""
        self._sequence += 1
        todo = partial(action, *args)
        heapq.heappush(self._heap, (max(moment_ns, self.now_ns), self._sequence, todo))

    def after(self, delay_ns: int, action: Callable[..., None], *args: object) -> None:
        """Schedule `action(*args)` after a delay."""
        self.at(self.now_ns + delay_ns, action, *args)

    def between(self, low_ns: int, high_ns: int) -> int:
        """Draw a duration, bounds included."""
        return self.rng.randint(low_ns, max(low_ns, high_ns))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def run_until(self, until_ns: int, stop: Callable[[], bool] | None = None) -> bool:
        """Run events until `until_ns`; return True if `stop` held before that.

        `stop` is called after each event.
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
        """Append a line to the transcript."""
        if self._keep_log:
            self.log.append(f"{self.now_ns / S:10.4f} {who:<12} {what}")


class Alarm:
    """Calls `ring` at a machine's next deadline; never for an earlier machine."""

    def __init__(self, timeline: Timeline, ring: Callable[[], None]) -> None:
        """Start without a deadline."""
        self._timeline = timeline
        self._ring = ring
        self._due_ns: int | None = None
        self._life = 0

    def set(self, due_ns: int | None) -> None:
        """Replace the deadline; None keeps it."""
        if due_ns is None or due_ns == self._due_ns:
            return
        self._due_ns = due_ns
        self._timeline.at(max(due_ns, self._timeline.now_ns + 1), self._come, self._life, due_ns)

    def reset(self) -> None:
        """Cancel the deadline, since another machine starts."""
        self._due_ns = None
        self._life += 1

    def _come(self, life: int, due_ns: int) -> None:
        if life == self._life and self._due_ns == due_ns:
            self._due_ns = None
            self._ring()

"""How many steps this worker has made in its generation, sent to the agent at most once a second.

Rule: counting a step takes less than a microsecond and never blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.config import NS_PER_S
from elastic.core.messages import Progress
from elastic.core.world import Generation, WorkerId
from elastic.runtime.clock import Clock

INTERVAL_NS = NS_PER_S
"""Least time between two messages after the first step's."""


class StepCounter:
    """Counts the steps of one generation.

    Attributes:
        steps: how many are over.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        generation: Generation,
        *,
        tell: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        """Begin at 0; `tell` must return at once."""
        self.steps = 0
        self._worker_id = worker_id
        self._generation = generation
        self._tell = tell
        self._clock = clock
        self._next_ns = 0
        self._first_unix_ns = 0

    def note(self) -> None:
        """Count a step that is over; the first is told at once, with the time of day."""
        self.steps += 1
        now_ns = self._clock.monotonic_ns()
        if self.steps == 1:
            self._first_unix_ns = self._clock.unix_ns()
        elif now_ns < self._next_ns:
            return
        self._next_ns = now_ns + INTERVAL_NS
        self._tell(Progress(self._worker_id, self._generation, self.steps, self._first_unix_ns))

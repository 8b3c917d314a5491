"""Decides when a worker reports on its main thread.

Rule: a main thread that makes progress is not reported. One that waits for its peers, has stalled,
or has worked for long while its peers may wait for it, is reported repeatedly until that is over,
and then once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.config import NS_PER_S
from elastic.core.events.worker import ActivitySampled
from elastic.core.policy.pacing import WAITING_NS, waiting_is_long_after_ns

POLL_NS = NS_PER_S // 10
LATE_NS = 3 * POLL_NS
STILL_NS = NS_PER_S
"""A stall is reported after this."""
WAITING_AGAIN_NS = NS_PER_S // 2
STILL_AGAIN_NS = NS_PER_S
WORKING_NS, WORKING_AGAIN_NS = 10 * NS_PER_S, 5 * NS_PER_S
"""Work without a step is reported after this, for people, and again in this interval."""


@dataclass(frozen=True)
class PulseState:
    """The state of a main thread to report; fields as in `Pulse`."""

    waiting_ns: int = 0
    still_ns: int = 0
    longest_ns: int = 0
    working_ns: int = 0


class ActivityMonitor:
    """Samples the main thread of a worker that trains, ten times a second.

    Attributes:
        check_at_ns: when to sample next.
    """

    def __init__(self) -> None:
        self.check_at_ns = 0
        self._beats = -1
        self._moved_ns = 0
        self._longest_ns = 0
        self._worked_ns = 0
        self._step = (0, 0)
        self._reported = (False, False, False)
        self._reported_ns = 0
        self._long_ns = WAITING_NS

    def begin(self, now_ns: int, world_size: int) -> None:
        """Reset the state, because another generation trains."""
        self.check_at_ns = now_ns + POLL_NS
        self._long_ns = waiting_is_long_after_ns(world_size)
        self._beats, self._moved_ns, self._worked_ns = -1, now_ns, now_ns
        self._reported = (False, False, False)

    def sample(self, seen: ActivitySampled, now_ns: int) -> PulseState | None:
        """Process one sample; return what to report, None for nothing."""
        late_ns = now_ns - self.check_at_ns
        if late_ns > LATE_NS:
            # The process was stopped, or code held the GIL: progress could not be observed.
            self._moved_ns += late_ns
        self.check_at_ns = now_ns + POLL_NS
        if seen.beats != self._beats:
            if self._beats > 0 and seen.has_stepped and not self._reported[0]:
                self._longest_ns = max(self._longest_ns, now_ns - self._moved_ns)
            self._beats, self._moved_ns = seen.beats, now_ns
        step = (seen.epoch, seen.step)
        if step != self._step or seen.waiting_ns:
            self._step, self._worked_ns = step, now_ns
        waits = seen.waiting_ns >= self._long_ns
        still_ns, working_ns = now_ns - self._moved_ns, now_ns - self._worked_ns
        # Before the training loop starts, user code may take any time for data and models.
        stands = seen.beats > 0 and not seen.waiting_ns and still_ns >= STILL_NS
        works = seen.beats > 0 and not stands and working_ns >= WORKING_NS
        found = (waits, stands, works)
        again_ns = WAITING_AGAIN_NS if waits else STILL_AGAIN_NS if stands else WORKING_AGAIN_NS
        is_due = any(found) and now_ns - self._reported_ns >= again_ns
        if found == self._reported and not is_due:
            return None
        self._reported, self._reported_ns = found, now_ns
        return PulseState(
            waiting_ns=seen.waiting_ns if waits else 0,
            still_ns=still_ns if stands else 0,
            longest_ns=self._longest_ns,
            working_ns=working_ns if works else 0,
        )

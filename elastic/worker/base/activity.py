"""What the control thread can see of the main thread: it works, or waits for its peers.

Rule: the main thread writes, the control thread reads, and neither takes a lock: each field is one
assignment, and a read that comes between two of them is corrected by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.worker.base.timing import Timing

FLOW_AFTER_NS = 5 * 10**9
"""A thread that waits so long is checked for data that still comes: before, it does not matter."""


class Activity:
    """What a training loop shows of its progress.

    Only an exchange with peers is waiting. Everything else is work: reading a checkpoint, moving
    state to a device, compiling, evaluating on one rank. No process is killed for it, however long.

    Code that trains does `activity.beats += 1` wherever it gets further (a batch was loaded, a
    gradient arrived, an optimizer stepped): some 50 ns each. It may be called by several threads:
    a beat that is lost between two of them is no loss.

    Attributes:
        beats: grows whenever the main thread gets further; 0 until the training loop is first
            seen, and until then its silence is not judged.
        waiting_since_ns: `time.monotonic_ns()` at which it began to wait for its peers, 0 if it
            does not.
        work: what it does that may take long and shows no movement, "" for nothing of the kind.
        has_stepped: a step was committed in this process. Before, compilers and devices start.
        epoch, step: where it is, for people.
        is_sharded: the model is, so that it also waits where it cannot report it.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.waiting_since_ns = 0
        self.work = ""
        self.has_stepped = False
        self.epoch = 0
        self.step = 0
        self.is_sharded = False
        self.timing = Timing()

    def reset(self) -> None:
        """The train function is called anew: unseen until it trains."""
        self.waiting_since_ns = 0
        self.beats = 0
        self.epoch = self.step = 0

    def at(self, epoch: int, step: int) -> None:
        """The main thread begins a step."""
        self.epoch, self.step = epoch, step
        self.beats += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Report what happens in this block as waiting for peers, and nothing else."""
        self.waiting_since_ns = time.monotonic_ns()
        before = self.timing.begin_wait()
        try:
            yield
        finally:
            self.timing.switch(before)
            # First that it moves: between the two it must not seem to stand still.
            self.beats += 1
            self.waiting_since_ns = 0

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Report this block as work, however still it seems; people read `what` it does."""
        outer, since_ns = self.work, self.waiting_since_ns
        self.work, self.waiting_since_ns = what, 0
        try:
            yield
        finally:
            self.beats += bool(self.beats)  # At 0 it is not judged.
            self.work = outer
            self.waiting_since_ns = time.monotonic_ns() if since_ns else 0

    def waiting_ns(self, now_ns: int) -> int:
        """Return how long it has waited for its peers by now, 0 if it does not."""
        since_ns = self.waiting_since_ns
        return max(1, now_ns - since_ns) if since_ns else 0


class PeerTraffic:
    """Whether something still comes from the peers for which a member waits.

    A large tensor over a slow network may take minutes, in which all wait and none is stuck.
    """

    def __init__(self, received: Callable[[], int]) -> None:
        self._received = received
        self._bytes: int | None = None
        self._flowed_ns = 0

    def waiting_ns(self, waiting_ns: int, now_ns: int) -> int:
        """Return how long nothing has come by now, at most `waiting_ns`; 0 if it does not wait."""
        if waiting_ns < FLOW_AFTER_NS:
            self._bytes = None
            return waiting_ns
        received = self._received()
        if self._bytes is None:
            self._flowed_ns = now_ns - waiting_ns
        elif received != self._bytes:
            self._flowed_ns = now_ns
        self._bytes = received
        return max(1, now_ns - self._flowed_ns)

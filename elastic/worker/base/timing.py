"""Where the time of this worker goes, and how its steps go; sent to the agent about once a second.

A stretch of time ends where the next begins, so that all of them add up to the whole. Within a step
they are kept apart until it is known what it came to: what was computed for a step that broke is
done again.

Who is waited for: all ranks leave an exchange together, so what each did between two of them can be
compared without comparing clocks. The rank that worked longest is the one that the others have
waited for. Each sends with its next gradients how long that was.

Rule: a switch reads the clock, adds two numbers, and allocates nothing that lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from elastic.core.config import NS_PER_S
from elastic.core.facts import NO_GENERATION, Generation, WorkerId
from elastic.core.messages import Progress
from elastic.core.telemetry import (
    CATEGORIES,
    DATA_WAIT,
    PRODUCTIVE,
    REDONE,
    REFORM,
    START,
    STRAGGLER_WAIT,
    Goodput,
    Telemetry,
)
from elastic.runtime.clock import Clock, SystemClock

INTERVAL_NS = NS_PER_S
"""Least time between two messages after the first step's."""
SILENCE_NS = 2 * NS_PER_S
"""A loop without a step for so long is polled by the control thread."""
COMPUTE, EXCHANGE, COMMIT = range(len(CATEGORIES), len(CATEGORIES) + 3)
"""Parts of a step, booked as productive or as redone once it is known whether the step counts."""
NOTICED = 0.05
"""A rank is named as the one that others wait for when that takes such a part of the time."""


@dataclass
class _Window:
    """What was measured since the last message; a number that workers report is one here.

    Attributes:
        began_ns: 0 before the first step of a group.
        data_before_ns: time that was spent waiting for data until then.
        steps, compute_ns, exchange_ns, straggler_wait_ns, commit_ns, samples, tokens: as in
            `Telemetry`.
        waited_for: nanoseconds by which a rank worked longer than the others, by rank.
    """

    began_ns: int = 0
    data_before_ns: int = 0
    steps: int = 0
    compute_ns: int = 0
    exchange_ns: int = 0
    straggler_wait_ns: int = 0
    commit_ns: int = 0
    samples: int = 0
    tokens: int = 0
    waited_for: dict[int, int] = field(default_factory=dict)

    def telemetry(self, seen: Telemetry, now_ns: int, data_ns: int, bytes_before: int) -> Telemetry:
        """Return it as sent; `data_ns` is of now, `bytes_before` of the window's beginning."""
        wall_ns = now_ns - self.began_ns if self.began_ns else 0
        return replace(
            seen,
            steps=self.steps if wall_ns else 0,
            wall_ns=wall_ns,
            data_wait_ns=data_ns - self.data_before_ns,
            compute_ns=self.compute_ns,
            exchange_ns=self.exchange_ns,
            straggler_wait_ns=self.straggler_wait_ns,
            commit_ns=self.commit_ns,
            bytes_sent=seen.bytes_sent - bytes_before,
            samples=self.samples,
            tokens=self.tokens,
            straggler=self._straggler(wall_ns),
        )

    def _straggler(self, wall_ns: int) -> int:
        """Return the rank that was waited for, if that took a noticeable part of the time."""
        rank = max(self.waited_for, key=self.waited_for.__getitem__, default=-1)
        is_late = rank >= 0 and self.waited_for[rank] >= NOTICED * wall_ns
        return rank if is_late and wall_ns else -1


@dataclass
class _InGroup:
    """What is known of this worker in its group.

    Attributes:
        first_unix_ns: wall clock at the end of its first step here, 0 before.
        reported_ns: when the newest message was sent.
        bytes_sent: gradients, until then.
        last: what that message said of the steps.
        busy_ns: how long we worked between the last two exchanges, 0 if not known.
        pending_ns: how long we waited in the newest one; for whom, the next one shows.
        exchanged_ns: when that was over, 0 before the first.
    """

    worker_id: WorkerId
    generation: Generation
    send: Callable[[Progress], None]
    steps: int = 0
    first_unix_ns: int = 0
    reported_ns: int = 0
    bytes_sent: int = 0
    last: Telemetry = field(default_factory=Telemetry)
    busy_ns: int = 0
    pending_ns: int = 0
    exchanged_ns: int = 0


class Timing:
    """The times of one worker, over all groups and calls of its train function."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin with the clock stopped; `enter` and `resume` let it run."""
        self._clock = clock or SystemClock()
        self._now = self._clock.monotonic_ns
        self._at = START
        # When what it is spent on now began, 0 while the clock is stopped.
        self._since_ns = 0
        self._spent = [0] * (COMMIT + 1)
        self._has_trained = False
        self._group = _InGroup(WorkerId(""), NO_GENERATION, lambda _: None)
        self._window = _Window()

    @property
    def steps(self) -> int:
        return self._group.steps

    @property
    def busy_ns(self) -> int:
        """Return how long this rank worked between the last two exchanges, 0 if not known."""
        return self._group.busy_ns

    # ------------------------------------------------------------------- groups and calls

    def enter(
        self, worker_id: WorkerId, generation: Generation, send: Callable[[Progress], None]
    ) -> None:
        """Be in another group; `send` must return at once."""
        self._settle_exchange(())
        self._group = _InGroup(worker_id, generation, send)
        self._window = _Window(data_before_ns=self._spent[DATA_WAIT])

    def call_begins(self) -> None:
        """The train function is called: until it trains it starts, or comes back."""
        self._at = REFORM if self._has_trained else START

    def resume(self) -> None:
        """Let the clock run: this worker is in a group."""
        self._since_ns = self._since_ns or self._now()

    def stop(self) -> None:
        """Stop the clock, and report all: from here on others know better what this worker does."""
        if self._since_ns:
            self.switch(self._at)
            self._since_ns = 0
            self._fold()
            self._settle_exchange(())
            self._group.send(self._progress(self._group, self.spent()))

    # ------------------------------------------------------------------- stretches

    def switch(self, to: int) -> int:
        """Begin to spend time on something else; return what it was spent on."""
        if self._since_ns:
            now_ns = self._now()
            self._spent[self._at] += now_ns - self._since_ns
            self._since_ns = now_ns
        before, self._at = self._at, to
        return before

    @contextmanager
    def spending(self, on: int) -> Iterator[None]:
        """Spend the time of this block on something, and then return to what it was before."""
        before = self.switch(on)
        try:
            yield
        finally:
            self.switch(before)

    def begin_wait(self) -> int:
        """Wait for others from here on; return what to `switch` to afterwards.

        Outside of steps a wait is part of what is done there, such as reading a checkpoint.
        """
        return self.switch(EXCHANGE if self._at >= COMPUTE else self._at)

    def sees_no_steps(self) -> None:
        """The train function trains in a way of its own: all of that is taken for steps."""
        if self._at in (START, REFORM):
            self._has_trained = True
            self.switch(COMPUTE)

    # ------------------------------------------------------------------- a step

    def exchanged(self, busy: Sequence[float], samples: int, tokens: int) -> None:
        """All of a step has come that needs other ranks: it is committed from here on.

        Args:
            busy: `busy_ns` of all ranks, by rank, as they sent it with this step.
            samples: of the step.
            tokens: that it counts, 0 if those are its samples.
        """
        self.switch(COMMIT)
        self._settle_exchange(busy)
        group, now_ns, waited_ns = self._group, self._since_ns, self._spent[EXCHANGE]
        self._spent[EXCHANGE] = 0
        group.busy_ns = now_ns - group.exchanged_ns - waited_ns if group.exchanged_ns else 0
        group.pending_ns, group.exchanged_ns = waited_ns, now_ns
        self._window.samples += samples
        self._window.tokens += tokens

    def _settle_exchange(self, busy: Sequence[float]) -> None:
        """Find out which rank we have waited for in the exchange before this one."""
        group, window = self._group, self._window
        pending_ns, group.pending_ns = group.pending_ns, 0
        most = max(busy, default=0.0) if group.busy_ns else 0.0
        late_ns = min(pending_ns, max(0, int(most) - group.busy_ns))
        self._spent[STRAGGLER_WAIT] += late_ns
        self._spent[PRODUCTIVE] += pending_ns - late_ns
        window.exchange_ns += pending_ns
        window.straggler_wait_ns += late_ns
        if most:
            # On every rank, the slowest too: its time less the mean of all.
            rank, known = busy.index(most), [one for one in busy if one]
            by_ns = int(most - sum(known) / len(known))
            window.waited_for[rank] = window.waited_for.get(rank, 0) + by_ns

    def note_step(self, seen: Callable[[], Telemetry] = Telemetry) -> None:
        """Count a step that is over and counts; the first is sent at once, with the time of day.

        Args:
            seen: called if telemetry is sent now; returns what the loop knows: its position, what
                it has logged, and as `bytes_sent` those of this group so far.
        """
        group = self._group
        group.steps += 1
        self._has_trained = True
        self.switch(COMPUTE if self._at in (COMMIT, START, REFORM) else self._at)
        self._window.steps += 1
        self._fold()
        now_ns = self._since_ns or self._now()
        if group.steps == 1:
            group.first_unix_ns = self._clock.unix_ns()
        elif now_ns < group.reported_ns + INTERVAL_NS:
            return
        self._report(seen(), now_ns)

    def _fold(self) -> None:
        """What was computed since the last step counts."""
        spent = self._spent
        spent[PRODUCTIVE] += spent[COMPUTE] + spent[COMMIT]
        self._window.compute_ns += spent[COMPUTE]
        self._window.commit_ns += spent[COMMIT]
        spent[COMPUTE] = spent[COMMIT] = 0

    def void(self) -> None:
        """What was computed since the last step is lost, and the rank waited for is gone."""
        self.switch(REFORM)
        spent = self._spent
        spent[REDONE] += spent[COMPUTE] + spent[COMMIT]
        spent[REFORM] += spent[EXCHANGE]
        spent[COMPUTE] = spent[EXCHANGE] = spent[COMMIT] = 0

    # ------------------------------------------------------------------- reporting

    def overdue(self) -> Progress | None:
        """Return what is to be sent if no step sends it, None if it is not due; any thread."""
        group, since_ns, now_ns = self._group, self._since_ns, self._now()
        if not since_ns or now_ns < group.reported_ns + SILENCE_NS:
            return None
        group.reported_ns = now_ns
        at, spent = self._at, self._spent[: len(CATEGORIES)]
        if at < len(CATEGORIES):
            spent[at] += now_ns - since_ns
        return self._progress(group, Goodput(*spent))

    def spent(self) -> Goodput:
        """Return where the time went so far; whole once the clock is stopped."""
        return Goodput(*self._spent[: len(CATEGORIES)])

    def _report(self, seen: Telemetry, now_ns: int) -> None:
        """Send what the window has come to, and begin the next."""
        group, data_ns = self._group, self._spent[DATA_WAIT]
        group.last = self._window.telemetry(seen, now_ns, data_ns, group.bytes_sent)
        group.bytes_sent, group.reported_ns = seen.bytes_sent, now_ns
        self._window = _Window(now_ns, data_ns)
        group.send(self._progress(group, self.spent()))

    @staticmethod
    def _progress(group: _InGroup, spent: Goodput) -> Progress:
        return Progress(
            group.worker_id, group.generation, group.steps, group.first_unix_ns, spent, group.last
        )

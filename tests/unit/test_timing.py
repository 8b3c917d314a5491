"""Where a worker's time goes: all of it somewhere, by what its steps came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import NS_PER_S
from elastic.core.facts import WorkerId
from elastic.core.messages import Progress
from elastic.core.telemetry import CHECKPOINT_STALL, DATA_WAIT, USER, Goodput, Telemetry
from elastic.worker.base.timing import COMPUTE, SILENCE_NS, Timing


class HandClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_ns = NS_PER_S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns


@dataclass
class Loop:
    """A training loop whose stretches take as long as a test says."""

    clock: HandClock = field(default_factory=HandClock)
    told: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timing = Timing(self.clock)
        self.timing.call_begins()
        self.timing.enter(WorkerId("n1/1"), 1, self.told.append)
        self.timing.resume()

    def take(self, ns: int) -> None:
        self.clock.now_ns += ns

    def step(
        self, *, data: int = 0, compute: int, wait: int, commit: int = 0, busy: tuple[int, ...] = ()
    ) -> None:
        """One step; `busy` is what all ranks told with it."""
        self.timing.switch(DATA_WAIT)
        self.take(data)
        self.timing.switch(COMPUTE)
        self.take(compute)
        self.exchange(wait)
        self.timing.exchanged([float(one) for one in busy], 64, 0)
        self.take(commit)
        self.timing.note_step(lambda: Telemetry(epoch=1, step=2, logged="{}"))

    def exchange(self, ns: int) -> None:
        before = self.timing.begin_wait()
        self.take(ns)
        self.timing.switch(before)

    def spent(self) -> Goodput:
        self.timing.stop()
        spent = self.told[-1].spent
        assert spent.allocated_ns == self.clock.now_ns - NS_PER_S
        return spent


def test_a_step_that_breaks_was_computed_in_vain() -> None:
    loop = Loop()
    loop.take(500)
    loop.step(data=10, compute=60, wait=20, commit=5)
    loop.timing.switch(DATA_WAIT)
    loop.take(7)
    loop.timing.switch(COMPUTE)
    loop.take(30)
    loop.exchange(100)
    loop.timing.void()
    loop.take(40)
    loop.timing.switch(USER)
    loop.take(3)
    with loop.timing.spending(CHECKPOINT_STALL):
        loop.take(9)
    assert loop.spent() == Goodput(
        productive_ns=60 + 20 + 5, data_wait_ns=10 + 7, redone_ns=30, reform_ns=100 + 40,
        start_ns=500, user_ns=3, checkpoint_stall_ns=9,
    )  # fmt: skip


def test_who_was_busy_longest_is_the_one_that_others_waited_for() -> None:
    loop, slow = Loop(), 400_000_000
    for number in range(4):
        # Rank 2 worked for 400 ms, we for 100 ms; of our wait of 320 ms, 20 ms are the network's.
        fast = 100_000_000
        loop.step(compute=fast, wait=320_000_000, busy=(fast, fast, slow) if number > 1 else ())
    told = loop.told[-1].telemetry
    assert told.straggler == 2
    # Who was late in the first and the last step is not known.
    assert told.straggler_wait_ns == 2 * 300_000_000
    assert told.exchange_ns == 320_000_000 * told.steps
    assert (told.samples, told.position) == (64 * told.steps, (1, 2))
    assert loop.spent().straggler_wait_ns == 2 * 300_000_000


def test_a_long_evaluation_is_told_while_it_goes_on() -> None:
    loop = Loop()
    loop.step(compute=10, wait=0)
    loop.timing.switch(USER)
    assert loop.timing.overdue() is None
    loop.take(SILENCE_NS)
    told = loop.timing.overdue()
    assert told is not None
    assert told.spent.user_ns == SILENCE_NS
    assert loop.timing.overdue() is None


def test_time_between_two_groups_is_not_this_workers_to_tell() -> None:
    loop = Loop()
    loop.step(compute=10, wait=0)
    loop.timing.stop()
    loop.take(1000)
    loop.timing.enter(WorkerId("n1/1"), 2, loop.told.append)
    loop.timing.resume()
    loop.step(compute=5, wait=0)
    loop.timing.stop()
    assert loop.told[-1].spent == Goodput(productive_ns=15)

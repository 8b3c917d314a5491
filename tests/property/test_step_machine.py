"""The step machine: whatever a loop does and wherever its group breaks, weights change once a step.

A played loop asks as users' loops do: one to three optimizers, some of which it leaves out, with a
scaler or without, over micro-batches or over whole steps. Its group breaks at any event.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.events.step import (
    Abandon,
    CloseReceived,
    CloseStep,
    Commit,
    CommitRequested,
    EmptyStepRequested,
    GradientsRequested,
    GradientsSettled,
    GroupBroke,
    GroupLeft,
    IterationClosed,
    KeepStep,
    LoopBegan,
    MicroBatchComputed,
    MicroBatchOpened,
    PassLeft,
    Refusal,
    Refuse,
    SettleGradients,
    SettleStep,
    StepCommitted,
    StepEffect,
    StepEvent,
    StepReceived,
    StepRequested,
    StepSettled,
    StepSkipped,
)
from elastic.core.machine.step import StepMachine
from elastic.core.machine.transitions import StepPhase


class PlayedDriver:
    """Performs effects as the engine does, in a group that breaks at the drawn moment.

    Attributes:
        commits: how often weights have changed.
        voids: how often a step was given up.
        lines: events with the phase that each led to, and its effects.
    """

    def __init__(self, num_optimizers: int, breaks: Iterator[bool]) -> None:
        self.machine, self.commits, self.voids = StepMachine(), 0, 0
        self.is_broken = False
        self.lines: list[str] = []
        self._breaks, self._kept = breaks, set[int]()
        self.take(LoopBegan(num_optimizers))

    def breaks(self) -> bool:
        """Return whether the group is broken by now."""
        self.is_broken = self.is_broken or next(self._breaks)
        return self.is_broken

    def take(self, event: StepEvent) -> list[StepEffect]:
        """Return the effects of an event, after they were performed."""
        effects = self.machine.step(event)
        names = ", ".join(type(effect).__name__ for effect in effects) or "-"
        self.lines.append(f"{type(event).__name__} | {self.machine.phase.value} | {names}")
        for effect in effects:
            self._perform(effect)
        for effect in effects[:-1]:
            assert not isinstance(effect, (SettleGradients, SettleStep, Commit))
        return list(effects)

    def _perform(self, effect: StepEffect) -> None:
        if isinstance(effect, SettleGradients):
            self.take(GradientsSettled(effect.request, not self.breaks()))
        elif isinstance(effect, SettleStep):
            self.take(StepSettled(not self.breaks()))
        elif isinstance(effect, KeepStep):
            assert effect.optimizer not in self._kept
            self._kept.add(effect.optimizer)
        elif isinstance(effect, Commit):
            is_done = effect.is_settled or not self.breaks()
            self.commits += is_done
            self.take(StepCommitted(is_done))
            self._kept.clear()
        elif isinstance(effect, Abandon):
            self.voids += 1
            self._kept.clear()

    def rejoin(self) -> None:
        """Go on in the next group."""
        self.take(GroupLeft())
        self.is_broken = False
        self._kept.clear()


@given(
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.booleans(), max_size=40),
)
def test_a_plain_loop_commits_each_step_once_and_no_broken_one(
    asked: list[bool], micro_batches: int, has_scaler: bool, broken: list[bool]
) -> None:
    optimizers = [number for number, is_asked in enumerate(asked) if is_asked] or [0]
    driver = PlayedDriver(3, iter([*broken, *[False] * 1_000]))
    steps, number, is_first = 0, 0, True
    while steps < 3:
        before = driver.commits
        driver.take(CommitRequested())
        effects = driver.take(IterationClosed(is_first, driver.breaks()))
        assert not any(isinstance(effect, Refuse) for effect in effects)
        is_first = False
        if driver.machine.phase is StepPhase.VOID or driver.is_broken:
            driver.rejoin()
            number = 0
        steps += sum(isinstance(effect, CloseStep) for effect in effects)
        if steps == 3:
            break
        number = 0 if effects else number
        driver.take(MicroBatchOpened(number == micro_batches - 1, of_whole_step=False))
        number += 1
        for optimizer in optimizers:
            if has_scaler:
                driver.take(GradientsRequested(optimizer, driver.breaks()))
            driver.take(StepRequested(optimizer, driver.breaks()))
            driver.take(StepSkipped(optimizer, driver.breaks()))  # A scaler reports each step.
        assert driver.commits - before <= 1
        if driver.commits > before:
            assert number == micro_batches or before == steps - 1
    assert driver.commits == steps


@given(st.integers(1, 2), st.integers(1, 3), st.booleans(), st.lists(st.booleans(), max_size=30))
def test_a_loop_over_whole_steps_has_one_iteration_for_each(
    num_optimizers: int, micro_batches: int, is_received: bool, broken: list[bool]
) -> None:
    driver = PlayedDriver(num_optimizers, iter([*broken, *[False] * 1_000]))
    machine, received = driver.machine, 0
    for _ in range(3):
        while machine.phase not in (StepPhase.SETTLED, StepPhase.RECEIVED):
            for number in range(micro_batches):
                driver.take(MicroBatchOpened(number == micro_batches - 1, of_whole_step=True))
                driver.take(MicroBatchComputed(driver.breaks()))
                if machine.phase is StepPhase.VOID:
                    driver.rejoin()
                    if is_received:
                        driver.take(StepReceived())
                    break
        received += machine.phase is StepPhase.RECEIVED
        before = driver.commits
        # From here on nothing needs another rank: a group that breaks now is no matter.
        for optimizer in range(num_optimizers):
            driver.take(StepRequested(optimizer, is_broken=True))
        assert driver.commits - before == (machine.phase is StepPhase.COMMITTED)
        (closed,) = driver.take(IterationClosed(False, driver.is_broken))
        assert isinstance(closed, (CloseStep, CloseReceived))
        assert machine.phase is StepPhase.OUTSIDE
    assert driver.commits + received == 3


def test_what_becomes_of_a_step_whose_group_breaks_in_the_exchange() -> None:
    driver = PlayedDriver(2, iter([True, *[False] * 9]))
    driver.take(MicroBatchOpened(is_last=False, of_whole_step=False))
    driver.take(StepRequested(0, is_broken=False))
    driver.take(CommitRequested())
    driver.take(IterationClosed(False, is_broken=False))
    driver.take(MicroBatchOpened(is_last=True, of_whole_step=False))
    driver.take(StepRequested(0, is_broken=False))
    driver.take(StepRequested(1, is_broken=True))
    driver.take(IterationClosed(False, is_broken=True))
    driver.rejoin()
    driver.take(MicroBatchOpened(is_last=True, of_whole_step=False))
    driver.take(StepRequested(0, is_broken=False))
    driver.take(CommitRequested())
    driver.take(IterationClosed(False, is_broken=False))
    assert driver.lines == [
        "LoopBegan | outside | -",
        "MicroBatchOpened | gathering | -",
        "StepRequested | gathering | CheckRates, TakeGradients",
        "CommitRequested | gathering | -",
        "IterationClosed | gathering | -",
        "MicroBatchOpened | due | -",
        "StepRequested | due | CheckRates, SettleGradients",
        "GradientsSettled | void | Abandon",
        "StepRequested | void | -",
        "IterationClosed | void | -",
        "GroupLeft | outside | -",
        "MicroBatchOpened | due | -",
        "StepRequested | due | CheckRates, SettleGradients",
        "GradientsSettled | due | TakeGradients, KeepStep, HoldGradients",
        "CommitRequested | committing | Commit",
        "StepCommitted | committed | -",
        "IterationClosed | outside | CloseStep",
    ]


OPENED = MicroBatchOpened(is_last=True, of_whole_step=False)
WHOLE = MicroBatchOpened(is_last=True, of_whole_step=True)
COMPUTED, ASKED = MicroBatchComputed(is_broken=False), StepRequested(0, is_broken=False)
CLOSED = IterationClosed(is_first=False, is_broken=False)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((OPENED, ASKED, ASKED), Refusal.STEPPED_TWICE),
        ((OPENED, ASKED, CommitRequested(), StepRequested(1, False)), Refusal.STEPPED_LATE),
        ((OPENED, CLOSED), Refusal.NOT_STEPPED),
        ((WHOLE, ASKED), Refusal.STEPPED_INSIDE),
        ((WHOLE, CLOSED), Refusal.STEP_NOT_COMPUTED),
        ((CLOSED,), Refusal.STEP_NOT_COMPUTED),
        ((WHOLE, COMPUTED, CLOSED), Refusal.STEP_NOT_STEPPED),
    ],
)
def test_what_cannot_work_is_refused(events: tuple[StepEvent, ...], reason: Refusal) -> None:
    driver = PlayedDriver(2, iter([False] * 99))
    for event in events[:-1]:
        assert not any(isinstance(effect, Refuse) for effect in driver.take(event))
    (refused,) = driver.take(events[-1])
    assert isinstance(refused, Refuse)
    assert refused.reason is reason


def test_a_step_that_raised_is_refused_where_the_loop_goes_on() -> None:
    machine = StepMachine()
    machine.step(LoopBegan(1))
    machine.step(OPENED)
    machine.step(ASKED)
    settled = GradientsSettled(ASKED, is_whole=True)
    assert machine.step(settled)[-1] == Commit(is_settled=False)
    assert machine.step(CommitRequested()) == ()  # By a hook of the optimizer.
    assert machine.step(CLOSED) == (Refuse(Refusal.STEP_RAISED),)


def test_an_empty_step_counts_only_where_it_was_computed() -> None:
    driver = PlayedDriver(1, iter([False] * 9))
    driver.take(EmptyStepRequested())
    driver.take(WHOLE)
    driver.take(EmptyStepRequested())
    assert driver.commits == 0
    driver.take(COMPUTED)
    driver.take(EmptyStepRequested())
    assert driver.commits == 1


def test_a_boundary_at_which_the_group_breaks_leads_to_the_next_group() -> None:
    driver = PlayedDriver(1, iter([False] * 9))
    driver.take(OPENED)
    driver.take(ASKED)
    driver.take(CLOSED)
    driver.take(GroupBroke())
    assert driver.machine.phase is StepPhase.VOID
    driver.rejoin()
    driver.take(PassLeft())
    assert driver.machine.phase is StepPhase.OUTSIDE

"""The step machine: what each call of a training loop is worth, from one micro-batch to the next.

A loop asks for micro-batches, and its optimizers to step. Before a rank's last micro-batch of a
step there is nothing to step with; then gradients are exchanged, and the step is committed once
all optimizers were asked. Where the group breaks on the way, the rest of the iteration does
nothing: the step is void, and done again in the next group.

Rule: weights change with the effect `Commit` alone, once a step, and never after a sign that the
group broke. An effect with a reply is the last one of its event.
"""

from __future__ import annotations

from elastic.core.events.step import (
    Abandon,
    CheckRates,
    CloseReceived,
    CloseStep,
    Commit,
    CommitRequested,
    EmptyStepRequested,
    GradientsRequested,
    GradientsSettled,
    GroupBroke,
    GroupLeft,
    HoldGradients,
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
    TakeGradients,
)
from elastic.core.machine.transitions import STEP, StepPhase, check_move

Effects = tuple[StepEffect, ...]

OPEN = (StepPhase.GATHERING, StepPhase.DUE)
"""In each such iteration optimizers are to be asked, or the number of a rank's would decide."""
READY = (StepPhase.DUE, StepPhase.SETTLED)
"""Optimizers may be asked, and the step is committed once they were."""
AT_STEP = (*READY, StepPhase.COMMITTING)
"""Gradients are those of the whole step, and it is not committed yet."""
DOES_NOTHING = (StepPhase.VOID, StepPhase.RECEIVED)
"""Calls of the user's code have no effect until the iteration is over."""


class StepMachine:
    """Events in, effects out; owned by the step engine.

    Attributes:
        phase: follows `transitions.STEP`.
        asked: optimizers that were asked to step in this iteration.
    """

    def __init__(self) -> None:
        self.phase = StepPhase.OUTSIDE
        self.asked: list[int] = []
        self._num_optimizers = 0
        # Optimizers that step with the next commit.
        self._kept: list[int] = []
        # The micro-batch of a whole step that is computed now is our last one.
        self._is_last = False

    # --------------------------------------------------------------------- what the loop may ask

    @property
    def runs_after_step(self) -> bool:
        """Return whether what follows an optimizer's step is to happen now."""
        return self.phase in (StepPhase.OUTSIDE, StepPhase.COMMITTED)

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients are those that an optimizer steps with."""
        return self.phase is StepPhase.OUTSIDE or self.phase in AT_STEP

    @property
    def is_computing(self) -> bool:
        """Return whether ranks may have unequally many iterations like this one in the step."""
        return self.phase in OPEN or self.phase is StepPhase.COMPUTING

    # --------------------------------------------------------------------- events

    def step(self, event: StepEvent) -> Effects:
        """Process one event.

        Returns:
            Effects, to be performed in this order.

        Raises:
            InvariantViolation: a bug: the event cannot come in this phase.
        """
        if isinstance(event, MicroBatchOpened):
            return self._opened(event)
        if isinstance(event, (StepRequested, StepSkipped, GradientsRequested)):
            return self._asked(event)
        if isinstance(event, (GradientsSettled, StepSettled, StepCommitted)):
            return self._replied(event)
        if isinstance(event, MicroBatchComputed):
            return self._computed(event)
        if isinstance(event, IterationClosed):
            return self._closed(event)
        if isinstance(event, CommitRequested):
            return self._commit() if self._kept and self.phase in READY else ()
        if isinstance(event, EmptyStepRequested):
            return self._commit() if self.phase is StepPhase.SETTLED else ()
        if isinstance(event, GroupBroke):
            self._move(StepPhase.VOID)
        elif isinstance(event, StepReceived):
            self._move(StepPhase.RECEIVED)
        elif isinstance(event, (GroupLeft, PassLeft)):
            self._move(StepPhase.OUTSIDE)
            self.asked = []
            self._kept = []
        elif isinstance(event, LoopBegan):
            self._num_optimizers = event.num_optimizers
        return ()

    def _opened(self, event: MicroBatchOpened) -> Effects:
        phase = StepPhase.DUE if event.is_last else StepPhase.GATHERING
        self._move(StepPhase.COMPUTING if event.of_whole_step else phase)
        self.asked = []
        self._is_last = event.is_last
        return ()

    def _computed(self, event: MicroBatchComputed) -> Effects:
        if event.is_broken:
            return self._void()
        return (SettleStep(),) if self._is_last else ()

    def _closed(self, event: IterationClosed) -> Effects:
        phase = self.phase
        if phase in OPEN and not (self.asked or event.is_broken):
            return (Refuse(Refusal.NOT_STEPPED),)
        if phase is StepPhase.COMMITTING:
            return (Refuse(Refusal.STEP_RAISED),)
        if phase is StepPhase.SETTLED:
            return (Refuse(Refusal.STEP_NOT_STEPPED),)
        if phase in (StepPhase.OUTSIDE, StepPhase.COMPUTING) and not event.is_first:
            return (Refuse(Refusal.STEP_NOT_COMPUTED),)
        if phase is StepPhase.COMMITTED:
            self._move(StepPhase.OUTSIDE)
            return (CloseStep(),)
        if phase is StepPhase.RECEIVED:
            self._move(StepPhase.OUTSIDE)
            return (CloseReceived(),)
        return ()

    # --------------------------------------------------------------------- optimizers

    def _asked(self, event: StepRequested | StepSkipped | GradientsRequested) -> Effects:
        if isinstance(event, GradientsRequested):
            return self._settle(event, ()) if self.phase is StepPhase.DUE else ()
        optimizer, phase = event.optimizer, self.phase
        is_again = optimizer in self.asked
        if isinstance(event, StepSkipped):
            if is_again or phase is StepPhase.OUTSIDE:
                return ()
        elif is_again and phase not in DOES_NOTHING:
            return (Refuse(Refusal.STEPPED_TWICE, optimizer),)
        elif phase is StepPhase.COMPUTING:
            return (Refuse(Refusal.STEPPED_INSIDE, optimizer),)
        if phase is StepPhase.COMMITTED and self.asked:
            return (Refuse(Refusal.STEPPED_LATE, optimizer),)
        self.asked.append(optimizer)
        if phase is StepPhase.GATHERING:
            return CheckRates(optimizer), TakeGradients(optimizer)
        if phase is StepPhase.DUE:
            return self._settle(event, (CheckRates(optimizer),))
        return self._keep(optimizer) if phase is StepPhase.SETTLED else ()

    def _settle(
        self, event: StepRequested | StepSkipped | GradientsRequested, before: Effects
    ) -> Effects:
        if event.is_broken:
            return *before, *self._void()
        return *before, SettleGradients(event)

    def _keep(self, optimizer: int) -> Effects:
        self._kept.append(optimizer)
        taken = TakeGradients(optimizer), KeepStep(optimizer)
        if len(self._kept) < self._num_optimizers:
            return *taken, HoldGradients(optimizer)
        return *taken, *self._commit()

    def _commit(self) -> Effects:
        is_settled = self.phase is StepPhase.SETTLED
        self._move(StepPhase.COMMITTING)
        return (Commit(is_settled),)

    # --------------------------------------------------------------------- replies

    def _replied(self, event: GradientsSettled | StepSettled | StepCommitted) -> Effects:
        if isinstance(event, GradientsSettled):
            if not event.is_whole:
                return self._void()
            is_step = not isinstance(event.request, GradientsRequested)
            return self._keep(event.request.optimizer) if is_step else ()
        if isinstance(event, StepSettled):
            if not event.is_whole:
                return self._void()
            self._move(StepPhase.SETTLED)
            self.asked = []
            return ()
        if not event.is_done:
            return self._void()
        self._move(StepPhase.COMMITTED)
        self._kept = []
        return ()

    def _void(self) -> Effects:
        self._move(StepPhase.VOID)
        return (Abandon(),)

    def _move(self, phase: StepPhase) -> None:
        check_move(STEP, "step", self.phase, phase)
        self.phase = phase

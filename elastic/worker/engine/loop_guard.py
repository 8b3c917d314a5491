"""What a loop over epochs must not do, and where that shows.

How many iterations a rank has in a step depends on the number of workers, and a step may be done
again. So nothing may come of how often the loop's body runs: no weights or registered objects
changed in each iteration, no rate that follows from its number, no end at a count of them.

Rule: the engine tells what happens, and this refuses by a UsageError that names what to write
instead. Nothing else follows from what is known here.
"""

from __future__ import annotations

import torch

from elastic.core.machine.transitions import StepPhase
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.worker.engine import usage_errors
from elastic.worker.engine.still_weights import StillWeights
from elastic.worker.engine.unregistered import UnregisteredObjects
from elastic.worker.reduce.step_metadata import rates_print
from elastic.worker.state.train_state import TrainState


class LoopGuard:
    """Watches one loop, from its beginning to its end.

    Attributes:
        still: weights that nothing may change while a step is computed.
    """

    def __init__(self, state: TrainState, *, looks: bool) -> None:
        """Refuse what cannot be trained with.

        Args:
            state: what is prepared and registered.
            looks: for what changes beside it; not in a framework's loop, which keeps more, nor
                where an earlier call of the train function has looked.
        """
        self._state = state
        usage_errors.check_lazy(state.models)
        self._unregistered = UnregisteredObjects(state) if looks else None
        usage_errors.check_forward(state.models)
        self._sync_norms = usage_errors.sync_norms(state.models)
        usage_errors.check_sync_norms(self._sync_norms)
        usage_errors.check_whole(state.optimizers)
        usage_errors.check_scheduled(state)
        # Modules replace sharded ones while they are gathered.
        self.still = StillWeights(() if state.is_sharded else state.named_weights())
        # Of normalization layers in registered modules: their counters, and these as a step began.
        self._counters = usage_errors.registered_counters(state)
        self._counted: list[int] = []
        # Prints of the learning rates with which optimizers were asked to step, by their ids.
        self._rates: dict[int, int] = {}
        # This iteration has asked whether a step is done, or how many are; and the one before it,
        # or there was none in this pass.
        self._has_asked = self._had_asked = True

    def open_iteration(self) -> None:
        usage_errors.check_sync_norms(self._sync_norms)  # `train()` may come after the beginning.
        self._had_asked, self._has_asked = self._has_asked, False

    def begin_step(self) -> None:
        self.still.begin()
        if self._unregistered is not None:
            self._unregistered.step_begins()
        self._rates = {}
        self._counted = self._counts()

    def check_computed(self, *, repeats: bool) -> None:
        """Refuse a step in which forward, or the loop's body, has changed what is to stay.

        Args:
            repeats: what is done before the step may be done several times in it: for each of
                several micro-batches, or again after a loss.
        """
        self.still.check()
        if not repeats:
            return
        now = self._counts()
        if now != self._counted:
            counted = zip(self._counters, now, self._counted, strict=True)
            raise usage_errors.counted_in_forward(*(c for c, one, was in counted if one != was))
        if self._unregistered is not None:
            self._unregistered.step_computed()

    def _counts(self) -> list[int]:
        return [one._version for one in self._counters.values()]

    def check_rates(self, optimizer: torch.optim.Optimizer, cursor: Cursor) -> None:
        """Refuse other rates than in the iteration before of the same step."""
        rates = rates_print([optimizer])
        if self._rates.setdefault(id(optimizer), rates) != rates:
            self._state.check_still_known()
            raise usage_errors.rates_within_a_step(optimizer, cursor)

    def step_committed(self) -> None:
        """The loop's body goes on behind a step, in one of several iterations that it may have."""
        if not self._has_asked:
            self.still.begin()
            if self._unregistered is not None:
                self._unregistered.step_committed()

    def note_asked(self, *, follows_commit: bool) -> None:
        """The body asks whether a step is done: what it does from here on is done once."""
        self._has_asked = True
        if follows_commit:
            self.still.end()

    def step_closed(self) -> None:
        """The body is through with a step."""
        self.still.check_after()
        if self._unregistered is not None:
            self._unregistered.step_done(has_asked=self._has_asked)

    def cut_at(
        self, phase: StepPhase, cursor: Cursor, *, counts_iterations: bool
    ) -> UsageError | None:
        """Return what is wrong with leaving a pass here; None if all ranks leave it here, too.

        Before any optimizer was asked every rank has that place in a step, unless it was counted.
        """
        if phase is StepPhase.GATHERING and self._rates:
            return usage_errors.left_within_a_step(cursor)
        is_open = phase in (StepPhase.GATHERING, StepPhase.DUE)
        has_asked = self._has_asked or (is_open and self._had_asked)
        if counts_iterations and not has_asked and (is_open or phase is StepPhase.COMMITTED):
            return usage_errors.left_by_count(cursor)
        return None

    def leave_pass(self) -> None:
        self._rates = {}
        self._has_asked = True

    def close_epoch(self) -> None:
        if self._unregistered is not None:
            self._unregistered.check()

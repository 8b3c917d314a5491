"""The gradients of a sharded model: its own wrapper adds them over ranks, we over micro-batches.

`fully_shard` reduces in every backward call, to the mean over ranks. A step's gradient is the mean
over all its samples: so the loss of a micro-batch is weighted before backward by its samples, and
what backward leaves in `p.grad` is put aside until the step's last one.

Collectives only match if every rank makes as many backward calls. Where V micro-batches do not
divide by W ranks, those with fewer compute their first one once more before, with weight zero.

Rule: what a rank adds up are its own rows. The order in which ranks are added is the backend's, so
that bits depend on the world size, and on nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elastic.errors import InvariantViolation, UsageError
from elastic.worker.base.activity import Activity
from elastic.worker.group import c10d
from elastic.worker.reduce.backward import around_backward
from elastic.worker.reduce.commit_gate import CommitGate
from elastic.worker.reduce.model_buffers import ModelBuffers
from elastic.worker.reduce.reducer import Reducer
from elastic.worker.reduce.step_metadata import Row, send_metadata
from elastic.worker.reduce.step_share import SHARE_NUMBERS, MicroBatch, StepShare, WeighedShare
from elastic.worker.state.sharded_state import check_shards
from elastic.worker.state.train_state import OptimizerUnit, TrainState

Gradients = list[torch.Tensor | None]
"""Of the parameters of one unit."""


class _UnitGradients:
    """The gradients of one unit in the step at hand.

    Attributes:
        has_stepped: in this micro-batch, whose gradients are left where they are since then.
    """

    def __init__(self, unit: OptimizerUnit) -> None:
        self.unit = unit
        self.has_stepped = False
        self._parameters = [parameter for _, parameter in unit.parameters]
        # What the micro-batches before have given, and what this one has.
        self._sums: Gradients = self._none()
        self._fresh: Gradients = self._none()

    def _none(self) -> Gradients:
        return [None] * len(self._parameters)

    def begin_step(self) -> None:
        self._sums = self._none()
        self.forget_fresh()

    def begin_micro_batch(self) -> None:
        """Add up what the one before has given."""
        for index, gradient in enumerate(self._fresh):
            self._sums[index] = _added(self._sums[index], gradient)
        self.has_stepped = False
        self.forget_fresh()

    def forget_fresh(self) -> None:
        """What this micro-batch has given does not count, and is not shown."""
        self._fresh = self._none()
        self.hide()

    def hide(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def zero(self, chosen: Collection[int] | None = None) -> None:
        """Let what this micro-batch has given so far not count.

        Args:
            chosen: ids of the parameters of which it does not; None for all.
        """
        for index, parameter in enumerate(self._parameters):
            if chosen is None or id(parameter) in chosen:
                self._fresh[index] = None

    def take(self) -> None:
        """Put aside what backward has left in `p.grad`."""
        for index, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            self._fresh[index] = _added(self._fresh[index], gradient)

    def show_fresh(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let `p.grad`, where there is none, be what this micro-batch has given so far."""
        for parameter, gradient in zip(self._parameters, self._fresh, strict=True):
            if parameter.grad is None and gradient is not None:
                parameter.grad = copied(gradient)

    def is_shown(self) -> bool:
        """Return whether any `p.grad` has something."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def show_totals(self, factor: float) -> None:
        """Let `p.grad` be the step's gradient; None where no micro-batch has given one."""
        for index, parameter in enumerate(self._parameters):
            total = _added(self._sums[index], self._fresh[index])
            parameter.grad = total if total is None or factor == 1.0 else total * factor


def _added(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more


@dataclass
class _Step:
    """A step from its beginning until gradients are left alone again.

    Attributes:
        control: numbers that all ranks get to see.
        number: of the micro-batch at hand; None before the first, and for one that does not count.
        weight: what the loss of the micro-batch at hand is multiplied by.
        factor: what the sum is multiplied by, None until all ranks' rows are there. It is 1, but
            for a step with fewer samples than others.
    """

    share: StepShare | WeighedShare
    control: Sequence[float]
    is_void: bool = False
    number: int | None = None
    is_last: bool = False
    weight: float = 0.0
    factor: float | None = None


class ShardedReducer:
    """Does for a sharded model what `Reducer` does for one that every rank has; same calls.

    Attributes:
        broken: why this step cannot be completed, None while it can.
        rows: what each rank gave to `begin_step`, by rank; valid once a unit has settled.
        bytes_sent: 0: what the model's own wrapper sends is not counted.
    """

    bytes_sent = 0

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        modules: Sequence[nn.Module],
        *,
        activity: Activity,
        is_over: Callable[[], bool],
    ) -> None:
        """Surround backward; nothing else changes until a step begins.

        See `Reducer`. UsageError if a parameter is not sharded over the group that is formed, or
        cannot be saved.
        """
        for unit in units:
            for name, parameter in unit.parameters:
                check_shards(name, parameter, c10d.default_group().size())
        self.broken: BaseException | None = None
        self.rows: list[tuple[float, ...]] = []
        self._activity = activity
        self._buffers = ModelBuffers(modules)
        self._units = [_UnitGradients(unit) for unit in units]
        parameters = (parameter for unit in units for _, parameter in unit.parameters)
        self._gate = CommitGate(parameters, activity, is_over)
        self._group: Any = None
        self._step: _Step | None = None
        self._undo = around_backward(self._around_backward, scale=self._scale)
        activity.is_sharded = True

    # ------------------------------------------------------------------------- groups

    def attach(self, group: Any) -> None:
        self.abandon()
        if self._step is not None:
            for unit in self._units:
                unit.forget_fresh()
        self.release_gradients()
        self.broken, self._group = None, group
        others = group if group is not None and group.size() > 1 else None
        self._buffers.attach(others)
        self._gate.attach(others)

    def release_gradients(self) -> None:
        self._buffers.end_step()
        self._step = None

    def close(self) -> None:
        self.release_gradients()
        self._undo()
        self._activity.is_sharded = False

    # ------------------------------------------------------------------------- a step

    def begin_step(self, share: StepShare | WeighedShare, control: Sequence[float] = ()) -> None:
        self.rows = []
        self._step = _Step(share, control)
        for unit in self._units:
            unit.begin_step()
        self._buffers.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        share = self._the_step().share
        weight = share.weight(number) or 0.0
        scale = share.partition.world_size / share.partition.num_micro_batches
        self._begin(number, weight * scale, is_last=number == share.held[1] - 1)

    def begin_padding(self) -> None:
        """Begin a micro-batch that does not count; it comes before those that do."""
        self._begin(None, 0.0, is_last=False)

    def _begin(self, number: int | None, weight: float, *, is_last: bool) -> None:
        step = self._the_step()
        for unit in self._units:
            unit.begin_micro_batch()
        if step.number is not None and not step.is_void:
            self._buffers.end_micro_batch(step.number, step.share.counts[step.number])
        step.number, step.weight, step.is_last = number, weight, is_last
        self._buffers.restore()

    def abandon(self) -> None:
        if self._step is not None:
            self._step.is_void = True
            self._buffers.restore(is_void=True)
            # A loop may read `p.grad` without asking whether it is there.
            for unit in self._units:
                unit.show_fresh(torch.Tensor.detach)

    def unit_stepped(self, unit: OptimizerUnit) -> None:
        self._own(unit).has_stepped = True

    def unit_zeroed(self, unit: OptimizerUnit) -> None:
        own = self._own(unit)
        if not own.has_stepped:
            own.zero()

    def parameters_zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        chosen = {id(parameter) for parameter in parameters}
        for unit in self._not_stepped():
            unit.zero(chosen)

    def settle(self, unit: OptimizerUnit) -> bool:
        """Have the whole step's gradient in `p.grad`, on the last micro-batch; return if it is."""
        own, factor = self._own(unit), self._exchange_row(self._the_step())
        if factor is None:
            return False
        if not own.is_shown():
            own.show_totals(factor)  # Zeroed since backward, or backward has not reached it.
        return True

    def settle_buffers(self, is_good: Callable[[], bool] = lambda: True) -> bool:
        step = self._the_step()
        share = step.share
        if step.is_void or self.broken is not None or step.number is None:
            return False
        self._buffers.end_micro_batch(step.number, share.counts[step.number])
        own = self._gate.record()
        self._guarded(lambda: self._buffers.settle(share.partition, share.samples))
        self._guarded(lambda: self._gate.wait_all(own), waits=False)
        return self.broken is None and is_good()

    def before_step(self) -> AbstractContextManager[None]:
        return self._buffers.before_step()

    def keep_buffers(self) -> None:
        self._buffers.keep()

    # ------------------------------------------------------------------------- backward

    def _scale(self) -> float:
        """Return what the gradient of the loss is multiplied by in this backward call."""
        step = self._step
        return step.weight if step is not None and not step.is_void else 1.0

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        step = self._step
        if step is None:
            yield
            return
        for unit in self._not_stepped():
            unit.hide()  # What was shown, and is kept.
        yield
        self._activity.beats += 1
        if step.is_void:
            return
        for unit in self._not_stepped():
            unit.take()
        if not step.is_last:
            for unit in self._units:
                unit.show_fresh(torch.Tensor.clone)
            return
        factor = self._exchange_row(step)
        if factor is not None:
            for unit in self._not_stepped():
                unit.show_totals(factor)

    def _exchange_row(self, step: _Step) -> float | None:
        """Exchange the step's row, once; return the factor of its sums, None if it is void."""
        if step.is_void or self.broken is not None:
            return None
        if step.factor is None:
            step.factor = self._factor_from_rows(step)
        return step.factor

    def _factor_from_rows(self, step: _Step) -> float | None:
        share = step.share
        row = [self._buffers.note_changes(), *share.own_row(), *step.control]
        rows: list[Row] = []
        self._guarded(lambda: rows.extend(send_metadata(self._group, row)))
        # Among all that the device was given are the model's own collectives: which rank waits for
        # which is not known, and all of it counts as waiting.
        self._guarded(self._gate.wait_exchanged, waits=False)
        if self.broken is not None:
            return None
        if any(one[0] != rows[0][0] for one in rows):
            raise UsageError(
                "forward changes buffers of the model on some ranks and not on others, so that "
                "they cannot be averaged; let it change the same ones in every micro-batch"
            )
        if isinstance(share, WeighedShare):
            divisor = share.take_rows([one[1 : 1 + SHARE_NUMBERS] for one in rows])
        else:
            divisor = share.divisor
        self.rows = [one[1 + SHARE_NUMBERS :] for one in rows]
        return share.partition.num_micro_batches / divisor

    # ------------------------------------------------------------------------- the rest

    def _not_stepped(self) -> list[_UnitGradients]:
        return [unit for unit in self._units if not unit.has_stepped]

    def _guarded(self, exchange: Callable[[], None], *, waits: bool = True) -> None:
        if self.broken is not None:
            return
        try:
            with self._activity.waiting() if waits else nullcontext():
                exchange()
        except RuntimeError as error:
            self.broken = error
            self.abandon()

    def _own(self, unit: OptimizerUnit) -> _UnitGradients:
        return next(one for one in self._units if one.unit is unit)

    def _the_step(self) -> _Step:
        if self._step is None:
            raise InvariantViolation("no step has begun")
        return self._step


class Padding:
    """Micro-batches of weight zero, in which a rank with fewer goes along with the others."""

    def __init__(self, reducer: ShardedReducer | None = None) -> None:
        """Owe none; the reducer is None if ranks need not make equally many backward calls."""
        self._reducer = reducer
        self._left = 0
        self._kept: MicroBatch | None = None

    def forget(self) -> None:
        """The loop continues elsewhere in the data."""
        self._left, self._kept = 0, None

    @property
    def is_under_way(self) -> bool:
        """Return whether what `take` gives next was given before."""
        return self._kept is not None

    def take(self, read: Callable[[], MicroBatch]) -> MicroBatch:
        """Return the micro-batch that is computed next, for whatever it counts."""
        kept, self._kept = self._kept, None
        return kept if kept is not None else read()

    def begin_step(self, share: StepShare | WeighedShare) -> None:
        """Find out how many this rank owes before its first micro-batch."""
        first, last = share.held
        most = -(-share.partition.num_micro_batches // share.partition.world_size)
        self._left = most - (last - first) if self._reducer is not None else 0

    def pad(self, batch: MicroBatch) -> MicroBatch | None:
        """Return a copy that counts nothing if one is owed; `take` then gives this one again.

        Raises:
            UsageError: it cannot be copied.
        """
        if not self._left or self._reducer is None:
            return None
        self._left, self._kept = self._left - 1, batch
        self._reducer.begin_padding()
        try:
            return replace(batch, count=0, weight=0.0, value=copy.deepcopy(batch.value))
        except Exception as error:
            raise UsageError(
                f"a step's micro-batches do not divide evenly among the ranks, and this one, which "
                f"has to be computed twice for that, cannot be copied ({error}): let the loader "
                f"return tensors, or choose a world size that divides the number of micro-batches"
            ) from error


def make_reducer(
    state: TrainState,
    units: Sequence[OptimizerUnit],
    *,
    consistency: str,
    activity: Activity,
    is_over: Callable[[], bool],
) -> tuple[Reducer | ShardedReducer, Padding]:
    """Return what reduces the gradients of these objects, and what evens out their ranks' rounds.

    UsageError if some models are sharded and others are not.
    """
    if not state.is_sharded:
        reducer = Reducer(
            units,
            state.models,
            consistency=consistency,
            activity=activity,
            is_over=is_over,
        )
        return reducer, Padding()
    sharded = ShardedReducer(units, state.models, activity=activity, is_over=is_over)
    return sharded, Padding(sharded)


def recovery_of(state: TrainState, chosen: str) -> str:
    """Return the mode of recovery, as in `FailureConfig`, that these objects allow.

    UsageError if the user insists on another one.
    """
    if not state.is_sharded or chosen in ("reenter", "restart"):
        return chosen
    if chosen == "in_place":
        raise UsageError(
            "FailureConfig(recovery='in_place') with a sharded model: no other rank has rows of "
            "a member that is lost, so the train function must be called again; use 'auto'"
        )
    return "reenter"

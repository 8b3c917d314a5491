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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elastic.errors import UsageError, check
from elastic.worker.base.activity import Activity
from elastic.worker.group import c10d
from elastic.worker.reduce.backward import around_backward
from elastic.worker.reduce.commit_gate import CommitGate
from elastic.worker.reduce.model_buffers import ModelBuffers
from elastic.worker.reduce.reducer import Reducer
from elastic.worker.reduce.step_metadata import send_metadata
from elastic.worker.reduce.step_share import SHARE_NUMBERS, MicroBatch, StepShare, WeighedShare
from elastic.worker.state.sharded_state import check_shards
from elastic.worker.state.train_state import OptimizerUnit, TrainState

Gradients = list[torch.Tensor | None]
"""Of the parameters of one unit."""


class ShardedReducer:
    """Does for a sharded model what `Reducer` does for one that every rank has; same calls.

    Attributes:
        broken: why this step cannot be completed, None while it can.
        rows: what each rank gave to `begin_step`, by rank; valid once a unit has settled.
        bytes_sent: 0: what the model's own wrapper sends is not counted.
    """

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        modules: Sequence[nn.Module],
        *,
        activity: Activity,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Surround backward; nothing else changes until a step begins.

        Args:
            units: what each optimizer steps.
            modules: whose buffers (BatchNorm) are averaged over a step.
            activity: notified when we wait for others.
            is_over: returns whether the group is not whole any more; see `CommitGate`.

        Raises:
            UsageError: a parameter is not sharded over the group that stands, or cannot be saved.
        """
        for unit in units:
            for name, parameter in unit.parameters:
                check_shards(name, parameter, c10d.default_group().size())
        self.broken: BaseException | None = None
        self.rows: list[tuple[float, ...]] = []
        self.bytes_sent = 0
        self._activity = activity
        self._buffers = ModelBuffers(modules)
        self._units = [[parameter for _, parameter in unit.parameters] for unit in units]
        self._names = [(name, p) for unit in units for name, p in unit.parameters]
        self._gate = CommitGate((p for _, p in self._names), activity, is_over)
        self._number_of = {id(unit): number for number, unit in enumerate(units)}
        self._group: Any = None
        self._share: StepShare | WeighedShare | None = None
        self._control: Sequence[float] = ()
        self._sums = [self._none(unit) for unit in self._units]
        self._fresh = [self._none(unit) for unit in self._units]
        self._stepped = [False] * len(units)
        self._number: int | None = None
        self._weight, self._factor = 0.0, 1.0
        self._is_on = self._is_last = self._is_void = self._has_reported = False
        self._undo = around_backward(self._around_backward, scale=self._scale)
        activity.is_sharded = True

    @staticmethod
    def _none(parameters: Sequence[nn.Parameter]) -> Gradients:
        return [None] * len(parameters)

    # ------------------------------------------------------------------------- groups

    def attach(self, group: Any) -> None:
        """Be in a group; None for none."""
        self.abandon()
        if self._is_on:
            self._forget_fresh()
        self.release_gradients()
        self.broken, self._group = None, group
        others = group if group is not None and group.size() > 1 else None
        self._buffers.attach(others)
        self._gate.attach(others)

    def release_gradients(self) -> None:
        """No step is under way: leave all gradients alone."""
        self._buffers.end_step()
        self._is_on = self._is_void = False

    def close(self) -> None:
        """Leave backward as it was."""
        self.release_gradients()
        self._undo()
        self._activity.is_sharded = False

    # ------------------------------------------------------------------------- a step

    def begin_step(self, share: StepShare | WeighedShare, control: Sequence[float] = ()) -> None:
        """Forget whatever step was before, and begin one; see `Reducer.begin_step`."""
        self._share, self._control, self.rows = share, control, []
        self._sums = [self._none(unit) for unit in self._units]
        self._is_on, self._is_void, self._number, self._has_reported = True, False, None, False
        self._forget_fresh()
        self._buffers.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        """End the micro-batch before, and begin this one."""
        share = self._the_share()
        weight = share.weight(number) or 0.0
        self._begin(number, weight * share.partition.world_size / share.partition.num_micro_batches)
        self._is_last = number == share.held[1] - 1

    def begin_padding(self) -> None:
        """Begin a micro-batch that does not count; it comes before those that do."""
        self._begin(None, 0.0)
        self._is_last = False

    def _begin(self, number: int | None, weight: float) -> None:
        self._end_micro_batch()
        self._number, self._weight = number, weight
        self._stepped = [False] * len(self._stepped)
        self._forget_fresh()
        self._buffers.restore()

    def abandon(self) -> None:
        """The rest of this iteration is void: gradients count for nothing, buffers are put back."""
        if self._is_on:
            self._is_void, self._number = True, None
            self._buffers.restore(is_void=True)
            # A loop may read `p.grad` without asking whether it is there.
            self._show_fresh(torch.Tensor.detach)

    def unit_stepped(self, unit: OptimizerUnit) -> None:
        """From here on this micro-batch's gradients of this unit are left where they are."""
        self._stepped[self._number_of[id(unit)]] = True

    def unit_zeroed(self, unit: OptimizerUnit) -> None:
        """This micro-batch's gradients so far do not count; nothing if the unit has stepped."""
        number = self._number_of[id(unit)]
        if not self._stepped[number]:
            self._fresh[number] = self._none(self._units[number])

    def parameters_zeroed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do the same for some parameters of any units."""
        zeroed = {id(parameter) for parameter in parameters}
        for number, fresh in enumerate(self._fresh):
            for place, parameter in enumerate(self._units[number]):
                if id(parameter) in zeroed and not self._stepped[number]:
                    fresh[place] = None

    def data_set(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Weights are not watched here: modules replace them while they are gathered."""

    def settle(self, unit: OptimizerUnit) -> bool:
        """Have the gradient of the whole step in `p.grad`; called on the last micro-batch.

        Returns:
            Whether it is there; not if the group broke.
        """
        number = self._number_of[id(unit)]
        self._exchange_row()
        if self._is_void or self.broken is not None:
            return False
        if all(parameter.grad is None for parameter in self._units[number]):
            self._show(number)  # Zeroed since backward, or backward has not reached it.
        return True

    def settle_buffers(self, is_good: Callable[[], bool] = lambda: True) -> bool:
        """Average what the micro-batches made of buffers; see `Reducer.settle_buffers`."""
        share = self._the_share()
        if self._is_void or self.broken is not None or self._number is None:
            return False
        self._buffers.end_micro_batch(self._number, share.counts[self._number])
        own = self._gate.record()
        self._guarded(lambda: self._buffers.settle(share.partition, share.samples))
        self._guarded(lambda: self._gate.wait_all(own), waits=False)
        return self.broken is None and is_good()

    def before_step(self) -> AbstractContextManager[None]:
        """Have the buffers as at the beginning of the step, for a block."""
        return self._buffers.before_step()

    def keep_buffers(self) -> None:
        """Commit the buffers as they are now; until then leaving the step puts them back."""
        self._buffers.keep()

    # ------------------------------------------------------------------------- backward

    def _scale(self) -> float:
        """Return what the gradient of the loss is multiplied by in this backward call."""
        return self._weight if self._is_on and not self._is_void else 1.0

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Surround each outermost backward call of this process."""
        if not self._is_on:
            yield
            return
        for number, parameters in enumerate(self._units):
            for parameter in parameters if not self._stepped[number] else ():
                parameter.grad = None  # What was shown, and is kept.
        yield
        self._activity.beats += 1
        if self._is_void:
            return
        for number in range(len(self._units)):
            if not self._stepped[number]:
                self._take(number)
        if self._is_last:
            self._exchange_row()
            for number in range(len(self._units)):
                if not self._stepped[number] and not self._is_void:
                    self._show(number)
        else:
            self._show_fresh(torch.Tensor.clone)

    def _show_fresh(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let `p.grad`, where there is none, be what this micro-batch has given so far."""
        for parameters, fresh in zip(self._units, self._fresh, strict=True):
            for parameter, gradient in zip(parameters, fresh, strict=True):
                if parameter.grad is None and gradient is not None:
                    parameter.grad = copied(gradient)

    def _take(self, number: int) -> None:
        """Put aside what backward has left in `p.grad`."""
        fresh = self._fresh[number]
        for place, parameter in enumerate(self._units[number]):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                before = fresh[place]
                fresh[place] = gradient if before is None else before + gradient

    def _exchange_row(self) -> None:
        """Exchange the step's row, once; what is due with it is then known to all."""
        if self._has_reported or self._is_void:
            return
        row = [self._buffers.note_changes(), *self._the_share().own_row(), *self._control]
        self._guarded(lambda: self.rows.extend(send_metadata(self._group, row)))
        # Among all that the device was given are the model's own collectives: which rank waits for
        # which is not known, and all of it counts as waiting.
        self._guarded(self._gate.wait_exchanged, waits=False)
        if self.broken is not None:
            return
        self._has_reported = True
        if any(one[0] != self.rows[0][0] for one in self.rows):
            raise UsageError(
                "forward changes buffers of the model on some ranks and not on others, so that "
                "they cannot be averaged; let it change the same ones in every micro-batch"
            )
        share = self._the_share()
        if isinstance(share, WeighedShare):
            divisor = share.take_rows([one[1 : 1 + SHARE_NUMBERS] for one in self.rows])
        else:
            divisor = share.divisor
        # 1, but for a step with fewer samples than others.
        self._factor = share.partition.num_micro_batches / divisor
        self.rows = [one[1 + SHARE_NUMBERS :] for one in self.rows]

    def _show(self, number: int) -> None:
        """Let `p.grad` be the step's gradient; None where no micro-batch has given one."""
        factor = self._factor
        for place, parameter in enumerate(self._units[number]):
            total, more = self._sums[number][place], self._fresh[number][place]
            if total is None or more is None:
                total = more if total is None else total
            else:
                total = total + more
            parameter.grad = total if total is None or factor == 1.0 else total * factor

    # ------------------------------------------------------------------------- the rest

    def _end_micro_batch(self) -> None:
        """All backward calls of the micro-batch are through; it was not our last one."""
        for sums, fresh in zip(self._sums, self._fresh, strict=True):
            for place, gradient in enumerate(fresh):
                before = sums[place]
                if gradient is not None:
                    sums[place] = gradient if before is None else before + gradient
        if self._number is not None:
            count = self._the_share().counts[self._number]
            self._buffers.end_micro_batch(self._number, count)

    def _forget_fresh(self) -> None:
        self._fresh = [self._none(unit) for unit in self._units]
        for _, parameter in self._names:
            parameter.grad = None

    def _guarded(self, exchange: Callable[[], None], *, waits: bool = True) -> None:
        """Do what needs the other ranks; a group that breaks makes the step void."""
        if self.broken is not None:
            return
        try:
            with self._activity.waiting() if waits else nullcontext():
                exchange()
        except RuntimeError as error:
            self.broken = error
            self.abandon()

    def _the_share(self) -> StepShare | WeighedShare:
        check(self._share is not None, "no step has begun")
        return self._share  # type: ignore[return-value]


class Padding:
    """Micro-batches of weight zero, in which a rank with fewer goes along with the others."""

    def __init__(self, reducer: ShardedReducer | None = None) -> None:
        """Owe none.

        Args:
            reducer: notified of each; None if ranks need not make equally many backward calls.
        """
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

    Raises:
        UsageError: some models are sharded and others are not.
    """
    if not state.is_sharded:
        reducer = Reducer(
            units,
            state.models,
            still=state.named_weights(),
            consistency=consistency,
            activity=activity,
            is_over=is_over,
        )
        return reducer, Padding()
    sharded = ShardedReducer(units, state.models, activity=activity, is_over=is_over)
    return sharded, Padding(sharded)


def recovery_of(state: TrainState, chosen: str) -> str:
    """Return the mode of recovery, as in `FailureConfig`, that these objects allow.

    Raises:
        UsageError: the user insists on another one.
    """
    if not state.is_sharded or chosen in ("reenter", "restart"):
        return chosen
    if chosen == "in_place":
        raise UsageError(
            "FailureConfig(recovery='in_place') with a sharded model: no other rank has rows of "
            "a member that is lost, so the train function must be called again; use 'auto'"
        )
    return "reenter"

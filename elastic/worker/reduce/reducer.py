"""The gradient engine: takes gradients as backward makes them, and adds them over all ranks.

Hooks on the parameters take gradients out of `p.grad`. On a rank's last micro-batch full buckets
are sent while backward continues; when it is over, `p.grad` is the gradient of the whole step, a
mean over its samples. Before, and in a step that is void, there is something in it as well, because
loops read it without asking (`p.grad.norm()`); what they make of that counts for nothing.

Rule: every rank does the same exchanges in the same order, whatever its gradients are. A group
that breaks leaves an error in `broken` and no exception: the step is void, and is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from elastic.core.policy.exchange_plan import BUCKET_BYTES, bucket_bytes_for
from elastic.errors import InvariantViolation, UsageError
from elastic.worker.base.activity import Activity
from elastic.worker.base.spans import span
from elastic.worker.group.accelerators import accelerator_of
from elastic.worker.group.member_links import links_of
from elastic.worker.group.shared_memory import OwnMemory
from elastic.worker.reduce.backward import around_backward
from elastic.worker.reduce.bucket_exchanges import BucketExchanges
from elastic.worker.reduce.buckets import Bucket, lay_out
from elastic.worker.reduce.commit_gate import CommitGate
from elastic.worker.reduce.grad_preview import expose_partial_grad, hide, is_shown, show_zeros
from elastic.worker.reduce.model_buffers import ModelBuffers
from elastic.worker.reduce.step_metadata import ROW, Divisor
from elastic.worker.reduce.step_share import SHARE_NUMBERS, StepShare, WeighedShare
from elastic.worker.reduce.tree_exchange import MicroBatchPartition
from elastic.worker.state.train_state import OptimizerUnit

__all__ = ["ROW", "OptimizerUnit", "Reducer", "StepShare"]

OWN = 2
"""Numbers of a row that are the reducer's: which buffers change, whether backward comes again."""


@dataclass(eq=False)
class _UnitStep:
    """How far the gradients of one unit are.

    Attributes:
        is_reduced: `p.grad` has what the whole step gives.
        has_stepped: in this micro-batch, whose gradients are left where they are since then.
        is_reached: by the backward call at hand.
    """

    unit: OptimizerUnit
    buckets: list[Bucket] = field(default_factory=list)
    is_reduced: bool = False
    has_stepped: bool = False
    is_reached: bool = False


@dataclass
class _Layout:
    """How the parameters are cut.

    Attributes:
        bucket_bytes: size of a bucket.
        slots: bucket of each parameter and its index there, by id.
    """

    bucket_bytes: int
    buckets: list[Bucket]
    slots: dict[int, tuple[Bucket, int]]
    hooks: list[Any]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass
class _GroupExchanges:
    """What the steps of one group have in common.

    Attributes:
        group: torch's; None for a group of one.
        made: by how the micro-batches are dealt.
        newest: of the newest step, None before the first.
        keeps_leaves: a backward call may add to what was sent. How many calls reach a unit in one
            micro-batch is learned in the first step.
    """

    group: Any = None
    made: dict[MicroBatchPartition, BucketExchanges] = field(default_factory=dict)
    newest: BucketExchanges | None = None
    keeps_leaves: bool = True


@dataclass
class _Step:
    """A step from its beginning until gradients are left alone again.

    Attributes:
        control: numbers that all ranks get to see.
        is_void: it counts for nothing.
        number: of the micro-batch at hand, None before the first.
        is_hidden: a backward call is under way, or has raised.
        stepped_by_others: ids of parameters that are shared with units that have stepped in it.
        waiting: buckets that are complete and not in turn.
    """

    share: StepShare | WeighedShare
    control: Sequence[float]
    exchanges: BucketExchanges
    is_void: bool = False
    number: int | None = None
    is_last: bool = False
    is_hidden: bool = False
    stepped_by_others: set[int] = field(default_factory=set)
    waiting: list[Bucket] = field(default_factory=list)

    def begin_micro_batch(self, number: int) -> None:
        """Be at this micro-batch, of which there is nothing yet."""
        self.number, self.is_last = number, number == self.share.held[1] - 1
        self.is_hidden = False
        self.stepped_by_others.clear()
        self.waiting.clear()

    def at(self) -> int:
        """Return the number of the micro-batch at hand."""
        if self.number is None:
            raise InvariantViolation("no micro-batch is at hand")
        return self.number

    @property
    def counts(self) -> bool:
        """Return whether a micro-batch is at hand, and not void."""
        return self.number is not None and not self.is_void


class Reducer:
    """Reduces the gradients of one train function's parameters.

    Attributes:
        broken: why this step cannot be completed, None while it can.
        rows: what each rank gave to `begin_step`, by rank; valid once a unit has settled.
        bytes_sent: gradients sent to other ranks in this group.
    """

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        modules: Sequence[nn.Module] = (),
        *,
        consistency: str = "bitwise",
        bucket_bytes: int = BUCKET_BYTES,
        activity: Activity | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Put hooks on the parameters; nothing else changes until a step begins.

        Args:
            units: what each optimizer steps.
            modules: whose buffers (BatchNorm) are averaged over a step.
            consistency: "bitwise", or "samples" for an order of addition that is torch's.
            bucket_bytes: size of the pieces that are sent.
            activity: notified when we wait for others.
            is_over: returns whether the group is not whole any more; see `CommitGate`.
        """
        self.broken: BaseException | None = None
        self.rows: list[tuple[float, ...]] = []
        self._is_bitwise = consistency == "bitwise"
        self._activity = activity or Activity()
        self._buffers = ModelBuffers(modules)
        parameters = (parameter for unit in units for _, parameter in unit.parameters)
        self._gate = CommitGate(parameters, self._activity, is_over)
        self._units = [_UnitStep(unit) for unit in units]
        self._bucket_bytes = bucket_bytes
        self._layout = self._lay_out(bucket_bytes)
        self._group = _GroupExchanges()
        self._step: _Step | None = None
        self._unreaped: list[Any] = []
        self._calls_several = False
        self._undo = around_backward(self._around_backward)

    def _lay_out(self, bucket_bytes: int) -> _Layout:
        """Cut the parameters into buckets of this size, and put hooks on them."""
        buckets = lay_out([one.unit for one in self._units], bucket_bytes)
        for number, unit in enumerate(self._units):
            unit.buckets = [bucket for bucket in buckets if bucket.unit == number]
        slots, hooks = {}, []
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                slots[id(parameter)] = bucket, index
                hook, wants_some = self._hook(bucket, index), parameter.requires_grad
                parameter.requires_grad_(True)  # Torch takes no hook on one that is frozen.
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(wants_some)
        return _Layout(bucket_bytes, buckets, slots, hooks)

    # ------------------------------------------------------------------------- groups

    def attach(self, group: Any) -> None:
        """Continue in another group; None for none. What was under way in the old is forgotten."""
        if self._step is not None:
            self._make_void(self._step)
            self._drop_gradients()
        if self._group.made:
            # The old group may write to their memory until its works are gone: not used again.
            self._unreaped = [self._group.made, [one.leaf for one in self._layout.buckets]]
            for bucket in self._layout.buckets:
                bucket.pool, bucket.leaf = [], None
        self._group = _GroupExchanges(group if group is not None and group.size() > 1 else None)
        size = self._group.group.size() if self._group.group is not None else 1
        wanted = bucket_bytes_for(size)
        bucket_bytes = wanted if wanted > BUCKET_BYTES else self._bucket_bytes
        if bucket_bytes != self._layout.bucket_bytes:
            self._layout.remove()
            self._layout = self._lay_out(bucket_bytes)
        self._take_memory()
        self._buffers.attach(self._group.group)
        self._gate.attach(self._group.group)
        self.release_gradients()
        self.broken = None

    def _take_memory(self) -> None:
        """Let others of our node read what we add up, if there are any."""
        group = self._group.group
        is_read = group is not None and bool(links_of(group).memory)
        memory = OwnMemory() if is_read else None
        for bucket in self._layout.buckets:
            if is_read or bucket.memory is not None:
                bucket.pool, bucket.leaf = [], None
            bucket.memory = memory if accelerator_of(bucket.device) is None else None

    def release_gradients(self) -> None:
        """No step is under way: leave all gradients alone."""
        self._buffers.end_step()
        self._step = None

    def close(self) -> None:
        self.release_gradients()
        for exchanges in self._group.made.values():
            exchanges.close()
        self._buffers.close()
        self._layout.remove()
        self._undo()

    @property
    def bytes_sent(self) -> int:
        return sum(exchanges.bytes_sent for exchanges in self._group.made.values())

    # ------------------------------------------------------------------------- a step

    def begin_step(self, share: StepShare | WeighedShare, control: Sequence[float] = ()) -> None:
        """Forget whatever step was before, and begin one.

        `control` are at most `ROW` - `OWN` - `SHARE_NUMBERS` numbers, which all ranks get to see in
        `rows`.
        """
        group, was_void = self._group, self._step is not None and self._step.is_void
        if group.newest is None or share.partition != group.newest.partition:
            group.newest = self._exchanges_of(share.partition)
        elif not was_void:
            group.keeps_leaves = self._calls_several
        group.newest.begin_step()
        self.rows = []
        self._step = _Step(share, control, group.newest)
        for unit in self._units:
            unit.is_reduced = False
        self._buffers.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        """End the micro-batch before, and begin this one."""
        step = self._the_step()
        self._end_micro_batch(step)
        step.begin_micro_batch(number)
        for unit in self._units:
            unit.has_stepped = False
        for bucket in self._layout.buckets:
            bucket.begin_micro_batch()
            bucket.is_sent = False
            for parameter in bucket.parameters:
                # Of an iteration before: a loop that zeroes them in place, or never, gets the
                # sums of one that sets them to None.
                parameter.grad = None
            if bucket.leaf is None:
                bucket.leaf = bucket.flat()
        self._buffers.restore()

    def abandon(self) -> None:
        """The rest of this iteration is void: gradients count for nothing, buffers are put back."""
        if self._step is not None:
            self._make_void(self._step)
            show_zeros(self._layout.buckets)

    def _make_void(self, step: _Step) -> None:
        step.is_void = True
        self._buffers.restore(is_void=True)

    def unit_stepped(self, unit: OptimizerUnit) -> None:
        """From here on this micro-batch's gradients of this unit are left where they are."""
        step, own = self._the_step(), self._own(unit)
        self._take_assigned(step, own)
        own.has_stepped = True
        step.stepped_by_others.update(id(parameter) for parameter in unit.shared)

    def unit_zeroed(self, unit: OptimizerUnit) -> None:
        """The gradients of this micro-batch so far do not count; nothing if the unit has stepped.

        A plain loop drops what another loss has left in them, such as a GAN's judge before its own.
        """
        step, own = self._step, self._own(unit)
        if step is None or not step.counts or own.has_stepped:
            return
        if step.stepped_by_others:
            self.parameters_zeroed([parameter for _, parameter in unit.parameters])
            return
        for bucket in own.buckets:
            bucket.begin_micro_batch()

    def parameters_zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do the same for some parameters of any units; to walk through a model's takes long."""
        step = self._step
        if step is None or not step.counts or all(one.has_stepped for one in self._units):
            return
        for parameter in parameters:
            bucket, index = self._layout.slots.get(id(parameter), (None, 0))
            if bucket is None or self._units[bucket.unit].has_stepped:
                continue
            if id(parameter) not in step.stepped_by_others:
                bucket.forget(index)

    def settle(self, unit: OptimizerUnit) -> bool:
        """Have the step's gradient in `p.grad`, once all is computed; False if the group broke."""
        step, own = self._the_step(), self._own(unit)
        if not step.is_void and not own.is_reduced:
            self._take_assigned(step, own)
            self._reduce(step, [own])
        return not step.is_void and self.broken is None

    def settle_buffers(self, is_good: Callable[[], bool] = lambda: True) -> bool:
        """Average what micro-batches made of the modules' buffers; return whether to commit.

        `is_good` is asked when that is done; if not, the step is void, and they are put back.
        """
        step = self._the_step()
        if not step.counts or self.broken is not None:
            return False
        share = step.share
        self._buffers.end_micro_batch(step.at(), share.counts[step.at()])
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

    def _hook(self, bucket: Bucket, index: int) -> Callable[[nn.Parameter], None]:
        """Return what is called when backward has finished a parameter's gradient."""
        unit, touched = self._units[bucket.unit], bucket.touched

        def reached(parameter: nn.Parameter) -> None:
            step = self._step
            if step is None or unit.has_stepped:
                return
            if parameter.grad is not None and parameter.grad.requires_grad:
                raise UsageError(
                    f"backward(create_graph=True) gave parameter {bucket.names[index]} a gradient "
                    f"with a graph, which cannot be kept, because gradients are added up elsewhere:"
                    f" compute what needs it by torch.autograd.grad(loss, parameters, "
                    f"create_graph=True)"
                )
            if bucket.is_sent and not (unit.is_reduced or step.is_void):
                raise UsageError(
                    f"backward gave parameter {bucket.names[index]} a gradient once more, after it "
                    f"was complete and sent: reentrant checkpointing does that to modules that are "
                    f"used several times; pass use_reentrant=False to torch.utils.checkpoint"
                )
            touched[index] = None
            unit.is_reached = True
            if len(touched) == len(bucket.parameters) and step.is_last:
                self._send_early(step, bucket)

        return reached

    def _send_early(self, step: _Step, bucket: Bucket) -> None:
        """Send a complete bucket off; the rest of backward continues."""
        if step.is_void or self._units[bucket.unit].is_reduced or bucket.is_sent:
            return
        if not self._is_in_turn(step, bucket):
            step.waiting.append(bucket)
            return
        self._send(step, bucket)
        # Those that were complete before their turn.
        for other in sorted(step.waiting, key=lambda one: one.number):
            if step.is_void or not self._is_in_turn(step, other):
                break
            step.waiting.remove(other)
            self._send(step, other)

    def _send(self, step: _Step, bucket: Bucket) -> None:
        bucket.move_gradients(bucket.the_leaf())
        self._start(step, bucket)

    def _is_in_turn(self, step: _Step, bucket: Bucket) -> bool:
        """Return whether this bucket may be sent before those that backward still works on.

        Where messages have no tags their order matches them, and ranks whose forward took
        other branches complete their buckets in other orders.
        """
        if step.exchanges.of[bucket.number].has_tags:
            return True
        before = self._layout.buckets[: bucket.number]
        return all(one.is_sent or self._units[one.unit].is_reduced for one in before)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Surround each outermost backward call of this process."""
        step = self._step
        if step is None:
            yield
            return
        if not step.is_hidden:  # Or a backward call has raised.
            self._forget_dropped(step)
        step.is_hidden = True
        if not (step.is_void or step.is_last):
            hide(self._not_stepped())
        again = [one for one in self._units if one.is_reduced and not one.has_stepped]
        for unit in again:
            # A second call adds to the leaf, not to the total; that is reduced once more.
            for bucket in unit.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
        for unit in self._units:
            unit.is_reached = False
        yield
        self._activity.beats += 1
        step.is_hidden = False
        if step.is_void:
            show_zeros(self._layout.buckets)
        else:
            self._after_backward(step, again)

    def _forget_dropped(self, step: _Step) -> None:
        """Between two backward calls a loop has set gradients to None: they do not count."""
        if not step.counts:
            return
        for bucket in self._not_stepped():
            if any(bucket.used):
                for index, parameter in enumerate(bucket.parameters):
                    if bucket.used[index] and parameter.grad is None:
                        bucket.forget(index)

    def _after_backward(self, step: _Step, again: Sequence[_UnitStep]) -> None:
        calls_again = any(unit.is_reached for unit in again)
        if calls_again and not self._group.keeps_leaves:
            raise UsageError(
                "an iteration calls backward() more often than those before it, after its "
                "gradients were complete: call it equally often in every iteration"
            )
        step.waiting.clear()
        for bucket in self._layout.buckets:
            if bucket.touched:
                bucket.move_gradients(bucket.the_leaf())
        if not step.is_last:
            for bucket in self._not_stepped():
                self._show_part(step, bucket)
            return
        self._calls_several = self._calls_several or calls_again
        self._reduce(step, [one for one in self._units if one.is_reached and not one.has_stepped])
        for unit in again:
            if not unit.is_reached and self.broken is None:
                self._show_totals(step, unit)

    def _show_part(self, step: _Step, bucket: Bucket) -> None:
        """Let loops read what this micro-batch has given so far."""
        # The last step's total is not needed any more.
        idle = step.exchanges.of[bucket.number].total
        expose_partial_grad(bucket, bucket.the_leaf(), bucket.view(idle))

    def _start(self, step: _Step, bucket: Bucket) -> None:
        """Let the last micro-batch be part of what we have added up, and send that."""
        number, leaf = step.at(), bucket.the_leaf()
        sums, weight = step.exchanges.sums[bucket.number], step.share.weight(number)
        if self._group.keeps_leaves:
            copy = bucket.flat()
            copy.tensor.copy_(leaf.tensor)
            bucket.complete(copy, weight=weight)
            sums.put_tentative(number, copy)
        else:
            bucket.complete(leaf, weight=weight)
            sums.put(number, leaf)
            bucket.leaf = None
        bucket.is_sent = True
        self._guarded(lambda: self._begin_exchange(step, bucket), waits=False)

    def _begin_exchange(self, step: _Step, bucket: Bucket) -> None:
        # By now forward is through, and we know which buffers it changes.
        own = [self._buffers.note_changes(), float(self._calls_several)]
        row = [*own, *step.share.own_row(), *step.control]
        divisor = step.share.divisor if isinstance(step.share, StepShare) else None
        step.exchanges.start(bucket.number, row, divisor)

    def _reduce(self, step: _Step, units: Sequence[_UnitStep]) -> None:
        """Exchange what these units still have to, and put the totals into `p.grad`."""
        buckets = [bucket for unit in units for bucket in unit.buckets]
        for unit in units:
            for bucket in unit.buckets:
                if unit.is_reduced or not bucket.is_sent:
                    self._start(step, bucket)
        own = self._gate.record()
        with span("exchange"):
            self._guarded(lambda: self._finish(step, buckets))
            self._guarded(lambda: self._gate.wait_exchanged(own), waits=False)
        if self.broken is not None:
            return
        for unit in units:
            unit.is_reduced = True
            self._show_totals(step, unit)

    def _finish(self, step: _Step, buckets: Sequence[Bucket]) -> None:
        share = step.share
        # Known before, or sent in the rows.
        divisor = share.divisor if isinstance(share, StepShare) else _divisor_of(share)
        rows = step.exchanges.finish([b.number for b in buckets], divisor=divisor)
        if any(row[0] != rows[0][0] for row in rows):
            raise UsageError(
                "forward changes buffers of the model on some ranks and not on others, so that "
                "they cannot be averaged; let it change the same ones in every micro-batch"
            )
        # One that has just come may see for the first time what others have seen long ago.
        self._calls_several = self._calls_several or any(row[1] for row in rows)
        self.rows = [row[OWN + SHARE_NUMBERS :] for row in rows]

    def _show_totals(self, step: _Step, unit: _UnitStep) -> None:
        """Let `p.grad` be the step's gradient; None where no micro-batch has given one."""
        # Of a micro-batch without samples nothing counts, also not what it has used.
        counts = step.share.weight(step.at()) is not None
        for bucket in unit.buckets:
            total = bucket.view(step.exchanges.of[bucket.number].total)
            seen = None if counts and all(bucket.used) else (total.flags != 0).tolist()
            for index, parameter in enumerate(bucket.parameters):
                parameter.grad = total.views[index] if seen is None or seen[index] else None

    # ------------------------------------------------------------------------- the rest

    def _end_micro_batch(self, step: _Step) -> None:
        """All backward calls of the micro-batch are through; it was not our last one."""
        if not step.counts:
            return
        number = step.at()
        for bucket in self._layout.buckets:
            leaf = bucket.the_leaf()
            bucket.complete(leaf, weight=step.share.weight(number))
            step.exchanges.sums[bucket.number].put(number, leaf)
            bucket.leaf = None
        self._buffers.end_micro_batch(number, step.share.counts[number])

    def _exchanges_of(self, partition: MicroBatchPartition) -> BucketExchanges:
        """Return what a step needs in this group; made once for each partition."""
        made = self._group.made
        if partition not in made:
            made[partition] = BucketExchanges(
                self._layout.buckets, partition, self._group.group, is_bitwise=self._is_bitwise
            )
        return made[partition]

    def _take_assigned(self, step: _Step, unit: _UnitStep) -> None:
        """Take what a loop has put into `p.grad` without backward, as from `autograd.grad`."""
        if not step.counts or unit.has_stepped or unit.is_reduced:
            return  # Of the whole step, or of nothing that is done.
        for bucket in unit.buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None and not is_shown(bucket, index):
                    bucket.touched[index] = None
            if bucket.touched:
                bucket.move_gradients(bucket.the_leaf())
                if not step.is_last:
                    self._show_part(step, bucket)

    def _not_stepped(self) -> list[Bucket]:
        """Return the buckets of units that have not stepped in this micro-batch."""
        return [
            bucket for bucket in self._layout.buckets if not self._units[bucket.unit].has_stepped
        ]

    def _drop_gradients(self) -> None:
        for bucket in self._layout.buckets:
            bucket.touched.clear()
            for parameter in bucket.parameters:
                parameter.grad = None

    def _guarded(self, exchange: Callable[[], None], *, waits: bool = True) -> None:
        """Do what needs the other ranks; a group that breaks makes the step void."""
        if self.broken is not None:
            return
        try:
            if waits:
                with self._activity.waiting():
                    exchange()
            else:
                exchange()
        except RuntimeError as error:
            self.broken = error
            self.abandon()

    def _own(self, unit: OptimizerUnit) -> _UnitStep:
        return next(one for one in self._units if one.unit is unit)

    def _the_step(self) -> _Step:
        if self._step is None:
            raise InvariantViolation("no step has begun")
        return self._step


def _divisor_of(share: WeighedShare) -> Divisor:
    return lambda rows: share.take_rows([row[OWN : OWN + SHARE_NUMBERS] for row in rows])

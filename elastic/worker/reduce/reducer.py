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
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from elastic.core.policy.exchange_plan import bucket_bytes_for
from elastic.errors import InvariantViolation, UsageError, check
from elastic.worker.base.activity import Activity
from elastic.worker.group.accelerators import accelerator_of
from elastic.worker.group.member_links import links_of
from elastic.worker.group.shared_memory import OwnMemory
from elastic.worker.reduce.backward import around_backward
from elastic.worker.reduce.bucket_exchanges import BucketExchanges
from elastic.worker.reduce.buckets import BUCKET_BYTES, Bucket, FlatTensor, lay_out
from elastic.worker.reduce.commit_gate import CommitGate
from elastic.worker.reduce.grad_preview import expose_partial_grad, hide, is_shown, show_zeros
from elastic.worker.reduce.model_buffers import ModelBuffers
from elastic.worker.reduce.step_metadata import ROW, Divisor
from elastic.worker.reduce.step_share import SHARE_NUMBERS, StepShare, WeighedShare
from elastic.worker.reduce.still_weights import StillWeights
from elastic.worker.reduce.tree_exchange import MicroBatchPartition
from elastic.worker.state.train_state import OptimizerUnit

__all__ = ["ROW", "OptimizerUnit", "Reducer", "StepShare"]

OWN = 2
"""Numbers of a row that are the reducer's: which buffers change, whether backward comes again."""


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
        still: Iterable[tuple[str, nn.Parameter]] = (),
        consistency: str = "bitwise",
        bucket_bytes: int = BUCKET_BYTES,
        activity: Activity | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Put hooks on the parameters; nothing else changes until a step begins.

        Args:
            units: what each optimizer steps.
            modules: whose buffers (BatchNorm) are averaged over a step.
            still: weights that nothing may change while a step is computed, with their names.
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
        self._still = StillWeights(still)
        parameters = (parameter for unit in units for _, parameter in unit.parameters)
        self._gate = CommitGate(parameters, self._activity, is_over)
        self._number_of = {id(unit): number for number, unit in enumerate(units)}
        self._units, self._bucket_bytes = units, bucket_bytes
        self._group: Any = None
        self._share: StepShare | WeighedShare | None = None
        self._control: Sequence[float] = ()
        # Of this group, by how the micro-batches are dealt.
        self._made: dict[MicroBatchPartition, BucketExchanges] = {}
        self._exchanges: BucketExchanges | None = None
        self._hooks: list[Any] = []
        self._lay_out(bucket_bytes)
        self._waiting: list[Bucket] = []
        self._unreaped: list[Any] = []
        # How many backward calls reach a unit in one micro-batch is learned in the first step.
        self._keeps_leaves = True
        self._calls_several = False
        self._number: int | None = None
        self._is_on = self._is_last = self._is_void = self._is_hidden = False
        self._reached = [False] * len(units)
        self._stepped = [False] * len(units)
        self._stepped_by_others: set[int] = set()
        self._reduced = [False] * len(units)
        self._undo = around_backward(self._around_backward)

    def _lay_out(self, bucket_bytes: int) -> None:
        """Cut the parameters into buckets of this size, and put hooks on them."""
        self._laid_out = bucket_bytes
        self._buckets = lay_out(self._units, bucket_bytes)
        self._of_unit = [
            [b for b in self._buckets if b.unit == number] for number in range(len(self._units))
        ]
        self._place_of = {
            id(parameter): (bucket, place)
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        }
        self._leaf_buffers: list[FlatTensor | None] = [None] * len(self._buckets)
        self._sent = [False] * len(self._buckets)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    # ------------------------------------------------------------------------- groups

    def attach(self, group: Any) -> None:
        """Continue in another group; None for none. What was under way in the old is forgotten."""
        if self._is_on:
            self._make_void()
            self._drop_gradients()
        if self._made:
            # The old group may write to their memory until its works are gone: not used again.
            self._unreaped = [self._made, self._leaf_buffers]
            for bucket in self._buckets:
                bucket.pool = []
            self._leaf_buffers = [None] * len(self._buckets)
        self._made, self._exchanges, self._share = {}, None, None
        self._group = group if group is not None and group.size() > 1 else None
        wanted = bucket_bytes_for(self._group.size() if self._group is not None else 1)
        bucket_bytes = wanted if wanted > BUCKET_BYTES else self._bucket_bytes
        if bucket_bytes != self._laid_out:
            self._lay_out(bucket_bytes)
        self._take_memory()
        self._buffers.attach(self._group)
        self._gate.attach(self._group)
        self._keeps_leaves = True
        self.release_gradients()
        self.broken = None

    def _take_memory(self) -> None:
        """Let others of our node read what we add up, if there are any."""
        is_read = self._group is not None and bool(links_of(self._group).memory)
        for bucket in self._buckets:
            if is_read or bucket.memory is not None:
                bucket.pool = []
                self._leaf_buffers[bucket.number] = None
        memory = OwnMemory() if is_read else None
        for bucket in self._buckets:
            bucket.memory = memory if accelerator_of(bucket.device) is None else None

    def release_gradients(self) -> None:
        """No step is under way: leave all gradients alone."""
        self._buffers.end_step()
        self._is_on = self._is_void = False

    def close(self) -> None:
        """Take the hooks off."""
        self.release_gradients()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._undo()

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of gradients that were sent in this group."""
        return sum(exchanges.bytes_sent for exchanges in self._made.values())

    # ------------------------------------------------------------------------- a step

    def begin_step(self, share: StepShare | WeighedShare, control: Sequence[float] = ()) -> None:
        """Forget whatever step was before, and begin one.

        Args:
            share: what we have to do in it.
            control: at most `ROW` - `OWN` - `SHARE_NUMBERS` numbers, which all ranks get to see
                in `rows`.
        """
        if self._exchanges is None or share.partition != self._exchanges.partition:
            self._exchanges = self._exchanges_of(share.partition)
        elif not self._is_void:
            self._keeps_leaves = self._calls_several
        self._exchanges.begin_step()
        self._share, self._control, self.rows = share, control, []
        self._is_on, self._is_void, self._number = True, False, None
        self._reduced = [False] * len(self._reduced)
        self._still.begin_step()
        self._buffers.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        """End the micro-batch before, and begin this one."""
        self._end_micro_batch()
        self._number = number
        self._is_last, self._is_hidden = number == self._the_share().held[1] - 1, False
        self._stepped = [False] * len(self._stepped)
        self._stepped_by_others.clear()
        self._sent = [False] * len(self._sent)
        self._waiting.clear()
        for bucket in self._buckets:
            bucket.begin_micro_batch()
            for parameter in bucket.parameters:
                # Of an iteration before: a loop that zeroes them in place, or never, gets the
                # sums of one that sets them to None.
                parameter.grad = None
            if self._leaf_buffers[bucket.number] is None:
                self._leaf_buffers[bucket.number] = bucket.flat()
        self._buffers.restore()

    def abandon(self) -> None:
        """The rest of this iteration is void: gradients count for nothing, buffers are put back."""
        if self._is_on:
            self._make_void()
            show_zeros(self._buckets)

    def _make_void(self) -> None:
        self._is_void, self._number = True, None
        self._buffers.restore(is_void=True)

    def unit_stepped(self, unit: OptimizerUnit) -> None:
        """From here on this micro-batch's gradients of this unit are left where they are."""
        number = self._number_of[id(unit)]
        self._take_assigned(number)
        self._stepped[number] = True
        self._stepped_by_others.update(id(parameter) for parameter in unit.shared)

    def unit_zeroed(self, unit: OptimizerUnit) -> None:
        """The gradients of this micro-batch so far do not count; nothing if the unit has stepped.

        A plain loop drops what another loss has left in them, such as a GAN's judge before its own.
        """
        number = self._number_of[id(unit)]
        if self._number is None or self._stepped[number]:
            return
        if self._stepped_by_others:
            self.parameters_zeroed([parameter for _, parameter in unit.parameters])
            return
        for bucket in self._of_unit[number]:
            bucket.begin_micro_batch()

    def parameters_zeroed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do the same for some parameters of any units."""
        if not self._is_on or self._number is None:
            return
        for parameter in parameters:
            bucket, place = self._place_of.get(id(parameter), (None, 0))
            if bucket is None or self._stepped[bucket.unit]:
                continue
            if id(parameter) not in self._stepped_by_others:
                bucket.forget(place)

    def data_set(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """A script sets the `.data` of a weight, which torch does not count as a change."""
        self._still.data_set(weight, value)

    def settle(self, unit: OptimizerUnit) -> bool:
        """Have the gradient of the whole step in `p.grad`; called on the last micro-batch.

        Returns:
            Whether it is there; not if the group broke.
        """
        number = self._number_of[id(unit)]
        if not self._is_void and not self._reduced[number]:
            self._take_assigned(number)
            self._reduce([number])
        return not self._is_void and self.broken is None

    def settle_buffers(self, is_good: Callable[[], bool] = lambda: True) -> bool:
        """Average what the micro-batches made of the modules' buffers.

        Args:
            is_good: asked when that is done; if not, the step is void, and they are put back.

        Returns:
            Whether the step is to be committed; not if the group broke.

        Raises:
            UsageError: something has changed weights since the step began.
        """
        share = self._the_share()
        if self._is_void or self.broken is not None or self._number is None:
            return False
        self._still.check()
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

    def _hook(self, bucket: Bucket, place: int) -> Callable[[nn.Parameter], None]:
        """Return what is called when backward has finished a parameter's gradient."""
        unit, touched = bucket.unit, bucket.touched

        def reached(_: nn.Parameter) -> None:
            if not self._is_on or self._stepped[unit]:
                return
            if self._sent[bucket.number] and not (self._reduced[unit] or self._is_void):
                raise UsageError(
                    f"backward gave parameter {bucket.names[place]} a gradient once more, after it "
                    f"was complete and sent: reentrant checkpointing does that to modules that are "
                    f"used several times; pass use_reentrant=False to torch.utils.checkpoint"
                )
            touched[place] = None
            self._reached[unit] = True
            if len(touched) == len(bucket.parameters) and self._is_last:
                self._send_early(bucket)

        return reached

    def _send_early(self, bucket: Bucket) -> None:
        """Send a complete bucket off; the rest of backward continues."""
        if self._is_void or self._reduced[bucket.unit] or self._sent[bucket.number]:
            return
        if not self._is_in_turn(bucket):
            self._waiting.append(bucket)
            return
        self._send(bucket)
        # Those that were complete before their turn.
        for other in sorted(self._waiting, key=lambda one: one.number):
            if self._is_void or not self._is_in_turn(other):
                break
            self._waiting.remove(other)
            self._send(other)

    def _send(self, bucket: Bucket) -> None:
        bucket.move_gradients(self._leaf(bucket))
        self._start(bucket)

    def _is_in_turn(self, bucket: Bucket) -> bool:
        """Return whether this bucket may be sent before those that backward still works on.

        Where messages have no tags their order matches them, and ranks whose forward took
        other branches complete their buckets in other orders.
        """
        if self._the_exchanges().of[bucket.number].has_tags:
            return True
        before = self._buckets[: bucket.number]
        return all(self._sent[one.number] or self._reduced[one.unit] for one in before)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Surround each outermost backward call of this process."""
        if not self._is_on:
            yield
            return
        if not self._is_hidden:  # Or a backward call has raised.
            self._forget_dropped()
        self._is_hidden = True
        if not (self._is_void or self._is_last):
            hide(self._not_stepped())
        again = [n for n, done in enumerate(self._reduced) if done and not self._stepped[n]]
        for number in again:
            # A second call adds to the leaf, not to the total; that is reduced once more.
            for bucket in self._of_unit[number]:
                for parameter in bucket.parameters:
                    parameter.grad = None
        self._reached = [False] * len(self._reached)
        yield
        self._activity.beats += 1
        self._is_hidden = False
        if self._is_void:
            show_zeros(self._buckets)
        else:
            self._after_backward(again)

    def _forget_dropped(self) -> None:
        """Between two backward calls a loop has set gradients to None: they do not count."""
        if self._is_void or self._number is None:
            return
        for bucket in self._not_stepped():
            if any(bucket.used):
                for place, parameter in enumerate(bucket.parameters):
                    if bucket.used[place] and parameter.grad is None:
                        bucket.forget(place)

    def _after_backward(self, again: list[int]) -> None:
        reached = [number for number, is_so in enumerate(self._reached) if is_so]
        if not self._keeps_leaves and any(number in reached for number in again):
            raise UsageError(
                "an iteration calls backward() more often than those before it, after its "
                "gradients were complete: call it equally often in every iteration"
            )
        self._waiting.clear()
        for bucket in self._buckets:
            if bucket.touched:
                bucket.move_gradients(self._leaf(bucket))
        if not self._is_last:
            for bucket in self._not_stepped():
                # The last step's total is not needed any more.
                idle = self._the_exchanges().of[bucket.number].total
                expose_partial_grad(bucket, self._leaf(bucket), bucket.view(idle))
            return
        self._calls_several = self._calls_several or any(n in reached for n in again)
        self._reduce([number for number in reached if not self._stepped[number]])
        for number in again:
            if number not in reached and self.broken is None:
                self._show_totals(number)

    def _start(self, bucket: Bucket) -> None:
        """Let the last micro-batch be part of what we have added up, and send that."""
        share, number = self._the_share(), self._number
        check(number is not None, "no micro-batch is at hand")
        leaf, sums = self._leaf(bucket), self._the_exchanges().sums[bucket.number]
        weight = share.weight(number or 0)
        if self._keeps_leaves:
            copy = bucket.flat()
            copy.tensor.copy_(leaf.tensor)
            bucket.complete(copy, weight=weight)
            sums.put_for_now(number or 0, copy)
        else:
            bucket.complete(leaf, weight=weight)
            sums.put(number or 0, leaf)
            self._leaf_buffers[bucket.number] = None
        self._sent[bucket.number] = True
        self._guarded(lambda: self._begin_exchange(bucket), waits=False)

    def _begin_exchange(self, bucket: Bucket) -> None:
        # By now forward is through, and we know which buffers it changes.
        own = [self._buffers.note_changes(), float(self._calls_several)]
        row = [*own, *self._the_share().own_row(), *self._control]
        share = self._the_share()
        divisor = share.divisor if isinstance(share, StepShare) else None
        self._the_exchanges().start(bucket.number, row, divisor)

    def _reduce(self, numbers: list[int]) -> None:
        """Exchange what these units still have to, and put the totals into `p.grad`."""
        buckets = [bucket for number in numbers for bucket in self._of_unit[number]]
        for bucket in buckets:
            if self._reduced[bucket.unit] or not self._sent[bucket.number]:
                self._start(bucket)
        own = self._gate.record()
        with record_function("elastic::exchange"):
            self._guarded(lambda: self._finish(buckets))
            self._guarded(lambda: self._gate.wait_exchanged(own), waits=False)
        if self.broken is not None:
            return
        for number in numbers:
            self._reduced[number] = True
            self._show_totals(number)

    def _finish(self, buckets: Sequence[Bucket]) -> None:
        share = self._the_share()
        # Known before, or sent in the rows.
        divisor = share.divisor if isinstance(share, StepShare) else _divisor_of(share)
        rows = self._the_exchanges().finish([b.number for b in buckets], divisor=divisor)
        if any(row[0] != rows[0][0] for row in rows):
            raise UsageError(
                "forward changes buffers of the model on some ranks and not on others, so that "
                "they cannot be averaged; let it change the same ones in every micro-batch"
            )
        # One that has just come may see for the first time what others have seen long ago.
        self._calls_several = self._calls_several or any(row[1] for row in rows)
        self.rows = [row[OWN + SHARE_NUMBERS :] for row in rows]

    def _show_totals(self, number: int) -> None:
        """Let `p.grad` be the step's gradient; None where no micro-batch has given one."""
        share = self._the_share()
        for bucket in self._of_unit[number]:
            total = bucket.view(self._the_exchanges().of[bucket.number].total)
            # Of a micro-batch without samples nothing counts, also not what it has used.
            counts = share.weight(self._number or 0) is not None
            seen = None if counts and all(bucket.used) else (total.flags != 0).tolist()
            for place, parameter in enumerate(bucket.parameters):
                parameter.grad = total.views[place] if seen is None or seen[place] else None

    # ------------------------------------------------------------------------- the rest

    def _end_micro_batch(self) -> None:
        """All backward calls of the micro-batch are through; it was not our last one."""
        number = self._number
        if number is None:
            return
        share = self._the_share()
        for bucket in self._buckets:
            leaf = self._leaf(bucket)
            bucket.complete(leaf, weight=share.weight(number))
            self._the_exchanges().sums[bucket.number].put(number, leaf)
            self._leaf_buffers[bucket.number] = None
        self._buffers.end_micro_batch(number, share.counts[number])

    def _exchanges_of(self, partition: MicroBatchPartition) -> BucketExchanges:
        """Return what a step needs in this group; made once for each partition."""
        if partition not in self._made:
            self._made[partition] = BucketExchanges(
                self._buckets, partition, self._group, is_bitwise=self._is_bitwise
            )
        return self._made[partition]

    def _take_assigned(self, number: int) -> None:
        """Take what a loop has put into `p.grad` without backward, as from `autograd.grad`."""
        if self._is_void or self._number is None or self._stepped[number] or self._reduced[number]:
            return  # Of the whole step, or of nothing that is done.
        for bucket in self._of_unit[number]:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None and not is_shown(bucket, place):
                    bucket.touched[place] = None
            if bucket.touched:
                bucket.move_gradients(self._leaf(bucket))
                if not self._is_last:
                    idle = self._the_exchanges().of[bucket.number].total
                    expose_partial_grad(bucket, self._leaf(bucket), bucket.view(idle))

    def _not_stepped(self) -> list[Bucket]:
        """Return the buckets of units that have not stepped in this micro-batch."""
        return [bucket for bucket in self._buckets if not self._stepped[bucket.unit]]

    def _drop_gradients(self) -> None:
        for bucket in self._buckets:
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

    def _leaf(self, bucket: Bucket) -> FlatTensor:
        """Return the buffer of the micro-batch at hand, open for more gradients."""
        leaf = self._leaf_buffers[bucket.number]
        if leaf is None:
            raise InvariantViolation(f"bucket {bucket.number} has no leaf")
        return leaf

    def _the_exchanges(self) -> BucketExchanges:
        if self._exchanges is None:
            raise InvariantViolation("no step has begun in this group")
        return self._exchanges

    def _the_share(self) -> StepShare | WeighedShare:
        if self._share is None:
            raise InvariantViolation("no step has begun")
        return self._share


def _divisor_of(share: WeighedShare) -> Divisor:
    return lambda rows: share.take_rows([row[OWN : OWN + SHARE_NUMBERS] for row in rows])

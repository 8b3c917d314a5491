"""One bucket's sums of subtrees, exchanged and added in the order of the tree.

One small loop carries out a plan (see `core.policy.exchange_plan`): for each round it sends, and
when all that the round receives is there, it adds. No rank waits within a round: exchanges of many
buckets are under way at once, and each gets further when its messages come, during backward too.

Ranks of one node whose buckets are in shared memory send only where they are, which means that they
are complete, and read each other's in place. What a bucket's memory held may be overwritten once
all of the node have reported that they are through with it, which their next message does.

Rule: any rank adds the same operands in the order of the tree, so that the bits are the same
for every number of ranks, and for every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.policy.exchange_plan import (
    MESSAGE_BYTES,
    ExchangePlan,
    ExchangeRound,
    PlannedMessage,
    tree_plan,
    whole_plan,
)
from elastic.core.policy.microbatch import Span, additions_over, all_parts
from elastic.worker.group.accelerators import accelerator_of, record, wait_done
from elastic.worker.group.member_links import FEW, links_of
from elastic.worker.group.shared_memory import OwnMemory, PeerMemory
from elastic.worker.reduce.step_metadata import ROW, Row, fill_row
from elastic.worker.reduce.transports import Message, Transport, transport_of

ONE_PHASE_BYTES = 256 << 10
"""While a rank sends no more than this, it sends the bucket whole to everyone: one message's time
counts for more than the bytes."""
HEAD = 3
"""Numbers before the places of sums in shared memory: their file, and the place of the total."""


@dataclass(frozen=True)
class MicroBatchPartition:
    """How the micro-batches of a step are dealt out over a group.

    Attributes:
        rank: ours.
        world_size: W.
        num_micro_batches: V.
    """

    rank: int
    world_size: int
    num_micro_batches: int

    @cached_property
    def parts(self) -> tuple[tuple[Span, ...], ...]:
        """Return the subtrees that each rank holds, by rank."""
        return all_parts(self.world_size, self.num_micro_batches)

    @cached_property
    def additions(self) -> tuple[tuple[Span, Span, Span], ...]:
        """Return (left, right, total) of each addition, in order."""
        every = tuple(part for parts in self.parts for part in parts)
        additions = additions_over(every, self.num_micro_batches)
        return tuple((one.left, one.right, one.total) for one in additions)

    @property
    def mine(self) -> tuple[Span, ...]:
        """Return the subtrees that we hold."""
        return self.parts[self.rank]


class _Stage:
    """One round of an exchange, with its memory.

    Attributes:
        round: what is done.
        gathers: it hands totals round.
        tag: of its messages.
        receives: messages that are waited for.
        missing: how many of them have not come.
        scratch: sums that are received, by subtree.
        positions: from ranks of our node, where their tensors are.
        spare: memory of additions whose operands must stay as they are.
    """

    def __init__(self, one: ExchangeRound, tag: int, *, gathers: bool) -> None:
        self.round = one
        self.tag = tag
        self.gathers = gathers
        self.receives: list[Message] = []
        self.missing = 0
        self.scratch: dict[Span, torch.Tensor] = {}
        self.positions: dict[int, torch.Tensor] = {}
        self.spare: dict[Span, torch.Tensor] = {}


class TreeExchange:
    """The exchange of one bucket within one group; used once per step, over and over.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        rows: what each rank gave to `start`, by rank, if `carries_rows`, from `wait_rows` on.
        carries_rows: the bucket is small, and everyone's row goes with it.
        bytes_sent: of sums, to other ranks, so far; what they read in place is not sent.
        has_tags: exchanges of different buckets may begin in another order on each rank.
    """

    def __init__(
        self,
        partition: MicroBatchPartition,
        like: torch.Tensor,
        group: Any,
        *,
        is_bitwise: bool = True,
        memory: OwnMemory | None = None,
    ) -> None:
        """Allocate what is received, and expect the first messages.

        Args:
            partition: who holds what.
            like: a flat tensor of the bucket's size, type and device.
            group: the process group; None for a group of one.
            is_bitwise: False to add what is ours first, whatever the tree is: fewer bytes.
            memory: all that is given to `start` is in it; None if others cannot read it in place.
        """
        self.total = torch.empty_like(like)
        self.rows: list[Row] = []
        self.carries_rows = False
        self.bytes_sent = 0
        self._is_bitwise = is_bitwise
        if not is_bitwise:
            partition = MicroBatchPartition(
                partition.rank, partition.world_size, partition.world_size
            )
        self._partition, self._memory = partition, memory
        self._size = like.numel()
        self._transport: Transport | None = None
        self._peers: dict[int, PeerMemory] = {}
        self._plan = ExchangePlan((), (), 0, self._size)
        tag = 0
        if group is not None:
            links = links_of(group)
            tag = links.next_tag()
            most = max(len(parts) for parts in partition.parts)
            is_small = most * like.nbytes * (partition.world_size - 1) <= ONE_PHASE_BYTES
            if is_small and partition.world_size <= FEW:
                self._plan = whole_plan(
                    partition.rank, partition.world_size, partition.num_micro_batches, self._size
                )
            else:
                grain = MESSAGE_BYTES // like.itemsize
                self._plan = tree_plan(
                    partition.rank, partition.num_micro_batches, links.shape, self._size, grain
                )
            self._transport = transport_of(group, like.device)
            self.carries_rows = self._transport.carries_rows and not self._plan.gather
            self._peers = links.memory if memory is not None else {}
        self.has_tags = self._transport is None or self._transport.has_tags
        self._row = torch.zeros(ROW, dtype=torch.float64)
        self._row_of: dict[int, torch.Tensor] = {partition.rank: self._row}
        self._keep_places(like)
        self._stages = [
            self._stage(one, tag + 2 * one.depth + gathers, like, gathers=bool(gathers))
            for gathers, rounds in enumerate((self._plan.reduce, self._plan.gather))
            for one in rounds
        ]
        # Where all of a node read each other's slices, they divide them as they copy them.
        self._copies_divide = bool(self._plan.gather) and all(
            self._reads_in_place(stage.round) for stage in self._stages
        )
        self._at = 0
        self._has_sent = False
        self._is_on = False
        self._divisor: float | None = None
        self._values: dict[Span, torch.Tensor] = {}
        self._first = 0
        self._added: torch.Tensor | None = None
        self._expect()

    def _keep_places(self, like: torch.Tensor) -> None:
        """Decide where the slice goes that we hand to our node, or to all."""
        self._land = self._shown = self.total
        self._land_first = 0
        self._lands: dict[int, torch.Tensor] = {}
        self._slice_of: dict[int, Span] = {}
        reduce = self._plan.reduce
        if reduce and self._reads_in_place(reduce[0]) and self._memory is not None:
            first, last = reduce[0].first, reduce[0].last
            self._slice_of = {
                one.rank: (one.first, one.last) for one in self._plan.gather[-1].receives
            }
            self._shown = self._memory.empty(max(1, last - first), like.dtype)[: last - first]
            self._land, self._land_first = self._shown, first
            # With nodes of different sizes, slices of larger groups need not lie within the node's.
            low, high = min(one.first for one in reduce), max(one.last for one in reduce)
            if (low, high) != (first, last):
                self._land, self._land_first = like.new_empty(high - low), low

    def _reads_in_place(self, one: ExchangeRound) -> bool:
        # A rank without a slice would not receive the others' places.
        has_slices = self._size >= self._partition.world_size
        return one.is_local and self._memory is not None and bool(self._peers) and has_slices

    def _stage(self, one: ExchangeRound, tag: int, like: torch.Tensor, *, gathers: bool) -> _Stage:
        stage = _Stage(one, tag, gathers=gathers)
        if self._reads_in_place(one):
            for move in one.receives:
                size = 1 if gathers else HEAD + len(move.parts)
                places = torch.zeros(size, dtype=torch.int64)
                stage.positions[move.rank] = places
                stage.receives.append((move.rank, tag, [places]))
        elif gathers:
            for move in one.receives:
                stage.receives.append((move.rank, tag, [self._landed(move.first, move.last)]))
        else:
            for move in one.receives:
                first, last = move.first - one.first, move.last - one.first
                into = []
                if self.carries_rows:
                    self._row_of[move.rank] = torch.zeros(ROW, dtype=torch.float64)
                    into.append(self._row_of[move.rank])
                for part in move.parts:
                    if part not in stage.scratch:
                        stage.scratch[part] = like.new_empty(one.last - one.first)
                    into.append(stage.scratch[part][first:last])
                stage.receives.append((move.rank, tag, into))
        return stage

    def _node_slice(self) -> Span:
        """Return the elements that we hand to our node."""
        return self._plan.reduce[0].first, self._plan.reduce[0].last

    def _landed(self, first: int, last: int) -> torch.Tensor:
        return self._land[first - self._land_first : last - self._land_first]

    def _expect(self) -> None:
        """Let the messages of the next step come whenever they do."""
        transport = self._transport
        if transport is None:
            return
        for stage in self._stages:
            stage.missing = len(stage.receives)
            transport.expect(stage.receives, self._noting(stage))

    def _noting(self, stage: _Stage) -> Callable[[], None]:
        """Return what is called for each message of a round that has come."""

        def arrived() -> None:
            stage.missing -= 1
            is_now = self._is_on and self._stages[self._at] is stage
            if not stage.missing and is_now and self._transport is not None:
                self._transport.call_soon(self._advance)

        return arrived

    # ------------------------------------------------------------------------------ in a step

    def start(
        self,
        sums: dict[Span, torch.Tensor],
        row: Sequence[float] = (),
        divisor: float | None = None,
    ) -> None:
        """Send our subtrees' sums; returns at once, with what can be done without waiting.

        Args:
            sums: of what we hold; not to be changed before `finish` has returned.
            row: goes with them if `carries_rows`.
            divisor: what the total is divided by; None if that is not known yet.

        Raises:
            RuntimeError: the group broke.
        """
        if not self._is_bitwise:
            sums = {self._partition.mine[0]: self._add_ours(list(sums.values()))}
        if self.carries_rows:
            fill_row(self._row.numpy(), row)
        self._values = dict(sums)
        self._first = 0
        self._divisor = divisor
        self._at = 0
        self._has_sent = False
        self._is_on = True
        self._advance()
        if self._transport is not None:
            self._transport.progress()

    def wait_rows(self) -> list[Row]:
        """Wait for everyone's row, and return them by rank.

        Raises:
            RuntimeError: the group broke.
        """
        if self._transport is not None:
            self._transport.wait_until(lambda: not self._stages[0].missing)
        self.rows = [tuple(self._row_of[rank].tolist()) for rank in sorted(self._row_of)]
        return self.rows

    def finish(self, divisor: float) -> None:
        """Wait until `total` is whole, and nothing of ours is on its way any more.

        Args:
            divisor: what the total is divided by.

        Raises:
            RuntimeError: the group broke.
        """
        self._divisor = divisor
        self._advance()
        if self._transport is not None:
            self._transport.wait_until(lambda: not self._is_on)
            self._transport.flush()
        self._expect()

    def _advance(self) -> None:
        """Do all that what has come allows."""
        while self._is_on:
            begins_gather = self._at == len(self._plan.reduce) and not self._has_sent
            if begins_gather and not self._copies_divide:
                if self._divisor is None:
                    return
                self._divide(self._divisor)
            if self._at == len(self._stages):
                self._is_on = False
                self._values = {}
                return
            stage = self._stages[self._at]
            if not self._has_sent:
                self._has_sent = True
                self._send(stage)
            if stage.missing:
                return
            if stage.gathers:
                if self._copies_divide and self._divisor is None:
                    return
                self._take_totals(stage)
            else:
                self._add(stage)
            self._at, self._has_sent = self._at + 1, False

    def _send(self, stage: _Stage) -> None:
        sends: list[Message] = []
        if self._reads_in_place(stage.round):
            sends = self._places(stage)
        else:
            for move in stage.round.sends:
                if stage.gathers:
                    tensors = [self._landed(move.first, move.last)]
                else:
                    first, last = move.first - self._first, move.last - self._first
                    tensors = [self._values[part][first:last] for part in move.parts]
                self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
                if self.carries_rows:
                    tensors = [self._row, *tensors]
                sends.append((move.rank, stage.tag, tensors))
        if self._transport is not None:
            self._transport.post(sends, stage.receives, self._noting(stage))

    def _places(self, stage: _Stage) -> list[Message]:
        """Return the messages that show our node where it may read; in the end, that it may."""
        memory, numbers = self._memory, [0]
        if memory is None or not stage.round.sends:
            return []
        if not stage.gathers:
            parts = [memory.where(self._values[part]) for part in stage.round.sends[0].parts]
            numbers = [*memory.where(self._shown), *(start for *_, start in parts)]
        elif self._shown is not self._land:
            self._shown.copy_(self._landed(*self._node_slice()))
        message = torch.tensor(numbers, dtype=torch.int64)
        return [(move.rank, stage.tag, [message]) for move in stage.round.sends]

    def _read(self, stage: _Stage, move: PlannedMessage) -> list[torch.Tensor]:
        """Return the sums that a rank of our node lets us read, for all of the bucket.

        The place of its total is mapped as well, while it waits for us: afterwards it may exit.
        """
        number, inode, land, *starts = stage.positions[move.rank].tolist()
        peer, dtype = self._peers[move.rank], self.total.dtype
        first, last = self._slice_of[move.rank]
        self._lands[move.rank] = peer.tensor((number, inode, land), max(1, last - first), dtype)
        return [peer.tensor((number, inode, start), self._size, dtype) for start in starts]

    def _add(self, stage: _Stage) -> None:
        """Keep our slice of what we have, and add siblings to it in the order of the tree."""
        one = stage.round
        if one.first == one.last:
            self._values, self._first = {}, one.first
            return
        values = self._kept(stage)
        own = set(stage.scratch)
        if self._reads_in_place(one):
            for move in one.receives:
                theirs = self._read(stage, move)
                for part, tensor in zip(move.parts, theirs, strict=True):
                    values[part] = tensor[one.first : one.last]
        else:
            values.update(stage.scratch)
        whole = self._partition.num_micro_batches
        for left, right, total in one.additions:
            one_sum, other = values.pop(left), values.pop(right)
            if total == (0, whole):
                into = self._landed(one.first, one.last)
            elif left in own:
                into = one_sum
            elif right in own:
                into = other
            else:
                if total not in stage.spare:
                    stage.spare[total] = torch.empty_like(one_sum)
                into = stage.spare[total]
            values[total] = torch.add(one_sum, other, out=into)
            own.add(total)
        self._values, self._first = values, one.first

    def _kept(self, stage: _Stage) -> dict[Span, torch.Tensor]:
        """Return our slice of what we have; a part of it may come from others of our own group."""
        one, values = stage.round, {}
        for part, tensor in self._values.items():
            low = max(one.first, self._first)
            high = max(low, min(one.last, self._first + tensor.numel()))
            mine = tensor[low - self._first : high - self._first]
            if part in stage.scratch:
                stage.scratch[part][low - one.first : high - one.first].copy_(mine)
            else:
                values[part] = mine
        return values

    def _divide(self, divisor: float) -> None:
        """Have the total of our slice where it is handed round from."""
        if self._plan.first == self._plan.last:
            return
        summed = self._values[0, self._partition.num_micro_batches]
        if not self._stages:
            torch.div(summed, divisor, out=self.total)
        elif divisor != 1.0:
            summed.div_(divisor)

    def _take_totals(self, stage: _Stage) -> None:
        """Read the slices of our node; those that are sent come to their places by themselves."""
        if not self._reads_in_place(stage.round):
            return
        slices = [(*self._node_slice(), self._shown)]
        slices += [(m.first, m.last, self._lands[m.rank]) for m in stage.round.receives]
        divisor = self._divisor if self._copies_divide else None
        for first, last, summed in slices:
            if divisor is None or divisor == 1.0:
                self.total[first:last].copy_(summed)
            else:
                torch.div(summed, divisor, out=self.total[first:last])

    def _add_ours(self, ours: list[torch.Tensor]) -> torch.Tensor:
        like, memory = ours[0], self._memory
        if len(ours) == 1:
            return like
        if self._added is None:
            self._added = (
                torch.empty_like(like) if memory is None else memory.empty(like.numel(), like.dtype)
            )
        into = torch.add(ours[0], ours[1], out=self._added)
        for more in ours[2:]:
            into.add_(more)
        return into


class StagedExchange:
    """The same for tensors of a device in a group that has no transport for them: through memory.

    Attributes:
        total, rows, carries_rows, bytes_sent, has_tags: as of `TreeExchange`.
    """

    def __init__(
        self,
        partition: MicroBatchPartition,
        like: torch.Tensor,
        group: Any,
        *,
        is_bitwise: bool = True,
    ) -> None:
        self.total = torch.empty_like(like)
        host = torch.empty(like.shape, dtype=like.dtype)
        self._exchange = TreeExchange(partition, host, group, is_bitwise=is_bitwise)
        self._host = {part: torch.empty_like(host, pin_memory=True) for part in partition.mine}
        self.carries_rows, self.has_tags = self._exchange.carries_rows, True

    @property
    def rows(self) -> list[Row]:
        """Return what each rank gave to `start`, if `carries_rows`."""
        return self._exchange.rows

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    def start(
        self,
        sums: dict[Span, torch.Tensor],
        row: Sequence[float] = (),
        divisor: float | None = None,
    ) -> None:
        """Copy our subtrees' sums, and send them."""
        for part, tensor in sums.items():
            self._host[part].copy_(tensor, non_blocking=True)
        wait_done(record([self.total.device]))
        self._exchange.start(self._host, row, divisor)

    def wait_rows(self) -> list[Row]:
        """Wait for everyone's row."""
        return self._exchange.wait_rows()

    def finish(self, divisor: float) -> None:
        """Wait until the total is there, and copy it back."""
        self._exchange.finish(divisor)
        self.total.copy_(self._exchange.total)


class SumExchange:
    """The same by an all-reduce of NCCL's, whose order of addition depends on the group.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        rows, carries_rows: rows go beside these messages.
        bytes_sent: to other ranks, so far, if the all-reduce goes in a ring.
        has_tags: False, torch matches collectives by their order.
    """

    def __init__(self, partition: MicroBatchPartition, like: torch.Tensor, group: Any) -> None:
        self.has_tags = False
        self.total = torch.empty_like(like)
        self.rows: list[Row] = []
        self.carries_rows = False
        self.bytes_sent = 0
        self._partition = partition
        self._group = group
        self._work: Any = None

    def start(
        self,
        sums: dict[Span, torch.Tensor],
        row: Sequence[float] = (),
        divisor: float | None = None,
    ) -> None:
        """Add up what is ours, and begin to add up everyone's."""
        del row, divisor
        first, *more = self._partition.mine
        self.total.copy_(sums[first])
        for part in more:
            self.total.add_(sums[part])
        if self._group is not None:
            self._work = dist.all_reduce(self.total, group=self._group, async_op=True)
            world = self._partition.world_size
            self.bytes_sent += 2 * (world - 1) * self.total.nbytes // world

    def wait_rows(self) -> list[Row]:
        return []

    def finish(self, divisor: float) -> None:
        """Wait for the sum, and scale it.

        Raises:
            RuntimeError: the group broke.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.total.div_(divisor)


Exchange = TreeExchange | StagedExchange | SumExchange


def make_exchange(
    partition: MicroBatchPartition,
    like: torch.Tensor,
    group: Any,
    *,
    is_bitwise: bool = True,
    memory: OwnMemory | None = None,
) -> Exchange:
    """Return an exchange of tensors like this one; the same kind on every rank.

    Args:
        partition: who holds what.
        like: a flat tensor of the size, type and device of what is exchanged.
        group: the process group; None for a group of one.
        is_bitwise: add in the order of the tree.
        memory: what is exchanged is in it; None if others cannot read it in place.
    """
    accelerator = accelerator_of(like.device)
    if accelerator is None or group is None:
        return TreeExchange(partition, like, group, is_bitwise=is_bitwise, memory=memory)
    if accelerator.messages(group) is None:
        return StagedExchange(partition, like, group, is_bitwise=is_bitwise)
    return (TreeExchange if is_bitwise else SumExchange)(partition, like, group)

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.policy.exchange_plan import (
    MESSAGE_BYTES,
    ExchangePlan,
    ExchangeRound,
    GroupShape,
    PlannedMessage,
    tree_plan,
    whole_plan,
)
from elastic.core.policy.microbatch import Span, additions_over, all_parts
from elastic.errors import check
from elastic.worker.group.accelerators import record, wait_done
from elastic.worker.group.member_links import FEW, links_of
from elastic.worker.group.shared_memory import OwnMemory, PeerMemory
from elastic.worker.reduce.step_metadata import ROW, Row, fill_row
from elastic.worker.reduce.transports import Message, Transport, transport_of

ONE_PHASE_BYTES = 256 << 10
"""While a rank sends no more than this, it sends the bucket whole to everyone: one message's time
counts for more than the bytes."""
HEADER_NUMBERS = 3
"""Numbers before the places of sums in shared memory: their file, and the place of the total."""


@dataclass(frozen=True)
class MicroBatchPartition:
    """How the micro-batches of a step are dealt out over a group.

    Attributes:
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
        return self.parts[self.rank]


class _Stage:
    """One round of an exchange, with its memory.

    Attributes:
        gathers: it hands totals round.
        receives: messages that are waited for.
        missing: how many of them have not come.
        scratch: sums that are received, by subtree.
        positions: from ranks of our node, where their tensors are.
        own_positions: to them, where ours are; None if all is sent.
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
        self.own_positions: torch.Tensor | None = None
        self.spare: dict[Span, torch.Tensor] = {}


class _OwnSum:
    """The sum of what this rank holds, whatever the tree is, in memory of its own."""

    def __init__(self, memory: OwnMemory | None) -> None:
        """Use memory that other ranks of the node read; None for any."""
        self._memory = memory
        self._sum: torch.Tensor | None = None

    def of(self, ours: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of these, which is the tensor itself if there is only one."""
        first, *others = ours
        if not others:
            return first
        if self._sum is None:
            self._sum = (
                torch.empty_like(first)
                if self._memory is None
                else self._memory.empty(first.numel(), first.dtype)
            )
        torch.add(first, others[0], out=self._sum)
        for other in others[1:]:
            self._sum.add_(other)
        return self._sum


class _RidingRows:
    """Everyone's row of numbers, beside the sums in the messages of a small bucket."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._all = torch.zeros(world_size, ROW, dtype=torch.float64)
        self.own = self._all[rank]
        self._own = self.own.numpy()

    def write(self, row: Sequence[float]) -> None:
        fill_row(self._own, row)

    def from_rank(self, rank: int) -> torch.Tensor:
        return self._all[rank]

    def read(self) -> list[Row]:
        return [tuple(row) for row in self._all.tolist()]


class _NodeSlices:
    """The slices of one bucket that the ranks of this node read of each other in place.

    Attributes:
        shown: the total of ours, where the others read it.
        land: where we add it up, and its first element: with nodes of different sizes, slices of
            larger groups need not lie within the node's.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        like: torch.Tensor,
        memory: OwnMemory,
        peers: Mapping[int, PeerMemory],
    ) -> None:
        """Allocate ours.

        Args:
            plan: begins with a round within the node.
            like: a flat tensor of the bucket's size, type and device.
            memory: ours; all that is given to `start` is in it.
            peers: theirs, by rank.
        """
        self._memory, self._peers = memory, peers
        self._size, self._dtype = like.numel(), like.dtype
        first, last = plan.reduce[0].first, plan.reduce[0].last
        self.own = first, last
        self._slice_of = {one.rank: (one.first, one.last) for one in plan.gather[-1].receives}
        self._totals: dict[int, torch.Tensor] = {}
        self.shown = memory.empty(max(1, last - first), like.dtype)[: last - first]
        self.land = self.shown, first
        low, high = min(one.first for one in plan.reduce), max(one.last for one in plan.reduce)
        if (low, high) != self.own:
            self.land = like.new_empty(high - low), low

    def places_of(self, sums: Iterable[torch.Tensor]) -> list[int]:
        """Return the message from which the others know where these sums are, and our total."""
        return [*self._memory.where(self.shown), *(self._memory.where(one)[-1] for one in sums)]

    def read(self, rank: int, places: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums that a rank lets us read, for all of the bucket.

        The place of its total is mapped as well, while it waits for us: afterwards it may exit.
        """
        number, inode, total, *sums = places.tolist()
        peer = self._peers[rank]
        first, last = self._slice_of[rank]
        self._totals[rank] = peer.tensor((number, inode, total), max(1, last - first), self._dtype)
        return [peer.tensor((number, inode, one), self._size, self._dtype) for one in sums]

    def total_of(self, rank: int) -> torch.Tensor:
        """Return the total of a rank's slice; valid once it has said so."""
        return self._totals[rank]


@dataclass
class _ExchangeStep:
    """How far the exchange of a step has come.

    Attributes:
        values: our part of the sums that are not added up yet, by subtree.
        first: the element that they begin with.
        divisor: what the total is divided by, None while that is not known.
        at: the stage at hand.
        has_sent: its messages are on their way.
    """

    values: dict[Span, torch.Tensor]
    first: int = 0
    divisor: float | None = None
    at: int = 0
    has_sent: bool = False


class TreeExchange:
    """The exchange of one bucket within one group; used once per step, over and over.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        bytes_sent: of sums, to other ranks, so far; what they read in place is not sent.
    """

    def __init__(
        self,
        partition: MicroBatchPartition,
        like: torch.Tensor,
        group: Any,
        transport: Transport | None,
        *,
        is_bitwise: bool = True,
        memory: OwnMemory | None = None,
    ) -> None:
        """Allocate what is received, and expect the first messages.

        Args:
            partition: who holds what.
            like: a flat tensor of the bucket's size, type and device.
            group: the process group; None for a group of one.
            transport: carries such tensors in it; None for a group of one.
            is_bitwise: False to add what is ours first, whatever the tree is: fewer bytes.
            memory: all that is given to `start` is in it; None if others cannot read it in place.
        """
        check((group is None) == (transport is None), "a group has a transport for its exchanges")
        self.total = torch.empty_like(like)
        self.bytes_sent = 0
        self._own_sum = None if is_bitwise else _OwnSum(memory)
        if not is_bitwise:
            partition = MicroBatchPartition(
                partition.rank, partition.world_size, partition.world_size
            )
        self._partition = partition
        self._plan = ExchangePlan((), (), 0, like.numel())
        self._transport = transport
        self._rows: _RidingRows | None = None
        self._node: _NodeSlices | None = None
        # Where the slice is added up that is handed round, and its first element.
        self._land = self.total, 0
        tag = 0
        if transport is not None:
            links = links_of(group)
            tag = links.next_tag()
            self._plan = _plan_of(partition, like, links.shape)
            if transport.carries_rows and not self._plan.gather:
                self._rows = _RidingRows(partition.rank, partition.world_size)
            # A rank without a slice would not receive the others' places.
            has_slices = like.numel() >= partition.world_size
            is_local = bool(self._plan.reduce) and self._plan.reduce[0].is_local
            if is_local and has_slices and memory is not None and links.memory:
                self._node = _NodeSlices(self._plan, like, memory, links.memory)
                self._land = self._node.land
        self._stages = [
            self._stage(one, tag + 2 * one.depth + gathers, like, gathers=bool(gathers))
            for gathers, rounds in enumerate((self._plan.reduce, self._plan.gather))
            for one in rounds
        ]
        # Where all of a node read each other's slices, they divide them as they copy them.
        self._copies_divide = bool(self._plan.gather) and all(
            self._reads_in_place(stage.round) for stage in self._stages
        )
        self._step: _ExchangeStep | None = None
        self._expect()

    @property
    def has_tags(self) -> bool:
        """Return whether exchanges of different buckets may begin in another order on each rank."""
        return self._transport is None or self._transport.has_tags

    @property
    def carries_rows(self) -> bool:
        """Return whether the bucket is small, so that everyone's row goes with it."""
        return self._rows is not None

    def _reads_in_place(self, one: ExchangeRound) -> bool:
        return self._node is not None and one.is_local

    def _stage(self, one: ExchangeRound, tag: int, like: torch.Tensor, *, gathers: bool) -> _Stage:
        stage = _Stage(one, tag, gathers=gathers)
        if self._reads_in_place(one):
            for move in one.receives:
                places = _positions(move, gathers=gathers)
                stage.positions[move.rank] = places
                stage.receives.append((move.rank, tag, [places]))
            if one.sends:
                stage.own_positions = _positions(one.sends[0], gathers=gathers)
        elif gathers:
            for move in one.receives:
                stage.receives.append((move.rank, tag, [self._landed(move.first, move.last)]))
        else:
            for move in one.receives:
                first, last = move.first - one.first, move.last - one.first
                into = [self._rows.from_rank(move.rank)] if self._rows is not None else []
                for part in move.parts:
                    if part not in stage.scratch:
                        stage.scratch[part] = like.new_empty(one.last - one.first)
                    into.append(stage.scratch[part][first:last])
                stage.receives.append((move.rank, tag, into))
        return stage

    def _landed(self, first: int, last: int) -> torch.Tensor:
        tensor, begins = self._land
        return _cut(tensor, first - begins, last - begins)

    def _expect(self) -> None:
        """Let the messages of the next step come whenever they do."""
        transport = self._transport
        if transport is None:
            return
        for stage in self._stages:
            stage.missing = len(stage.receives)
            transport.expect(stage.receives, self._noting(stage))

    def close(self) -> None:
        """Let go of the memory that messages of further steps were expected in."""
        if self._transport is not None:
            for stage in self._stages:
                self._transport.forget(stage.receives)

    def _noting(self, stage: _Stage) -> Callable[[], None]:
        """Return what is called for each message of a round that has come."""

        def arrived() -> None:
            stage.missing -= 1
            step = self._step
            is_now = step is not None and self._stages[step.at] is stage
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
        if self._own_sum is not None:
            sums = {self._partition.mine[0]: self._own_sum.of([*sums.values()])}
        if self._rows is not None:
            self._rows.write(row)
        self._step = _ExchangeStep(dict(sums), divisor=divisor)
        self._advance()
        if self._transport is not None:
            self._transport.progress()

    def wait_rows(self) -> list[Row]:
        """Wait for everyone's row, and return them by rank; none unless `carries_rows`.

        Raises:
            RuntimeError: the group broke.
        """
        if self._rows is None:
            return []
        if self._transport is not None:
            self._transport.wait_until(lambda: not self._stages[0].missing)
        return self._rows.read()

    def finish(self, divisor: float) -> None:
        """Wait until `total` is whole, and nothing of ours is on its way any more.

        Raises:
            RuntimeError: the group broke.
        """
        if self._step is not None:
            self._step.divisor = divisor
        self._advance()
        if self._transport is not None:
            self._transport.wait_until(lambda: self._step is None)
            self._transport.flush()
        self._expect()

    def _advance(self) -> None:
        """Do all that what has come allows."""
        while (step := self._step) is not None:
            begins_gather = step.at == len(self._plan.reduce) and not step.has_sent
            if begins_gather and not self._copies_divide:
                if step.divisor is None:
                    return
                self._divide(step, step.divisor)
            if step.at == len(self._stages):
                self._step = None
                return
            stage = self._stages[step.at]
            if not step.has_sent:
                step.has_sent = True
                self._send(step, stage)
            if stage.missing:
                return
            if stage.gathers:
                if self._copies_divide and step.divisor is None:
                    return
                self._take_totals(step, stage)
            else:
                self._add(step, stage)
            step.at, step.has_sent = step.at + 1, False

    def _send(self, step: _ExchangeStep, stage: _Stage) -> None:
        sends: list[Message] = []
        if self._node is not None and stage.round.is_local:
            sends = self._places(self._node, step, stage)
        else:
            for move in stage.round.sends:
                if stage.gathers:
                    tensors = [self._landed(move.first, move.last)]
                else:
                    first, last = move.first - step.first, move.last - step.first
                    tensors = [_cut(step.values[part], first, last) for part in move.parts]
                self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
                if self._rows is not None:
                    tensors = [self._rows.own, *tensors]
                sends.append((move.rank, stage.tag, tensors))
        if self._transport is not None:
            self._transport.post(sends, stage.receives, self._noting(stage))

    def _places(self, node: _NodeSlices, step: _ExchangeStep, stage: _Stage) -> list[Message]:
        """Return the messages that show our node where it may read; in the end, that it may."""
        if stage.own_positions is None:
            return []
        if not stage.gathers:
            sums = (step.values[part] for part in stage.round.sends[0].parts)
            stage.own_positions.numpy()[:] = node.places_of(sums)
        elif node.shown is not node.land[0]:
            node.shown.copy_(self._landed(*node.own))
        return [(move.rank, stage.tag, [stage.own_positions]) for move in stage.round.sends]

    def _add(self, step: _ExchangeStep, stage: _Stage) -> None:
        """Keep our slice of what we have, and add siblings to it in the order of the tree."""
        one = stage.round
        if one.first == one.last:
            step.values, step.first = {}, one.first
            return
        values = _kept(step, stage)
        own = set(stage.scratch)
        if self._node is not None and one.is_local:
            for move in one.receives:
                theirs = self._node.read(move.rank, stage.positions[move.rank])
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
        step.values, step.first = values, one.first

    def _divide(self, step: _ExchangeStep, divisor: float) -> None:
        """Have the total of our slice where it is handed round from."""
        if self._plan.first == self._plan.last:
            return
        summed = step.values[0, self._partition.num_micro_batches]
        if not self._stages:
            torch.div(summed, divisor, out=self.total)
        elif divisor != 1.0:
            summed.div_(divisor)

    def _take_totals(self, step: _ExchangeStep, stage: _Stage) -> None:
        """Read the slices of our node; those that are sent come to their places by themselves."""
        node = self._node
        if node is None or not stage.round.is_local:
            return
        slices = [(*node.own, node.shown)]
        slices += [(m.first, m.last, node.total_of(m.rank)) for m in stage.round.receives]
        divisor = step.divisor if self._copies_divide else None
        for first, last, summed in slices:
            if divisor is None or divisor == 1.0:
                self.total[first:last].copy_(summed)
            else:
                torch.div(summed, divisor, out=self.total[first:last])


def _plan_of(partition: MicroBatchPartition, like: torch.Tensor, shape: GroupShape) -> ExchangePlan:
    """Return what this rank does with a bucket like this one."""
    rank, world_size, count = partition.rank, partition.world_size, partition.num_micro_batches
    most = max(len(parts) for parts in partition.parts)
    is_small = most * like.nbytes * (world_size - 1) <= ONE_PHASE_BYTES
    if is_small and world_size <= FEW:
        return whole_plan(rank, world_size, count, like.numel())
    return tree_plan(rank, count, shape, like.numel(), MESSAGE_BYTES // like.itemsize)


def _positions(move: PlannedMessage, *, gathers: bool) -> torch.Tensor:
    """Return room for a message that says where sums are; for totals it only says that they are."""
    return torch.zeros(1 if gathers else HEADER_NUMBERS + len(move.parts), dtype=torch.int64)


def _cut(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return these elements; of small buckets that is all, and a view takes 2 µs."""
    return tensor if last - first == tensor.numel() else tensor[first:last]


def _kept(step: _ExchangeStep, stage: _Stage) -> dict[Span, torch.Tensor]:
    """Return our slice of what we have; a part of it may come from others of our own group."""
    one, values = stage.round, {}
    for part, tensor in step.values.items():
        low = max(one.first, step.first)
        high = max(low, min(one.last, step.first + tensor.numel()))
        mine = _cut(tensor, low - step.first, high - step.first)
        if part in stage.scratch:
            stage.scratch[part][low - one.first : high - one.first].copy_(mine)
        else:
            values[part] = mine
    return values


class StagedExchange:
    """The same for tensors of a device in a group that has no transport for them: through memory.

    Attributes:
        total, carries_rows, bytes_sent, has_tags: as of `TreeExchange`.
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
        self._exchange = TreeExchange(
            partition, host, group, transport_of(group, host.device), is_bitwise=is_bitwise
        )
        self._host = {part: torch.empty_like(host, pin_memory=True) for part in partition.mine}
        self.carries_rows, self.has_tags = self._exchange.carries_rows, True

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
        return self._exchange.wait_rows()

    def close(self) -> None:
        self._exchange.close()

    def finish(self, divisor: float) -> None:
        """Wait until the total is there, and copy it back."""
        self._exchange.finish(divisor)
        self.total.copy_(self._exchange.total)


class SumExchange:
    """The same by an all-reduce of torch's, whose order of addition depends on the group.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        carries_rows: False, rows go beside these messages.
        bytes_sent: to other ranks, so far, if the all-reduce goes in a ring.
        has_tags: False, torch matches collectives by their order.
    """

    def __init__(self, partition: MicroBatchPartition, like: torch.Tensor, group: Any) -> None:
        self.has_tags = False
        self.total = torch.empty_like(like)
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

    def close(self) -> None:
        """Torch's collectives expect nothing ahead."""

    def finish(self, divisor: float) -> None:
        """Wait for the sum, and scale it; RuntimeError if the group broke."""
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
    transport = transport_of(group, like.device) if group is not None else None
    if transport is None and group is not None:
        return StagedExchange(partition, like, group, is_bitwise=is_bitwise)
    if transport is not None and transport.has_all_reduce and not is_bitwise:
        return SumExchange(partition, like, group)
    return TreeExchange(partition, like, group, transport, is_bitwise=is_bitwise, memory=memory)

"""One bucket's sums of subtrees, exchanged and added in the order of the tree.

Each rank owns a slice of the bucket. Everyone sends the owner its subtrees' part of the slice,
the owner adds all of them in tree order, and sends the sum to everyone. That is as many bytes as
a ring all-reduce where each rank holds one subtree, in two messages' time instead of 2 (W - 1).
A small bucket goes in one: all send all to all, and each rank adds by itself. (On the CPU such a
bucket is packed into one message, see `packed_exchange`.)

Rule: whoever adds, adds the same operands in the same order, so that the bits are the same for
every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from elastic.core.policy.microbatch import Span, additions_over, all_parts
from elastic.worker.rows import Row
from elastic.worker.wires import Message, NcclWires, make_wires

ONE_PHASE_BYTES = 256 << 10
"""While a rank sends no more than this, it sends the bucket whole to everyone: one message's time
counts for more than the bytes."""
FIRST_TAG = 2_000_000
"""Far from the tags of user code that sends by itself, whose default is 0."""
TAGS_PER_BUCKET = 64
"""Tags keep the messages of different buckets, phases and subtrees apart."""
RESULT = TAGS_PER_BUCKET - 1
_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Deal:
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


def next_tag(group: Any) -> int:
    """Return the first of `TAGS_PER_BUCKET` tags that no other exchange of this group has.

    All ranks make the same exchanges in the same order, because they do the same steps; also those
    of a later training loop in the same group.
    """
    number = _made.get(group, 0)
    _made[group] = number + 1
    return FIRST_TAG + number * TAGS_PER_BUCKET


def add_in_order(
    deal: Deal, sums: dict[Span, torch.Tensor], received: dict[Span, torch.Tensor]
) -> torch.Tensor:
    """Add the sums of all subtrees in the order of the tree, and return the total.

    Args:
        deal: who holds what.
        sums: ours, which stay as they are: what is sent must not change.
        received: the others', which are used up.
    """
    values = {**sums, **received}
    scratch = set(received)
    for left, right, total in deal.additions:
        # Two of ours are never added to each other, for their sum would be one of ours; and
        # addition commutes.
        into, other = (left, right) if left in scratch else (right, left)
        values[total] = values[into].add_(values[other])
        scratch.add(total)
    return values[0, deal.num_micro_batches]


class TreeExchange:
    """The exchange of one bucket within one group; used once per step, over and over.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        rows: always empty: rows go beside these messages.
        bytes_sent: to other ranks, so far.
        has_tags: exchanges of different buckets may begin in another order on each rank.
    """

    def __init__(self, deal: Deal, like: torch.Tensor, group: Any) -> None:
        """Allocate what is received.

        Args:
            deal: who holds what.
            like: a flat tensor of the bucket's size, type and device.
            group: the process group; None for a group of one.
        """
        self.total = torch.empty_like(like)
        self.rows: list[Row] = []
        self.bytes_sent = 0
        self._deal = deal
        self._wires = make_wires(group, like.device)
        self.has_tags = not isinstance(self._wires, NcclWires)
        self._tag = 0 if group is None else next_tag(group)
        size, world = like.numel(), deal.world_size
        self._is_one_phase = like.nbytes * (world - 1) <= ONE_PHASE_BYTES
        self._slices = [
            (0, size) if self._is_one_phase else (r * size // world, (r + 1) * size // world)
            for r in range(world)
        ]
        first, last = self._slices[deal.rank]
        self._others = [rank for rank in range(world) if rank != deal.rank]
        self._received = {
            part: like.new_empty(last - first) for rank in self._others for part in deal.parts[rank]
        }

    def start(self, sums: dict[Span, torch.Tensor], row: Sequence[float] = ()) -> None:
        """Send our subtrees' sums; returns at once.

        Args:
            sums: of what we hold; not to be changed before `finish`.
            row: does not go this way.
        """
        del row
        deal, messages = self._deal, []
        for rank in self._others:
            for place, part in enumerate(deal.parts[rank]):
                messages.append(Message(False, self._received[part], rank, self._tag + place))
        for rank in self._others:
            first, last = self._slices[rank]
            for place, part in enumerate(deal.mine):
                tensor = sums[part][first:last]
                messages.append(Message(True, tensor, rank, self._tag + place))
                self.bytes_sent += tensor.nbytes
        self._wires.post(messages)

    def add(self, sums: dict[Span, torch.Tensor], *, divisor: float) -> None:
        """Wait for the others' sums, add all, scale, and send the part that is ours to add.

        Args:
            sums: as given to `start`.
            divisor: what the total is divided by.

        Raises:
            RuntimeError: the group broke.
        """
        deal = self._deal
        self._wires.wait_received()
        first, last = self._slices[deal.rank]
        ours = {part: tensor[first:last] for part, tensor in sums.items()}
        mine = self.total[first:last]
        torch.div(add_in_order(deal, ours, self._received), divisor, out=mine)
        if self._is_one_phase:
            return
        messages = []
        for rank in self._others:
            begin, end = self._slices[rank]
            messages.append(Message(False, self.total[begin:end], rank, self._tag + RESULT))
        for rank in self._others:
            messages.append(Message(True, mine, rank, self._tag + RESULT))
            self.bytes_sent += mine.nbytes
        self._wires.post(messages)

    def finish(self) -> None:
        """Wait until `total` is whole, and nothing of ours is on its way any more.

        Raises:
            RuntimeError: the group broke.
        """
        self._wires.wait_all()


class SumExchange:
    """The same by an all-reduce of torch's, whose order of addition depends on the group.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        rows: always empty: rows go beside these messages.
        bytes_sent: to other ranks, so far, if the all-reduce goes in a ring.
        has_tags: False, torch tells collectives apart by their order.
    """

    def __init__(self, deal: Deal, like: torch.Tensor, group: Any) -> None:
        """Allocate the result; see `TreeExchange`."""
        self.has_tags = False
        self.total = torch.empty_like(like)
        self.rows: list[Row] = []
        self.bytes_sent = 0
        self._deal = deal
        self._group = group
        self._work: Any = None

    def start(self, sums: dict[Span, torch.Tensor], row: Sequence[float] = ()) -> None:
        """Add up what is ours, and begin to add up everyone's."""
        del row
        first, *more = self._deal.mine
        self.total.copy_(sums[first])
        for part in more:
            self.total.add_(sums[part])
        if self._group is not None:
            self._work = dist.all_reduce(self.total, group=self._group, async_op=True)
            world = self._deal.world_size
            self.bytes_sent += 2 * (world - 1) * self.total.nbytes // world

    def add(self, sums: dict[Span, torch.Tensor], *, divisor: float) -> None:
        """Wait for the sum, and scale it.

        Raises:
            RuntimeError: the group broke.
        """
        del sums
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.total.div_(divisor)

    def finish(self) -> None:
        """Do nothing more."""

"""One small bucket's sums of subtrees in one message to everyone, and each rank's row with them.

A message's time counts for more than its bytes here: one is sent, and one is waited for, from
each other rank, which is less than an all-reduce of torch's does. All ranks add by themselves.

Rule: the next step's messages are expected from the moment that this step's have come. gloo sends
only what the receiver waits for already; so a message leaves when it is sent, and not after an
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.core.policy.microbatch import Span
from elastic.worker.rows import ROW, Divisor, Row, fill_row
from elastic.worker.tree_exchange import ONE_PHASE_BYTES, Deal, add_in_order, next_tag
from elastic.worker.wires import Message, make_small_wires

ALIGNED = 64
"""Bytes between places where tensors may begin."""
ROW_BYTES = 8 * ROW


def is_packed(deal: Deal, like: torch.Tensor, group: Any) -> bool:
    """Return whether tensors like this one go packed; says the same on every rank."""
    if group is None or like.device.type != "cpu":
        return False
    most = max(len(parts) for parts in deal.parts)
    return most * like.nbytes * (deal.world_size - 1) <= ONE_PHASE_BYTES


class _Packet:
    """The memory of one message: a rank's row, and its sums of subtrees behind it."""

    def __init__(self, parts: Sequence[Span], like: torch.Tensor) -> None:
        """Allocate it for these subtrees."""
        head, slot = _round_up(ROW_BYTES), _round_up(like.nbytes)
        self.bytes = torch.zeros(head + len(parts) * slot, dtype=torch.uint8)
        # Numbers are written and read ten times as fast as through a tensor.
        self.row = self.bytes[:ROW_BYTES].view(torch.float64).numpy()
        self.sums: dict[Span, torch.Tensor] = {}
        for place, part in enumerate(parts):
            start = head + place * slot
            self.sums[part] = self.bytes[start : start + like.nbytes].view(like.dtype)


def _round_up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class PackedExchange:
    """The exchange of a small bucket of CPU tensors; see `TreeExchange`.

    Attributes:
        total: the scaled sum, once `finish` has returned.
        rows: what each rank gave to `start`, by rank, once `finish` has returned.
        bytes_sent: of sums, to other ranks, so far.
        has_tags: exchanges of different buckets may begin in another order on each rank.
    """

    has_tags = True

    def __init__(self, deal: Deal, like: torch.Tensor, group: Any) -> None:
        """Allocate messages, and expect the first ones; see `TreeExchange`."""
        self.total = torch.empty_like(like)
        self.rows: list[Row] = []
        self.bytes_sent = 0
        self._deal = deal
        self._tag = next_tag(group)
        self._packets = [_Packet(parts, like) for parts in deal.parts]
        self._mine = self._packets[deal.rank]
        self._theirs = {
            rank: packet for rank, packet in enumerate(self._packets) if rank != deal.rank
        }
        self._received = {
            part: tensor for packet in self._theirs.values() for part, tensor in packet.sums.items()
        }
        self._wires = make_small_wires(group)
        self._expect()

    def _expect(self) -> None:
        """Let gloo receive the next messages whenever they come."""
        self._wires.post(
            [Message(False, packet.bytes, rank, self._tag) for rank, packet in self._theirs.items()]
        )

    def start(self, sums: dict[Span, torch.Tensor], row: Sequence[float] = ()) -> None:
        """Send our subtrees' sums and our row; returns at once."""
        mine = self._mine
        fill_row(mine.row, row)
        for part, tensor in mine.sums.items():
            tensor.copy_(sums[part])
            self.bytes_sent += tensor.nbytes * len(self._theirs)
        self._wires.post([Message(True, mine.bytes, rank, self._tag) for rank in self._theirs])

    def add(self, sums: dict[Span, torch.Tensor], *, divisor: Divisor) -> None:
        """Wait for the others' sums, add all, and scale.

        Args:
            sums: as given to `start`.
            divisor: what the total is divided by, or how that follows from all rows.

        Raises:
            RuntimeError: the group broke.
        """
        self._wires.wait_received()
        total = add_in_order(self._deal, sums, self._received)
        self.rows = [tuple(packet.row.tolist()) for packet in self._packets]
        number = divisor if isinstance(divisor, float) else divisor(self.rows)
        torch.div(total, number, out=self.total)

    def finish(self) -> None:
        """Wait until nothing of ours is on its way any more.

        Raises:
            RuntimeError: the group broke.
        """
        self._wires.wait_all()
        self._expect()

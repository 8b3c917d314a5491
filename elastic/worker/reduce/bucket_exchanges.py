"""What a rank keeps for the steps of one partition: sums, exchanges by bucket, the rows.

Rule: every rank starts and finishes the exchanges of the same buckets, in whatever order, and the
rows come with the first of them, be it inside its messages or beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.core.policy.microbatch import Span, additions_in
from elastic.worker.reduce.buckets import Bucket, FlatTensor
from elastic.worker.reduce.step_metadata import Divisor, MetadataExchange, Row
from elastic.worker.reduce.tree_exchange import MicroBatchPartition, make_exchange


class SubtreeSums:
    """What one rank has added up of one bucket: whole subtrees, as they become complete."""

    def __init__(self, bucket: Bucket, partition: MicroBatchPartition) -> None:
        self._bucket = bucket
        self._flats: dict[Span, FlatTensor] = {}
        self._before: dict[Span, FlatTensor] | None = None
        self._additions: dict[int, list[tuple[Span, Span, Span]]] = {}
        for part in partition.mine:
            for one in additions_in(part):
                after = self._additions.setdefault(one.right[1] - 1, [])
                after.append((one.left, one.right, one.total))

    def put(self, number: int, leaf: FlatTensor) -> None:
        """Add a micro-batch's gradients, in the order of the tree; the leaf is used up."""
        self._flats[number, number + 1] = leaf
        for left, right, total in self._additions.get(number, ()):
            into, other = self._flats.pop(left), self._flats.pop(right)
            into.tensor.add_(other.tensor)
            self._bucket.free(other)
            self._flats[total] = into

    def put_tentative(self, number: int, leaf: FlatTensor) -> None:
        """Do the same in memory of its own; putting this number again takes it back first."""
        self.take_back()
        self._before = dict(self._flats)
        self._flats[number, number + 1] = leaf
        for left, right, total in self._additions.get(number, ()):
            one, other = self._flats.pop(left), self._flats.pop(right)
            into = self._bucket.flat()
            torch.add(one.tensor, other.tensor, out=into.tensor)
            self._free_made(one, other)
            self._flats[total] = into

    def take_back(self) -> None:
        """Be as before what was put for now."""
        if self._before is not None:
            self._free_made(*self._flats.values())
            self._flats, self._before = self._before, None

    def _free_made(self, *flats: FlatTensor) -> None:
        """Give back those that were not there before what was put for now."""
        kept = {id(flat) for flat in (self._before or {}).values()}
        for flat in flats:
            if id(flat) not in kept:
                self._bucket.free(flat)

    def tensors(self) -> dict[Span, torch.Tensor]:
        return {part: flat.tensor for part, flat in self._flats.items()}

    def clear(self) -> None:
        self.take_back()
        for flat in self._flats.values():
            self._bucket.free(flat)
        self._flats = {}


class BucketExchanges:
    """What the steps of one partition need within one group.

    Attributes:
        sums: what this rank has added up, by bucket.
        of: the exchanges, by bucket.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        partition: MicroBatchPartition,
        group: Any,
        *,
        is_bitwise: bool,
    ) -> None:
        """Allocate everything.

        Args:
            buckets: of all units.
            partition: who holds what.
            group: the process group, None for a group of one.
            is_bitwise: add in the order of the tree.
        """
        self.partition = partition
        self.sums = [SubtreeSums(bucket, partition) for bucket in buckets]
        self.of = [
            make_exchange(
                partition,
                bucket.empty_like_total(),
                group,
                is_bitwise=is_bitwise,
                memory=bucket.memory,
            )
            for bucket in buckets
        ]
        # Rows ride in the messages of small buckets, if whatever comes first is one.
        rides = all(one.carries_rows for one in self.of)
        self._rows = (
            None if rides else MetadataExchange(partition.rank, partition.world_size, group)
        )
        self._metadata_rows: list[Row] = []
        self._has_sent_row = False

    @property
    def bytes_sent(self) -> int:
        return sum(exchange.bytes_sent for exchange in self.of)

    def close(self) -> None:
        for exchange in self.of:
            exchange.close()

    def begin_step(self) -> None:
        """Forget the sums of the step before."""
        self._metadata_rows, self._has_sent_row = [], False
        for sums in self.sums:
            sums.clear()

    def start(self, number: int, row: Sequence[float], divisor: float | None) -> None:
        """Send off what we have added up of a bucket; returns at once.

        Args:
            number: of the bucket.
            row: what all ranks get to see; the same for all buckets of a step.
            divisor: what totals are divided by, None if that follows from all rows.

        Raises:
            RuntimeError: the group broke.
        """
        if self._rows is not None and not self._has_sent_row:
            self._has_sent_row = True
            self._rows.start(row)
        self.of[number].start(self.sums[number].tensors(), row, divisor)

    def finish(self, numbers: Sequence[int], *, divisor: Divisor) -> list[Row]:
        """Wait until these buckets' totals are whole.

        Args:
            numbers: of the buckets, all of them started.
            divisor: what totals are divided by, or how that follows from all rows.

        Returns:
            What each rank sent in this step, by rank; empty before the first bucket of a step.

        Raises:
            RuntimeError: the group broke.
        """
        exchanges = [self.of[number] for number in numbers]
        if not exchanges:  # Of a unit that is frozen as a whole.
            return self._metadata_rows
        if not self._metadata_rows and self._rows is None:
            self._metadata_rows = exchanges[0].wait_rows()
        elif not self._metadata_rows and self._rows is not None and self._has_sent_row:
            self._metadata_rows = self._rows.finish()
        number = divisor if isinstance(divisor, float) else divisor(self._metadata_rows)
        for exchange in exchanges:
            exchange.finish(number)
        return self._metadata_rows

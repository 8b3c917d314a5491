"""A few numbers from everyone to everyone, with each step: requests, logged values, flags.

Rule: what all members must do alike is checked here before a step is committed, because gradients
of different steps would be added without a sign of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.exchange_plan import RowsRound, rows_plan
from elastic.core.policy.microbatch import Span
from elastic.errors import UsageError, check
from elastic.worker.group.member_links import MemberLinks, links_of

ROW = 72
"""Numbers in a row as it is sent."""
TAG = 1
"""Those of buckets are above it."""
STEP_BITS = 32
HEADER_NUMBERS = 7
"""Numbers before the logged ones."""
REQUESTS, SAVES, BUSY, RELEASES = 1, 2, 4, 8
"""Bits of a row's first number."""
RATES = ("lr", "weight_decay", "momentum", "betas")
"""Of a group of parameters: what is changed while it is trained."""
Row = tuple[float, ...]
"""A row as it was received: `ROW` numbers."""
Divisor = float | Callable[[Sequence[Row]], float]
"""What a step's sum is divided by: a number, or one that follows from what all ranks sent."""


class StepMetadata(NamedTuple):
    """What one rank reports of itself with the gradients of a step.

    Attributes:
        requests: it knows of a planned change.
        saves: it asks for a snapshot after the step.
        busy: it has no room for one.
        releases: it knows that all leave after the step, and come back later or never.
        rates: fingerprint of the learning rates that they stepped by, of other such settings, and
            of what was frozen; 0 before the first step.
        checksum: checksum of a part of the weights before this step, 0 for none; see `divergence`.
        busy_ns: how long it worked between its last two exchanges, 0 if not known; see `timing`.
        cursor: the step that its gradients belong to.
        stepped: bits of the optimizers that stepped last in this group, 0 before the first step.
        values: what it has logged.
    """

    requests: bool
    cursor: Cursor
    stepped: int
    values: tuple[float, ...] = ()
    saves: bool = False
    busy: bool = False
    releases: bool = False
    rates: int = 0
    checksum: int = 0
    busy_ns: float = 0.0

    def numbers(self) -> list[float]:
        """Return the row as it is sent: each number is exact in a float64."""
        where = (self.cursor.epoch << STEP_BITS) + self.cursor.step
        flags = (
            self.requests * REQUESTS
            + self.saves * SAVES
            + self.busy * BUSY
            + self.releases * RELEASES
        )
        head = (flags, where, self.stepped, self.rates, *halves(self.checksum), self.busy_ns)
        return [*map(float, head), *self.values]

    @staticmethod
    def of(numbers: Sequence[float]) -> StepMetadata:
        epoch, step = divmod(int(numbers[1]), 1 << STEP_BITS)
        values, flags = tuple(numbers[HEADER_NUMBERS:]), int(numbers[0])
        return StepMetadata(
            bool(flags & REQUESTS),
            Cursor(epoch, step),
            int(numbers[2]),
            values,
            bool(flags & SAVES),
            bool(flags & BUSY),
            bool(flags & RELEASES),
            int(numbers[3]),
            whole(*numbers[4:6]),
            numbers[6],
        )


def halves(number: int) -> tuple[int, int]:
    """Return 64 bits as two numbers, each of which is exact in a float64."""
    return divmod(number, 1 << 32)


def whole(high: float, low: float) -> int:
    return (int(high) << 32) + int(low)


def read_rows(rows: Sequence[Sequence[float]]) -> list[StepMetadata]:
    """Read what all ranks sent, and refuse ranks that do not do the same.

    Raises:
        UsageError: they are in different steps, other optimizers of theirs have stepped, or by
            other learning rates or with other frozen parameters.
    """
    metadata = [StepMetadata.of(row) for row in rows]
    for rank, one in enumerate(metadata):
        first = metadata[0].cursor
        if one.cursor != first:
            raise UsageError(
                f"rank {rank} is in step {one.cursor.step} of epoch {one.cursor.epoch}, rank 0 in "
                f"step {first.step} of epoch {first.epoch}: ranks have different numbers of "
                f"micro-batches in a step, so that code which leaves the loop over a prepared "
                f"loader must not count iterations; let it decide after train.stepped(), by "
                f"train.get_context().get_step() or train.get_logged()"
            )
        if one.stepped != metadata[0].stepped:
            raise UsageError(
                f"rank {rank} has stepped other optimizers than rank 0 in the step before step "
                f"{first.step} of epoch {first.epoch}: whether an optimizer steps must not "
                f"depend on the number of an iteration or on a rank; let it depend on "
                f"train.get_context().get_step()"
            )
        if one.rates != metadata[0].rates:
            raise UsageError(
                f"rank {rank} had other learning rates than rank 0, or other frozen parameters "
                f"(or weight_decay, momentum, betas), in the step before step {first.step} of "
                f"epoch {first.epoch}, so that their weights differ: none of these may depend on "
                f"the number of an iteration, on a loss, or on "
                f"anything else that a rank has for itself; let it depend on "
                f"train.get_context().get_step() or train.get_logged()"
            )
    return metadata


def rates_print(optimizers: Iterable[Any]) -> int:
    """Return a number that is equal where learning rates are, and which parameters are frozen.

    Other settings that schedules change count as rates. Those in tensors are left out.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    flags = bytes([one.requires_grad for group in groups for one in group["params"]])
    values = [group.get(name) for group in groups for name in RATES]
    parts = [one if isinstance(one, (tuple, list)) else (one,) for one in values]
    numbers = [float(one) for part in parts for one in part if isinstance(one, (int, float))]
    return zlib.crc32(flags, zlib.crc32(repr(numbers).encode()))


def fill_row(row: Any, values: Sequence[float]) -> None:
    """Write these numbers into a row, and zeros behind them.

    Args:
        row: a NumPy array of float64: writing through a tensor takes ten times as long.
        values: at most as many.
    """
    check(len(values) <= len(row), f"{len(values)} numbers: at most {len(row)}")
    row[: len(values)] = values
    row[len(values) :] = 0.0


class MetadataExchange:
    """Rows of numbers, the newest of each rank; handed on over the edges that buckets take."""

    def __init__(self, rank: int, world_size: int, group: Any, size: int = ROW) -> None:
        """Allocate the rows.

        Args:
            rank: ours.
            world_size: W.
            group: the process group, whose members have met; None for a group of one.
            size: numbers of a row, the same on all ranks.
        """
        self._rows = torch.zeros(world_size, size, dtype=torch.float64)
        self._all = self._rows.numpy()
        self._mine = self._all[rank]
        self._links = links_of(group) if group is not None else None
        self._rounds = rows_plan(rank, self._links.small_shape) if self._links else ()

    def start(self, values: Sequence[float]) -> None:
        """Send ours; returns at once."""
        fill_row(self._mine, values)
        if self._links is not None:
            for one in self._rounds:
                for source, ranks in one.receives:
                    self._links.sockets.expect(source, TAG, [self._bytes(ranks)])
            self._send(self._links, self._rounds[0])

    def finish(self) -> list[Row]:
        """Return everyone's, by rank; RuntimeError if the group broke."""
        if self._links is not None:
            for number, one in enumerate(self._rounds):
                if number:
                    self._send(self._links, one)
                for source, _ in one.receives:
                    self._links.sockets.wait(source, TAG)
            self._links.sockets.flush()
        return [tuple(row) for row in self._rows.tolist()]

    def _send(self, links: MemberLinks, one: RowsRound) -> None:
        for other in one.sends:
            links.sockets.send(other, TAG, [self._bytes(one.held)])

    def _bytes(self, ranks: Span) -> memoryview:
        return self._all[slice(*ranks)].reshape(-1).view("uint8").data


def send_metadata(group: Any, values: Sequence[float]) -> list[Row]:
    """Exchange a few numbers at once, and return everyone's by rank.

    Args:
        group: the process group that is formed, whose members have met.
        values: at most `ROW`; all others are zeros.

    Raises:
        RuntimeError: the group broke.
    """
    exchange = MetadataExchange(group.rank(), group.size(), group if group.size() > 1 else None)
    exchange.start(values)
    return exchange.finish()

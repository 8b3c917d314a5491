"""What one rank has to do in one step, and what each micro-batch counts.

Rule: a micro-batch counts by its samples, and the sum is divided by all samples of the step.
Where those are not known before, ranks tell them with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from elastic.core.policy.cursor import Cursor, Epochs
from elastic.core.policy.microbatch import Span, deal
from elastic.core.policy.streams import Streams
from elastic.errors import UsageError
from elastic.worker.rows import Row
from elastic.worker.tree_exchange import Deal

TOLD = 2
"""Numbers that a share tells with the gradients: its samples, and whether more follow."""


@dataclass(frozen=True)
class Share:
    """What a rank has to do in a step.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: W, at most V.
        num_micro_batches: V.
        micro_batch: samples of a full micro-batch.
        counts: samples of each of the V micro-batches of this step; fewer in a ragged last one.
    """

    rank: int
    world_size: int
    num_micro_batches: int
    micro_batch: int
    counts: tuple[int, ...]

    @cached_property
    def held(self) -> Span:
        """Return the micro-batches that this rank computes."""
        return deal(self.rank, self.world_size, self.num_micro_batches)

    @cached_property
    def samples(self) -> int:
        """Return the samples of the step."""
        return sum(self.counts)

    @cached_property
    def is_full(self) -> bool:
        """Return whether every micro-batch is."""
        return all(count == self.micro_batch for count in self.counts)

    def weight(self, number: int) -> float | None:
        """Return the factor of a micro-batch's mean gradient; None if it does not count."""
        count = self.counts[number]
        return count / self.micro_batch if count else None

    @cached_property
    def deal(self) -> Deal:
        """Return how the micro-batches are dealt out."""
        return Deal(self.rank, self.world_size, self.num_micro_batches)

    def told(self) -> tuple[float, float]:
        """Return what the others must know; nothing, for everyone knows all counts."""
        return 0.0, 0.0

    @property
    def divisor(self) -> float:
        """Return what the sum over all micro-batches is divided by: full ones in the step.

        One division by a number of their size, because gradients of half precision would not
        survive one by all samples.
        """
        return self.samples / self.micro_batch

    @staticmethod
    def of(epochs: Epochs, step: int, *, rank: int, world_size: int) -> Share:
        """Return a rank's share of a step of these epochs; full steps have the same."""
        is_full = epochs.step_size(step) == epochs.global_batch
        return _share_of(epochs, 0 if is_full else step, rank, world_size)


@lru_cache(maxsize=16)
def _share_of(epochs: Epochs, step: int, rank: int, world_size: int) -> Share:
    spans = (epochs.positions(step, number) for number in range(epochs.num_micro_batches))
    return Share(
        rank=rank,
        world_size=world_size,
        num_micro_batches=epochs.num_micro_batches,
        micro_batch=epochs.micro_batch,
        counts=tuple(last - first for first, last in spans),
    )


class StreamShare:
    """The same in a step of streams, whose counts come with the micro-batches.

    Attributes:
        deal: how the micro-batches are dealt out.
        held: the micro-batches that this rank computes.
        counts: samples of each micro-batch; 0 for those that are not ours, or not read yet.
        samples: of the step; 0 until all ranks were heard.
    """

    def __init__(
        self,
        streams: Streams,
        cursor: Cursor,
        end: Callable[[int, int], None],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Begin with nothing read.

        Args:
            streams: how the data is cut.
            cursor: the step.
            end: told (epoch, steps) once it is known that the epoch ends with this step.
            rank: ours.
            world_size: W, at most V.
        """
        self._streams, self._cursor, self._end = streams, cursor, end
        self.deal = Deal(rank, world_size, streams.num_micro_batches)
        self.held = deal(rank, world_size, streams.num_micro_batches)
        self.counts = [0] * streams.num_micro_batches
        self.samples = 0
        self._goes_on: dict[int, bool] = {}

    def note(self, number: int, count: int, more: bool) -> None:
        """Take what is known of a micro-batch of ours; before it is computed.

        Args:
            number: of the micro-batch, and of its stream.
            count: its samples.
            more: the stream does not end the epoch with this step.
        """
        self.counts[number] = count
        self._goes_on[number] = more

    def weight(self, number: int) -> float | None:
        """Return the factor of a micro-batch's mean gradient; None if it does not count."""
        count = self.counts[number]
        return count / self._streams.micro_batch if count else None

    def told(self) -> tuple[float, float]:
        """Return what the others must know: our samples, and whether our streams go on."""
        return float(sum(self.counts)), float(self._streams.has_next(self._goes_on.values()))

    def hear(self, told: Sequence[Row]) -> float:
        """Take what all ranks have told, by rank; return the divisor.

        Raises:
            UsageError: the step has no samples, or is not full and only full ones count.
        """
        streams, cursor = self._streams, self._cursor
        self.samples = int(sum(row[0] for row in told))
        if not self.samples or (streams.drop_last and self.samples < streams.global_batch):
            few = "drop_last leaves no such step: " if streams.drop_last else ""
            raise UsageError(
                f"prepare_data_loader: {few}step {cursor.step} of epoch {cursor.epoch} has "
                f"{self.samples} samples of {streams.global_batch} in {streams.num_micro_batches} "
                f"streams: the dataset yields too few of them, or fewer than when it was read first"
            )
        if not streams.has_next(row[1] > 0 for row in told):
            self._end(cursor.epoch, cursor.step + 1)
        return self.samples / streams.micro_batch

"""What one rank has to do in one step, and what each micro-batch counts.

Rule: a micro-batch counts by its samples, or by what the loader's `weigh` returns, and the sum
is divided once by what all of the step count. Where that is not known before, ranks send it with
the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan
from elastic.core.policy.microbatch import Span, deal
from elastic.core.policy.streams import StreamPlan
from elastic.errors import UsageError
from elastic.worker.reduce.step_metadata import Row
from elastic.worker.reduce.tree_exchange import MicroBatchPartition

SHARE_NUMBERS = 3
"""Numbers that a share sends with the gradients: what it counts, its samples, whether more follow.
"""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        number: its place in the step, 0 to V - 1.
        count: its samples. 0 in a ragged last step that has none left for it: `value` is then
            that of the step's first samples, so that there is something to compute with.
        value: as the user's collate_fn gave it.
        weight: what it counts in the mean over the step: its samples, or what `weigh` returns.
        more: another step may follow as far as this micro-batch's stream is concerned; of a
            dataset whose samples have numbers it means nothing.
    """

    cursor: Cursor
    number: int
    count: int
    value: Any
    weight: float
    more: bool = False


@dataclass(frozen=True)
class StepShare:
    """What a rank has to do in a step.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: W, at most V.
        num_micro_batches: V.
        micro_batch_size: samples of a full micro-batch.
        counts: samples of each of the V micro-batches of this step; fewer in a ragged last one.
        tokens: 0: what counts are samples.
    """

    tokens = 0

    rank: int
    world_size: int
    num_micro_batches: int
    micro_batch_size: int
    counts: tuple[int, ...]

    @cached_property
    def held(self) -> Span:
        """Return the micro-batches that this rank computes."""
        return deal(self.rank, self.world_size, self.num_micro_batches)

    @cached_property
    def samples(self) -> int:
        return sum(self.counts)

    @cached_property
    def is_full(self) -> bool:
        """Return whether every micro-batch is."""
        return all(count == self.micro_batch_size for count in self.counts)

    def weight(self, number: int) -> float | None:
        """Return the factor of a micro-batch's mean gradient; None if it does not count."""
        count = self.counts[number]
        return count / self.micro_batch_size if count else None

    @cached_property
    def partition(self) -> MicroBatchPartition:
        return MicroBatchPartition(self.rank, self.world_size, self.num_micro_batches)

    def own_row(self) -> tuple[float, float, float]:
        """Return what the others must know; nothing, for everyone knows all counts."""
        return 0.0, 0.0, 0.0

    @property
    def divisor(self) -> float:
        """Return what the sum over all micro-batches is divided by: full ones in the step.

        One division by a number of their size, because gradients of half precision would not
        survive one by all samples.
        """
        return self.samples / self.micro_batch_size

    @staticmethod
    def of(plan: DataPlan, step: int, *, rank: int, world_size: int) -> StepShare:
        is_full = plan.step_size(step) == plan.global_batch
        return _share_of(plan, 0 if is_full else step, rank, world_size)


@lru_cache(maxsize=16)
def _share_of(plan: DataPlan, step: int, rank: int, world_size: int) -> StepShare:
    spans = (plan.positions(step, number) for number in range(plan.num_micro_batches))
    return StepShare(
        rank=rank,
        world_size=world_size,
        num_micro_batches=plan.num_micro_batches,
        micro_batch_size=plan.micro_batch_size,
        counts=tuple(last - first for first, last in spans),
    )


class WeighedShare:
    """The same in a step whose micro-batches define what they count, once they are read.

    Attributes:
        partition: how the micro-batches are dealt out.
        held: the micro-batches that this rank computes.
        counts: samples of each micro-batch; 0 for those that are not ours, or not read yet.
        samples: of the step; 0 until all ranks have sent theirs.
        tokens: that it counts by `weigh`; 0 until then, or if those are its samples.
    """

    def __init__(
        self,
        cursor: Cursor,
        micro_batch_size: int,
        *,
        rank: int,
        world_size: int,
        num_micro_batches: int,
    ) -> None:
        self._cursor, self._micro_batch_size = cursor, micro_batch_size
        self.partition = MicroBatchPartition(rank, world_size, num_micro_batches)
        self.held = deal(rank, world_size, num_micro_batches)
        self.counts = [0] * num_micro_batches
        self.samples, self.tokens = 0, 0
        self._weights: dict[int, float] = {}
        self._goes_on: dict[int, bool] = {}

    def note(self, number: int, count: int, weight: float, more: bool = False) -> None:
        """Take what is known of a micro-batch of ours; before it is computed.

        Sums of weights are exact, so that their order is no matter. `more`: its stream does not end
        the epoch with this step.
        """
        self.counts[number], self._weights[number] = count, weight
        self._goes_on[number] = more

    def weight(self, number: int) -> float | None:
        weight = self._weights[number]
        return weight / self._micro_batch_size if weight else None

    def own_row(self) -> tuple[float, float, float]:
        more = float(any(self._goes_on.values()))
        return sum(self._weights.values()), float(sum(self.counts)), more

    def take_rows(self, rows: Sequence[Row]) -> float:
        """Take what all ranks have sent, by rank; return the divisor.

        UsageError if nothing counts.
        """
        self.samples = int(sum(row[1] for row in rows))
        weight = sum(row[0] for row in rows)
        self.tokens = int(weight) if weight != self.samples else 0
        if not weight:
            raise UsageError(
                f"prepare_data_loader(weigh=...): no micro-batch of step {self._cursor.step} of "
                f"epoch {self._cursor.epoch} counts anything: weigh has returned 0 for all of its "
                f"{self.samples} samples; leave such samples out of the data set"
            )
        return weight / self._micro_batch_size


class StreamShare(WeighedShare):
    """The same in a step of streams, of which no one knows before how many samples it has."""

    def __init__(
        self,
        streams: StreamPlan,
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
            end: called with (epoch, steps) once it is known that the epoch ends with this step.
            rank: ours.
            world_size: W, at most V.
        """
        super().__init__(
            cursor,
            streams.micro_batch_size,
            rank=rank,
            world_size=world_size,
            num_micro_batches=streams.num_micro_batches,
        )
        self._streams, self._end = streams, end

    def own_row(self) -> tuple[float, float, float]:
        """Return what the others must know, such as whether our streams continue."""
        weight, samples, _ = super().own_row()
        return weight, samples, float(self._streams.has_next(self._goes_on.values()))

    def take_rows(self, rows: Sequence[Row]) -> float:
        """Take what all ranks have sent, by rank; return the divisor.

        UsageError if the step has no samples, or is not full and only full ones count.
        """
        streams, cursor = self._streams, self._cursor
        samples = int(sum(row[1] for row in rows))
        if not samples or (streams.drop_last and samples < streams.global_batch):
            few = "drop_last leaves no such step: " if streams.drop_last else ""
            raise UsageError(
                f"prepare_data_loader: {few}step {cursor.step} of epoch {cursor.epoch} has "
                f"{samples} samples of {streams.global_batch} in {streams.num_micro_batches} "
                f"streams: the dataset yields too few of them, or fewer than when it was read first"
            )
        if not streams.has_next(row[2] > 0 for row in rows):
            self._end(cursor.epoch, cursor.step + 1)
        return super().take_rows(rows)

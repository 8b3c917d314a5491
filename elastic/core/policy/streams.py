"""How a dataset without numbers is cut into streams, and when its epoch is over: pure functions.

A dataset that can only be iterated over is read as V streams, one for each micro-batch of a step.

Rule: micro-batch v of every step is the next samples of stream v, so that what it contains depends
on (run, epoch, step, v) and on nothing else. So the position of every stream follows from the
cursor, and the next reader of a stream can count up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from elastic.core.policy.data_plan import DataPlan
from elastic.core.policy.seeds import derive
from elastic.errors import ConfigError, check

STREAM = 4
"""Purpose of the seeds of what streams draw, beside those in cursor.py and the loader's."""
ITERATOR, COLLATE = 0, 1
"""So that a micro-batch of one sample is not collated with the numbers that the sample had."""


class StreamCut(Enum):
    """How a dataset becomes V streams."""

    COUNT = "count"
    """It is read as one sequence, and stream v takes its samples v, v + V, v + 2 V, ..."""
    SHARD = "shard"
    """It cuts itself: stream v is `dataset.shard(num_shards=V, index=v)`."""
    WORKER = "worker"
    """It deals itself out by torch's `get_worker_info()`: stream v is what number v of V sees."""


@dataclass(frozen=True)
class StreamPlan:
    """How a dataset is cut into streams, in every epoch alike.

    Attributes:
        micro_batch_size: samples of one micro-batch; >= 1.
        num_micro_batches: V, of one step, and the number of streams; >= 1.
        seed: of everything that is random while samples are read.
        drop_last: an epoch ends before the first step that is not full; otherwise behind the last
            step that has any sample.
    """

    micro_batch_size: int
    num_micro_batches: int
    cut: StreamCut = StreamCut.COUNT
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        if min(self.micro_batch_size, self.num_micro_batches) < 1:
            raise ConfigError(
                f"micro-batches of {self.micro_batch_size} samples, {self.num_micro_batches} of "
                f"them in a step: expected at least 1 of each"
            )

    @property
    def global_batch(self) -> int:
        """Return B, the samples of a full step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def stride(self) -> int:
        """Return how many streams take turns in one sequence of samples."""
        return self.num_micro_batches if self.cut is StreamCut.COUNT else 1

    @property
    def fingerprint(self) -> int:
        """Return a number that is equal where data is cut in the same way; 0 < it < 2**63."""
        kind = list(StreamCut).index(self.cut)
        sizes = (self.micro_batch_size, self.num_micro_batches, kind, int(self.drop_last))
        return derive(self.seed, STREAM, *sizes) | 1

    def sequence_of(self, stream: int) -> int:
        check(0 <= stream < self.num_micro_batches, f"stream {stream}")
        return 0 if self.cut is StreamCut.COUNT else stream

    def beginning(self, step: int) -> int:
        """Return the place in every sequence where a step begins."""
        return step * self.micro_batch_size * self.stride

    def places(self, step: int, stream: int) -> range:
        """Return the places in its sequence that a stream's micro-batch of a step takes."""
        offset = stream % self.stride
        return range(self.beginning(step) + offset, self.beginning(step + 1), self.stride)

    def reporting_place(self, step: int, stream: int) -> int:
        """Return the place that must be there for the next step, as far as this stream knows."""
        following = self.places(step + 1, stream)
        return following[-1] if self.drop_last else following[0]

    def pass_seed(self, epoch: int, sequence: int) -> int:
        """Return the seed of a pass over a sequence; derived with a place, it is a sample's."""
        return derive(self.seed, STREAM, epoch, sequence, ITERATOR)

    def collate_seed(self, epoch: int, step: int, stream: int) -> int:
        """Return the seed of everything random while a micro-batch is collated."""
        return derive(self.seed, STREAM, epoch, step, stream, COLLATE)

    def has_next(self, has_places: Iterable[bool]) -> bool:
        """Return whether another step follows in this epoch.

        Args:
            has_places: for each stream, or for some together, whether its next place is there.
        """
        return all(has_places) if self.drop_last else any(has_places)


Data = DataPlan | StreamPlan
"""How data is cut into steps and micro-batches: by numbers, or by streams."""


@dataclass(frozen=True)
class StreamPosition:
    """Where a snapshot of a sequence was taken.

    Attributes:
        epoch: passes over the data before this one.
        step: it continues with the first sample of this step.
    """

    epoch: int
    step: int
    sequence: int


def nearest(positions: Sequence[StreamPosition], wanted: StreamPosition) -> int | None:
    """Return the index of the snapshot to continue from, None to begin at the first sample.

    It is the last one of the same epoch and sequence that is not behind the wanted step; what lies
    between them is counted.
    """
    fits = [
        (one.step, index)
        for index, one in enumerate(positions)
        if (one.epoch, one.sequence) == (wanted.epoch, wanted.sequence) and one.step <= wanted.step
    ]
    return max(fits)[1] if fits else None

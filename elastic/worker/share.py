"""What one rank has to do in one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from elastic.core.policy.cursor import Epochs
from elastic.core.policy.microbatch import Span, deal
from elastic.worker.tree_exchange import Deal


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

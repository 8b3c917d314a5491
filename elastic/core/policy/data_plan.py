"""How data is cut into steps, and the samples of a micro-batch: pure functions.

Rule: in one plan, sample ids depend on (seed, epoch, step, micro-batch) and on nothing else: not on
the world size, the past, or the caller. So any position of any epoch is directly accessible, and
nothing about data has to be saved.

Epochs, steps, micro-batches, ranks and sample ids count from 0. V, the micro-batches of a step, is
the global batch divided by the loader's batch size (`train.loaders.num_micro_batches`); without a
global batch it is the largest number of workers. The run keeps it at every world size. For example
the samples of rank 1 of 3, in step 7 of epoch 2, of 1000 samples in micro-batches of 4, V=8, so
B=32:

    deal(1, 3, 8)           (3, 6)           its micro-batches are 3, 4 and 5 (`policy.microbatch`)
    plan.positions(7, 3)    (236, 240)       of the epoch's order, from 7 * 32 + 3 * 4 on
    plan.samples(2, 7, 3)   137, 507, ...    what the permutation of (seed 0, epoch 2) has there

The permutation is a balanced Feistel network with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002): random access, no memory. Its arithmetic is written so that it
works on integers and on NumPy's uint64 arrays alike, for computing many at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.core.policy.microbatch import Span
from elastic.core.policy.seeds import MASK_32, derive, shuffle_seed
from elastic.errors import ConfigError, check

ROUNDS = 6
LEAST = 2
"""Least samples of a micro-batch, if possible: BatchNorm cannot train on a single vector."""


@dataclass(frozen=True)
class DataPlan:
    """How a data set is cut into steps and micro-batches, in every epoch alike.

    Attributes:
        num_samples: N, of the data set; >= 1.
        micro_batch_size: samples of one micro-batch; >= 1.
        num_micro_batches: V, of one step; >= 1.
        seed: of the permutation.
        shuffle: False for the order of the data set.
        drop_last: leave out the last step of an epoch if it is not full.
        order: checksum of the present epoch's order where a sampler gives it, 0 for none.
    """

    num_samples: int
    micro_batch_size: int
    num_micro_batches: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    order: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if min(self.num_samples, self.micro_batch_size, self.num_micro_batches) < 1:
            raise ConfigError(
                f"{self.num_samples} samples in micro-batches of {self.micro_batch_size}, "
                f"{self.num_micro_batches} of them in a step: expected at least 1 of each"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ConfigError(
                f"drop_last leaves no step at all: the data set has {self.num_samples} samples, "
                f"the global batch {self.global_batch}; use drop_last=False or a smaller batch"
            )

    @property
    def global_batch(self) -> int:
        """Return B, the samples of a full step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def steps(self) -> int:
        whole, remaining = divmod(self.num_samples, self.global_batch)
        return whole + (1 if remaining and not self.drop_last else 0)

    def step_size(self, step: int) -> int:
        """Return the samples of a step: B, or less in the last one of an epoch."""
        check(0 <= step < self.steps, f"step {step} of {self.steps}")
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def positions(self, step: int, number: int) -> Span:
        """Return the places in the epoch's order that a micro-batch takes; may be empty.

        A ragged last step is spread evenly over as many micro-batches as have `LEAST` samples each;
        the others have none.
        """
        check(0 <= number < self.num_micro_batches, f"micro-batch {number}")
        size, start = self.step_size(step), step * self.global_batch
        needed = -(-size // self.micro_batch_size)
        filled = min(self.num_micro_batches, max(needed, size // LEAST))
        first = min(number, filled) * size // filled
        last = min(number + 1, filled) * size // filled
        return start + first, start + last

    def stand_in(self, step: int) -> Span:
        """Return the positions of the placeholder samples for a micro-batch without samples."""
        start = step * self.global_batch
        return start, start + min(LEAST, self.micro_batch_size, self.step_size(step))

    def samples(self, epoch: int, step: int, number: int) -> tuple[int, ...]:
        """Return the sample ids of a micro-batch; empty ones exist in a ragged last step only."""
        first, last = self.positions(step, number)
        if not self.shuffle:
            return tuple(range(first, last))
        permutation = Permutation(self.num_samples, shuffle_seed(self.seed, epoch))
        return tuple(permutation.at(position) for position in range(first, last))


@dataclass(frozen=True)
class Permutation:
    """A permutation of the numbers below `size`, chosen by a seed; nothing is stored.

    Attributes:
        size: >= 1.
        seed: 0 <= seed < 2**63.
    """

    size: int
    seed: int

    def at(self, position: int) -> int:
        """Return the number at a position."""
        check(0 <= position < self.size, f"position {position} of {self.size}")
        value = int(self.encipher(position))
        while value >= self.size:
            value = int(self.encipher(value))
        return value

    @property
    def half_bits(self) -> int:
        """Return the bits of one half of the network's block; the block holds 0 to size - 1."""
        return max(1, ((self.size - 1).bit_length() + 1) // 2)

    def encipher(self, value: Any) -> Any:
        """Return the image under the network, which may be `size` or more.

        Args:
            value: an integer, or a NumPy array of uint64.
        """
        bits = self.half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for number in range(ROUNDS):
            key = derive(self.seed, number) & MASK_32
            left, right = right, left ^ (_mix_32(right ^ key) & mask)
        return (left << bits) | right


def _mix_32(value: Any) -> Any:
    """Return 32 bits that each depend on all of the value's (the constants are C. Wellons')."""
    value = value & MASK_32
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK_32
    value = ((value ^ (value >> 15)) * 0x846CA68B) & MASK_32
    return value ^ (value >> 16)

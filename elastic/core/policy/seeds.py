"""The seeds of everything random: pure functions of the run's seed and the position in the run.

Rule: a purpose has a number of its own, so that no two seeds are ever derived alike.
"""

from __future__ import annotations

from elastic.core.policy.cursor import Cursor

MASK_64 = (1 << 64) - 1
MASK_32 = (1 << 32) - 1
SEED_BITS = 63
"""Seeds fit into a signed 64-bit integer, which torch's generators take."""


def derive(seed: int, *parts: int) -> int:
    """Return a seed for one purpose, such as (epoch, step, micro-batch); 0 <= it < 2**63.

    SplitMix64's finalizer (Steele, Lea, Flood, 2014) over the parts, one after the other.
    """
    state = _mix_64(seed & MASK_64)
    for part in parts:
        state = _mix_64((state + 0x9E3779B97F4A7C15) & MASK_64 ^ _mix_64(part & MASK_64))
    return state & ((1 << SEED_BITS) - 1)


def _mix_64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


# Purposes that seeds are derived for, so that no two of them ever meet; 4 is `streams.STREAM`.
SHUFFLE, DROPOUT, AUGMENT, STEP, EVALUATION, EPOCH = 0, 1, 2, 5, 6, 7
STEP_BEGIN, GRADIENTS = 10, 11


def shuffle_seed(seed: int, epoch: int) -> int:
    return derive(seed, SHUFFLE, epoch)


def micro_batch_seed(seed: int, cursor: Cursor, number: int) -> int:
    """Return the seed of everything random in the training process during a micro-batch."""
    return derive(seed, DROPOUT, cursor.epoch, cursor.step, number)


def step_seed(seed: int, cursor: Cursor, shard: int = 0) -> int:
    """Return the seed of everything random while a step changes the weights, or a shard of them."""
    return derive(seed, STEP, cursor.epoch, cursor.step, shard)


def step_begin_seed(seed: int, cursor: Cursor) -> int:
    """Return the seed of everything random in the code with which a whole step begins."""
    return derive(seed, STEP_BEGIN, cursor.epoch, cursor.step)


def gradients_seed(seed: int, cursor: Cursor, shard: int = 0) -> int:
    """Return the seed of everything random that is done to gradients of a step, or a shard's."""
    return derive(seed, GRADIENTS, cursor.epoch, cursor.step, shard)


def epoch_seed(seed: int, epoch: int, *, is_over: bool) -> int:
    """Return the seed of everything random at the head of an epoch, or behind its pass."""
    return derive(seed, EPOCH, epoch, is_over)


def evaluation_seed(seed: int, cursor: Cursor, number: int) -> int:
    """Return the seed of an evaluation pass, the `number`th at this place in the run."""
    return derive(seed, EVALUATION, cursor.epoch, cursor.step, number)


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed of everything random while a sample is read and transformed."""
    return derive(seed, AUGMENT, epoch, sample)

"""What is random, without an import of torch: this process's generators, and permutations.

A feeder is started with this, for which a user's functions may need no torch: its import takes
seconds of a processor.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.core.policy.data_plan import Permutation
from elastic.core.policy.seeds import MASK_32


def seed_everything(seed: int) -> None:
    """Seed all of this process's generators: torch's (CPU, CUDA once it is in use), NumPy, random.

    7 µs without CUDA; `torch.manual_seed` alone takes more than ten times as long, because it asks
    every backend there could be.

    Args:
        seed: 0 <= seed < 2**63. NumPy takes the lower 32 bits.
    """
    torch = _imported_torch()
    if torch is not None:
        torch.default_generator.manual_seed(seed)
    for generator in _cuda_generators(torch):
        generator.manual_seed(seed)
    np.random.seed(seed & MASK_32)
    random.seed(seed)


class RandomStates:
    """The states of all of this process's generators."""

    def __init__(self) -> None:
        torch = _imported_torch()
        self._of_torch = [torch.default_generator] if torch is not None else []
        self._of_torch += _cuda_generators(torch)
        self._torch_states = [generator.get_state() for generator in self._of_torch]
        self._states = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        for generator, state in zip(self._of_torch, self._torch_states, strict=True):
            generator.set_state(state)
        np.random.set_state(self._states[0])
        random.setstate(self._states[1])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all of this process's generators for the block, and restore their states afterwards."""
    before = RandomStates()
    seed_everything(seed)
    try:
        yield
    finally:
        before.restore()


def _imported_torch() -> Any:
    """Return torch, None where nothing has imported it, and so nothing can have drawn from it."""
    return sys.modules.get("torch")


def _cuda_generators(torch: Any) -> tuple[Any, ...]:
    return (
        torch.cuda.default_generators if torch is not None and torch.cuda.is_initialized() else ()
    )


def permuted(permutation: Permutation, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the numbers at many positions at once: for each the same as `permutation.at`."""
    numbers: NDArray[np.uint64] = permutation.encipher(positions)
    outside = np.flatnonzero(numbers >= permutation.size)
    while outside.size:
        numbers[outside] = permutation.encipher(numbers[outside])
        outside = outside[numbers[outside] >= permutation.size]
    return numbers

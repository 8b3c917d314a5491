"""What order a sampler of the user's gives to an epoch: the same on every rank, whenever asked.

Samplers draw from generators in their attributes, or from torch's, NumPy's or Python's own. All of
these are seeded for the epoch while one is asked, and are afterwards as they were.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from elastic.core.policy.seeds import MASK_32, derive
from elastic.errors import UsageError
from elastic.worker.data.attributes import attributes_print
from elastic.worker.data.randomness import seeded

SAMPLER = 4
"""Purpose of these seeds, beside those in cursor.py and feed.py."""
KEPT = 2
"""Epochs whose order is kept: the end of one is read while the next one is prefetched."""


class OrderedSampler(ABC):
    """A sampler whose order of any epoch can be asked for at once; it has a length."""

    @abstractmethod
    def of(self, epoch: int) -> Sequence[Any]:
        """Return what the dataset is asked for, by place in the epoch."""

    @abstractmethod
    def print(self, epoch: int) -> int:
        """Return a number of 32 bits that differs where the order of an epoch does."""


class SamplerOrders(OrderedSampler):
    """The orders of a sampler that has a length, and whose numbers cannot be asked for by place."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed, self._size = sampler, seed, len(sampler)
        # By epoch: the order, a checksum of it, and what the sampler was when it was asked.
        self._known: dict[int, tuple[list[Any], int, int]] = {}

    def __len__(self) -> int:
        return self._size

    def of(self, epoch: int) -> Sequence[Any]:
        """Return the order of an epoch; UsageError if it is longer or shorter than the sampler."""
        if epoch not in self._known:
            if callable(getattr(self._sampler, "set_epoch", None)):
                self._sampler.set_epoch(epoch)
            with _seeded(derive(self._seed, SAMPLER, epoch), self._sampler):
                # A batch sampler may fill one list again and again.
                order = [one if isinstance(one, int) else copy(one) for one in self._sampler]
            if len(order) != self._size:
                raise UsageError(
                    f"prepare_data_loader: the sampler ({type(self._sampler).__name__}) gave "
                    f"{len(order)} samples in epoch {epoch}, and its length was {self._size}: "
                    f"give it a __len__ that holds in every epoch, or use "
                    f"torch.utils.data.Subset and shuffle="
                )
            while len(self._known) >= KEPT:
                del self._known[min(self._known)]
            print_ = zlib.crc32(repr(order).encode())
            self._known[epoch] = order, print_, attributes_print([self._sampler])
        return self._known[epoch][0]

    def refresh(self, epoch: int) -> bool:
        """Ask for an order again if the sampler has changed since; return whether it has."""
        known = self._known.get(epoch)
        if known is None or known[2] == attributes_print([self._sampler]):
            return False
        del self._known[epoch]
        return self.print(epoch) != known[1]

    def print(self, epoch: int) -> int:
        """Return a number that differs where the order of an epoch does."""
        self.of(epoch)
        return self._known[epoch][1]


@contextmanager
def _seeded(seed: int, sampler: Any) -> Iterator[None]:
    """Have everything that a sampler may draw from seeded, and put back afterwards."""
    with ExitStack() as afterwards:
        for one in _generators_of(sampler):
            _seed(one, seed, afterwards)
        with seeded(seed):
            yield


def _generators_of(sampler: Any) -> Iterator[Any]:
    """Yield what a sampler, and samplers in it, keep in their attributes."""
    samplers = [sampler]
    for one in samplers:
        yield getattr(one, "generator", None)  # Also of a class, or a property.
        for value in getattr(one, "__dict__", {}).values():
            if isinstance(value, Sampler) and all(value is not known for known in samplers):
                samplers.append(value)
            yield value


def _seed(generator: Any, seed: int, afterwards: ExitStack) -> None:
    """Seed a generator of torch's, NumPy's or Python's; anything else is left alone."""
    if isinstance(generator, torch.Generator):
        afterwards.callback(generator.set_state, generator.get_state())
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        afterwards.callback(setattr, bits, "state", bits.state)
        bits.state = type(bits)(seed).state  # type: ignore[call-arg]
    elif isinstance(generator, np.random.RandomState):
        afterwards.callback(generator.set_state, generator.get_state())
        generator.seed(seed & MASK_32)
    elif isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        afterwards.callback(generator.setstate, generator.getstate())
        generator.seed(seed)

"""Whether members have registered the same: a small sample of what must be alike on all of them.

Each member writes a part of the state, some rows of a tensor each. What the engine keeps alike
(models, optimizers) fits together; what a script has registered and lets differ by rank would
become a mix of everybody's rows, and nobody's state.

Rule: a sample costs microseconds, so that the training loop can pay for it; it finds values that
differ throughout, as those that belong to one rank do, and not one element among millions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from elastic.worker.dtensor import is_dtensor

ELEMENTS = 64
"""Of each tensor that are looked at, evenly spread."""
TENSORS = 64
"""Of each registered object that are looked at, evenly spread."""


def registered_prints(state: Any) -> dict[str, int]:
    """Return a checksum of a sample of the tensors of each registered object, by its name.

    Args:
        state: of the run, as `Keeper.take` returns it.
    """
    objects = state.get("objects") if isinstance(state, Mapping) else None
    registered = objects.get("registered") if isinstance(objects, Mapping) else None
    prints = {}
    for name, value in (registered or {}).items():
        tensors = list(_tensors_in(value))
        if tensors:
            prints[name] = _print_of(tensors)
    return prints


def combined(prints: Mapping[str, int]) -> int:
    """Return one number for all, 0 for none."""
    return zlib.crc32(repr(sorted(prints.items())).encode()) if prints else 0


def differing(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """Return the names of registered objects that are not alike."""
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def _print_of(tensors: list[torch.Tensor]) -> int:
    sample = tensors[:: -(-len(tensors) // TENSORS)]
    crc = 0
    for tensor in sample:
        # A view where the memory allows it; small things may be copied.
        flat = tensor.detach()
        if flat.is_contiguous():
            flat = flat.view(-1)
            flat = flat[:: max(1, -(-flat.numel() // ELEMENTS))]
        else:
            flat = flat[:1].reshape(-1)[:ELEMENTS]
        data = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        crc = zlib.crc32(data, crc)
    return crc


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield tensors and arrays in nested containers, in order; but for sharded ones."""
    if is_dtensor(value):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)

"""Whether members have the same state: checksums of what must be alike on all of them.

Each member writes a part of the state, some rows of a tensor each. Where ranks differ, it would
become a mix of all members' rows, and the state of none.

Rule: all of it is checked, once for each snapshot, which costs less than copying it does. What is
sharded differs, and buffers that are not part of a `state_dict` may.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from elastic.worker.state import checksums
from elastic.worker.state.dtensor import is_dtensor


class PerRankState(NamedTuple):
    """What each rank may have for itself.

    Attributes:
        tensors: names of tensors, by model.
        registered: names of registered objects.
    """

    tensors: Sequence[Collection[str]] = ()
    registered: Collection[str] = ()


NOTHING_OWN = PerRankState()


def state_prints(state: Any, own: PerRankState) -> dict[str, int]:
    """Return checksums of prepared and registered objects, but `own`, by names for people."""
    objects = state.get("objects") if isinstance(state, Mapping) else None
    if not isinstance(objects, Mapping):
        return {}
    prints = {}
    for number, model in enumerate(objects.get("models") or ()):
        caches = own.tensors[number] if number < len(own.tensors) else ()
        prints[f"model {number}"] = _print_of({k: v for k, v in model.items() if k not in caches})
    prints["parameters of no prepared model"] = _print_of(objects.get("loose"))
    for number, optimizer in enumerate(objects.get("optimizers") or ()):
        prints[f"optimizer {number}"] = _print_of(optimizer)
    for name, value in (objects.get("registered") or {}).items():
        if name in own.registered:
            continue
        with suppress(Exception):  # What cannot be saved is reported where it is packed.
            prints[f"registered {name}"] = checksums.values_print(value)
    return prints


def _print_of(value: Any) -> int:
    """Return a checksum of all tensors in nested containers."""
    return checksums.combined(checksums.checksums(list(_tensors_in(value))))


def combined(prints: Mapping[str, int]) -> int:
    """Return one number for all, 0 for none."""
    return zlib.crc32(repr(sorted(prints.items())).encode()) if prints else 0


def differing(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """Return the names of registered objects that are not alike."""
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


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

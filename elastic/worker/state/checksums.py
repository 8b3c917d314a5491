"""Checksums of tensors and of what else a state holds: 64 bits, at the speed of memory.

Rule: equal values give equal numbers on every rank and device; a flipped bit never does. A sum of
words does not see that they changed places, a CRC is ten times as slow: of what a script has
registered the beginning is checked by one as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastic.worker.state.dtensor import is_dtensor

SHORT_BYTES = 4 << 10
"""Up to here a CRC is faster than NumPy's sum begins."""
MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that differs where any bit of a tensor's values does."""
    if tensor.device.type != "cpu":
        return int(checksum_there(tensor)) & MASK
    return checksum_of(flat_bytes(tensor).numpy())


def checksum_there(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same of a tensor on a device, computed there, without a wait for it."""
    flat = flat_bytes(tensor)
    size = flat.numel() // 8 * 8
    whole = flat[:size].clone() if flat.storage_offset() % 8 else flat[:size]
    total = whole.view(torch.int64).sum() if size else flat.new_zeros((), dtype=torch.int64)
    return total + flat[size:].to(torch.int64).sum() if flat.numel() > size else total


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in the order in which they lie in memory; a view if they can be."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d])).contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def checksum_of(data: NDArray[Any]) -> int:
    """Return the checksum of bytes: of few a CRC, of many the sum of words of 64 bits."""
    if data.size <= SHORT_BYTES:
        return zlib.crc32(data.data)
    size = data.size // 8 * 8
    total = int(np.add.reduce(data[:size].view(np.int64)))
    return (total + zlib.crc32(data[size:].data)) & MASK if data.size > size else total & MASK


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the checksum of each; a device is waited for once."""
    found: dict[int, int] = {}
    there: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, one in enumerate(tensors):
        if one.device.type == "cpu":
            found[index] = checksum(one)
        else:
            there.setdefault(one.device, {})[index] = checksum_there(one)
    for some in there.values():
        numbers = torch.stack(list(some.values())).tolist()
        found.update((index, n & MASK) for index, n in zip(some, numbers, strict=True))
    return [found[index] for index in range(len(tensors))]


def values_print(value: Any) -> int:
    """Return a number that differs where tensors, arrays, numbers or texts in a state do."""
    if is_dtensor(value):
        return 0
    if isinstance(value, torch.Tensor):
        # An order that differs, as of a shuffle, does not change a sum.
        few = flat_bytes(value)[:SHORT_BYTES].cpu().numpy()
        return (checksum(value) * _ODD + zlib.crc32(few.data)) & MASK
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if isinstance(value, Mapping):
        pairs = sorted((str(name), values_print(one)) for name, one in value.items())
        return zlib.crc32(repr(pairs).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([values_print(one) for one in value]).encode())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, int, float, bool)):
        return zlib.crc32(repr(value).encode())
    return 0  # Whatever it is, its text may hold an address.


def combined(numbers: Sequence[int]) -> int:
    """Return one number for all, which knows their places."""
    return sum(one * factor(index) for index, one in enumerate(numbers)) & MASK


def factor(index: int) -> int:
    """Return an odd number for each place, so that equal values in other places differ."""
    return ((2 * index + 1) * _ODD) & MASK | 1

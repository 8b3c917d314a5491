"""Copies of samples, for a collate_fn that changes what it is given.

Rule: no sample is refused. What cannot be copied, or only at the price of reading a whole file, is
shared.
"""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch

PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

Memo = dict[int, tuple[Any, Any]]
"""By the id of what was copied: that itself, so that no other gets its id, and the copy."""


def copied(sample: Any) -> Any:
    """Return a copy of what a collate_fn may change in a sample: containers, tensors and arrays.

    Objects of classes that are none of these are shared, and so is whatever cannot be copied.
    """
    return _copied(sample, {})


def _copied(sample: Any, memo: Memo) -> Any:
    if type(sample) in PLAIN:
        return sample
    known = memo.get(id(sample))
    if known is not None:
        return known[1]
    try:
        return _copy(sample, memo)
    except Exception:
        # If it failed within, there is a copy already, which shares what is further inside.
        return memo.setdefault(id(sample), (sample, sample))[1]


def _copy(sample: Any, memo: Memo) -> Any:
    if isinstance(sample, tuple):
        return _copy_tuple(sample, memo)
    twin = _shallow(sample)
    # Before what is within, which may lead back here.
    memo[id(sample)] = sample, twin
    if twin is sample or isinstance(sample, (torch.Tensor, np.ndarray, bytearray, array)):
        return twin
    if isinstance(twin, dict):
        for key, value in dict.items(twin):
            if type(value) not in PLAIN:
                dict.__setitem__(twin, key, _copied(value, memo))
    # Token ids are lists of thousands of numbers.
    elif isinstance(twin, (list, deque)) and not PLAIN.issuperset(map(type, twin)):
        for place, value in enumerate(twin):
            twin[place] = _copied(value, memo)
    if type(twin) not in (dict, list):
        _copy_attributes(sample, twin, memo)
    return twin


def _copy_tuple(sample: tuple[Any, ...], memo: Memo) -> Any:
    is_named = hasattr(sample, "_make")
    if type(sample) is not tuple and not is_named:
        return sample
    within = [_copied(value, memo) for value in sample]
    if id(sample) not in memo:  # What is within may have led back here.
        make = sample._make if is_named else tuple  # type: ignore[attr-defined]
        is_same = all(one is other for one, other in zip(within, sample, strict=True))
        memo[id(sample)] = sample, sample if is_same else make(within)
    return memo[id(sample)][1]


def _shallow(sample: Any) -> Any:
    """Return a copy that shares what is within, or the sample if it is to be shared."""
    if type(sample) is dict or type(sample) is list:
        return sample.copy()
    if isinstance(sample, torch.Tensor):
        return _copy_tensor(sample)
    if isinstance(sample, np.ndarray):
        # Of a memmap it would be the file, of a broadcast one, which is not writeable, far more
        # than there is.
        is_broadcast = 0 in sample.strides and not sample.flags.writeable
        return sample if is_broadcast or isinstance(sample, np.memmap) else sample.copy()
    if isinstance(sample, (MutableMapping, MutableSequence, MutableSet)):
        return copy.copy(sample)
    return sample


def _copy_tensor(sample: torch.Tensor) -> torch.Tensor:
    if isinstance(sample, torch.nn.Parameter):
        return copy.deepcopy(sample)
    if sample.requires_grad and not sample.is_leaf:
        return sample.clone()
    plain = sample.detach()
    if sample.layout is torch.strided and type(sample) is torch.Tensor:
        size, stride = plain.size(), plain.stride()
        reach = 1 + sum((num - 1) * step for num, step in zip(size, stride, strict=True))
        if 0 < reach < plain.numel():
            # An expanded one, or overlapping windows: as small as it was.
            plain = plain.as_strided((reach,), (1,)).clone().as_strided(size, stride)
            return plain.requires_grad_(sample.requires_grad)
    return plain.clone().requires_grad_(sample.requires_grad)


def _copy_attributes(sample: Any, twin: Any, memo: Memo) -> None:
    """Copy what containers of other classes, such as UserDict, keep their values in."""
    held = getattr(twin, "__dict__", None)
    if isinstance(held, dict) and held is not getattr(sample, "__dict__", None):
        for name, value in list(held.items()):
            held[name] = _copied(value, memo)
    for slot in _slots(type(twin)):
        if hasattr(twin, slot):
            object.__setattr__(twin, slot, _copied(getattr(twin, slot), memo))


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                # As the interpreter spells names that begin with two underscores.
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name

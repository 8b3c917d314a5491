"""Whether a script has changed its dataset or sampler since it was read last.

Rule: what is seen as changed may be the same, at the price of reading it again; what is seen as the
same was not changed, but for what is too large or too deep to be looked at in each epoch.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

SEEN_MAX = 2000
"""Values that are looked at in all, those of nearer objects first; about 1 ms."""
IN_EACH = 100
"""Of a container, beside its length."""
ARRAY_BYTES = 1 << 20
"""Of an array: all of it up to this size, the beginning of a larger one."""


def attributes_print(things: Iterable[Any]) -> int:
    """Return a number of this process that differs where attributes of these objects do.

    What they have as attributes is followed: plain values, tensors, arrays, containers, and the
    attributes of other objects. It is also noted which object each one is.
    """
    ahead, seen, parts = deque(things), set[int](), list[Any]()
    while ahead and len(parts) < SEEN_MAX:
        one = ahead.popleft()
        if one is None or isinstance(one, (bool, int, float, complex, str, bytes)):
            parts.append((type(one), hash(one)))
        elif id(one) in seen:
            parts.append(id(one))
        else:
            seen.add(id(one))
            parts.append((id(one), _within(one, ahead)))
    return hash(tuple(parts))


def _within(one: Any, ahead: deque[Any]) -> Any:
    """Return what is to be noted of an object; what is inside it is looked at later."""
    if isinstance(one, torch.Tensor):
        return one._version
    if isinstance(one, np.ndarray):
        few = one.ravel("K")[: ARRAY_BYTES // max(1, one.itemsize)] if one.flags.forc else one[:0]
        return one.shape, zlib.crc32(few.tobytes())
    if isinstance(one, dict):
        ahead.extend(islice(one.keys(), IN_EACH))
        ahead.extend(islice(one.values(), IN_EACH))
        return len(one)
    if isinstance(one, (list, tuple, set, frozenset, deque)):
        ahead.extend(islice(one, IN_EACH))
        return len(one)
    if not isinstance(one, (type, ModuleType, FunctionType)):
        ahead.append(getattr(one, "__dict__", None))
    return None

"""A nested state as plain values and tensors: what checkpoints, snapshots, transfers consist of.

Nothing is unpickled but plain containers and numbers: tensors travel as bytes, everything around
them through torch's `weights_only` loader.
"""

from __future__ import annotations

import functools
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.errors import UsageError
from elastic.worker.state.dtensor import is_dtensor

PLAIN: tuple[Any, ...] = (bool, int, float, complex, bytes)
PLAIN_SCALARS = (*PLAIN, str)


@dataclass(frozen=True)
class TensorSpec:
    """Stands in the skeleton where a tensor was.

    Attributes:
        number: of the tensor, in the order in which `pack` gives them.
        dtype: such as "float32".
        is_array: it was a NumPy array.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    is_array: bool


def pack(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Split a state into plain values as bytes, and tensors; UsageError as `split`."""
    skeleton, tensors = split(state)
    return write_skeleton(skeleton), tensors


def split(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a nested state into plain values, with a `TensorSpec` for each tensor, and tensors.

    UsageError, naming where, if it holds something that is neither.
    """
    skeleton, tensors, _ = split_and_trace(state)
    return skeleton, tensors


Trace = list[Any]
"""What a walk over a state met: kinds and sizes of containers, keys, types and shapes of tensors.
Equal traces have the same tensors in the same places; values beside them are not in it."""


def split_and_trace(state: Any) -> tuple[Any, list[torch.Tensor], Trace]:
    """Split a state as `split` does, and return its trace too: the training loop waits for this.

    Raises:
        UsageError: it holds something that cannot be sent, naming where.
    """
    tensors: list[torch.Tensor] = []
    trace: Trace = []
    try:
        return _replaced(state, tensors, trace), tensors, trace
    except _Unsendable as error:
        where = "".join(f"[{key!r}]" for key in reversed(error.path))
        raise UsageError(f"state{where}{error.reason}") from error.__cause__


class _Unsendable(Exception):
    """Something that cannot be sent; the path to it is put together on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []


def write_skeleton(skeleton: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    return buffer.getvalue()


def _replaced(value: Any, tensors: list[torch.Tensor], trace: Trace) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _noted(value, tensors, trace)
    if isinstance(value, dict):
        trace += (dict, len(value))
        pairs = []
        for key, one in value.items():
            try:
                name = key if type(key) is str else _plain_key(key)
                trace.append(name)
                pairs.append([name, _replaced(one, tensors, trace)])
            except _Unsendable as error:
                error.path.append(key)
                raise
        return ["dict", pairs]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        trace += (kind, len(value))
        values = []
        for number, one in enumerate(value):
            try:
                values.append(_replaced(one, tensors, trace))
            except _Unsendable as error:
                error.path.append(number)
                raise
        return [kind, values]
    trace.append(None)
    if isinstance(value, np.generic) and isinstance(value.item(), PLAIN_SCALARS):
        if value.dtype.kind in "biufcU":  # Not a moment, nor another package's.
            return ["scalar", value.item(), value.dtype.str]
        return ["value", value.item()]
    if isinstance(value, bytes) and not value:
        return ["empty", None]  # Torch's loader refuses these alone, for how they are pickled.
    if value is None or isinstance(value, (*PLAIN, str)):
        return ["value", _plain(value)]
    if isinstance(value, torch.dtype):  # Torch's loader knows them.
        return ["value", value]
    if isinstance(value, set):
        return ["set", [["value", _plain_key(one)] for one in value]]
    raise _Unsendable(
        f" is a {type(value).__name__}, which cannot be sent to another worker: let "
        f"state_dict return tensors, arrays, numbers, strings and containers of them"
    )


def _noted(value: Any, tensors: list[torch.Tensor], trace: Trace) -> Any:
    """Put a tensor or an array with the others, and return what stands in its place."""
    is_array = isinstance(value, np.ndarray)
    tensor = _tensor_of(value) if is_array else value
    if tensor.layout is not torch.strided:
        raise _Unsendable(
            f": a sparse tensor ({tensor.layout}) cannot be sent to another worker: let "
            f"state_dict return tensor.to_dense()"
        )
    shape = tensor.shape
    trace += (tensor.dtype, shape, is_array)
    tensors.append(tensor.detach())
    node = ["tensor", len(tensors) - 1, _name_of(tensor.dtype), list(shape), is_array]
    return node if is_dtensor(tensor) or tensor.is_contiguous() else [*node, _dense(tensor)]


def _dense(tensor: torch.Tensor) -> list[int]:
    """Return its strides without gaps: another order of the same values gives other last bits."""
    return list(torch.empty_like(tensor, device="meta").stride())


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except (TypeError, ValueError) as error:
        raise _Unsendable(
            f": a NumPy array of {array.dtype} cannot be sent to another worker: let "
            f"state_dict return numbers, or lists of strings"
        ) from error


def _plain(value: Any) -> Any:
    """Return the value without a class of the user's around it, which could not be unpickled."""
    if value is None:
        return None
    if isinstance(value, str):
        return str.__str__(value)  # An enum's own returns something else.
    return next(kind(value) for kind in PLAIN if isinstance(value, kind))


def _plain_key(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_plain_key(one) for one in key)
    key = key.item() if isinstance(key, np.generic) else key
    if key is None or isinstance(key, (*PLAIN, str)):
        return _plain(key)
    raise _Unsendable(
        f": a key or set element of type {type(key).__name__} cannot be sent to another "
        f"worker; use numbers and strings"
    )


def read_skeleton(text: bytes) -> Any:
    """Return the plain values of a state from the bytes of `pack`; runs no code in them."""
    return torch.load(io.BytesIO(text), weights_only=True)


def tensors_of(skeleton: Any) -> list[TensorSpec]:
    """Return what stands in a skeleton for tensors, by number."""
    found: list[TensorSpec] = []

    def walk(node: Any) -> None:
        kind, content = node[0], node[1]
        if kind == "tensor":
            found.append(TensorSpec(content, node[2], tuple(node[3]), node[4]))
        elif kind == "dict":
            for _, value in content:
                walk(value)
        elif kind in ("list", "tuple"):
            for value in content:
                walk(value)

    walk(skeleton)
    return sorted(found, key=lambda one: one.number)


def places_print(skeleton: Any) -> int:
    """Return a number that is equal for skeletons with the same tensors in the same places.

    What stands beside them may differ: only one member reports it.
    """
    found: list[str] = []

    def walk(node: Any, where: str) -> None:
        kind, content = node[0], node[1]
        if kind == "tensor":
            found.append(f"{where}={content}:{node[2]}{node[3]}")
        elif kind == "dict":
            for key, value in content:
                walk(value, f"{where}/{key!r}")
        elif kind in ("list", "tuple"):
            for number, value in enumerate(content):
                walk(value, f"{where}/{number}")

    walk(skeleton, "")
    return zlib.crc32("\n".join(found).encode(errors="surrogatepass"))


def unpack(skeleton: Any, tensors: Sequence[torch.Tensor], *, orders: bool = True) -> Any:
    """Put a state together again.

    If it `orders`, tensors that lay otherwise than by rows are copied to lie so again; without it
    all are those that are given.
    """
    kind, content = skeleton[0], skeleton[1]
    if kind == "tensor":
        tensor = tensors[content]
        if orders and len(skeleton) > 5 and not is_dtensor(tensor):
            ordered = torch.empty_strided(tensor.shape, skeleton[5], dtype=tensor.dtype)
            tensor = ordered.copy_(tensor)
        return tensor.numpy() if skeleton[4] else tensor
    if kind == "dict":
        return {key: unpack(value, tensors, orders=orders) for key, value in content}
    if kind == "scalar":  # Of NumPy's: it computes otherwise than Python's.
        return np.dtype(skeleton[2]).type(content)
    if kind in ("value", "empty"):
        return content if kind == "value" else b""
    values = [unpack(value, tensors, orders=orders) for value in content]
    return {"list": list, "tuple": tuple, "set": set}[kind](values)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def views_of(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """Return the bytes of tensors on the CPU, in place of contiguous ones; empty ones have none."""
    return [bytes_of(tensor).numpy().data for tensor in tensors if tensor.numel()]

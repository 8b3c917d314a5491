"""A dict as the only file of a checkpoint: numbers, text, tensors, and containers of them.

Rule: the file can be read without running code (`weights_only=True`). Values that would need code
are refused on writing, with their place in the dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import StorageError, UsageError

if TYPE_CHECKING:
    import torch

DICT_FILE = "dict.pt"
SCALARS = (type(None), bool, int, float, complex, str, bytes)
DEPTH_MAX = 100


def write_dict(data: Mapping[str, Any], directory: Path) -> None:
    """Write a dict into a directory; UsageError, with the key, if a value cannot be stored."""
    import torch

    if not isinstance(data, Mapping):
        raise UsageError(
            f"Checkpoint.from_dict: got a {type(data).__name__}, expected a dict such as "
            f'{{"model": model.state_dict(), "epoch": 3}}'
        )
    torch.save(
        {key: _plain(value, f"[{key!r}]") for key, value in data.items()}, directory / DICT_FILE
    )


def read_dict(directory: Path) -> dict[str, Any]:
    """Return the dict that a directory holds; tensors are on the CPU.

    Raises:
        UsageError: it holds none.
        StorageError: it cannot be read.
    """
    import torch

    if not (directory / DICT_FILE).is_file():
        raise UsageError(
            f"checkpoint {directory} holds no dict (there is no {DICT_FILE}): it was not made by "
            f"Checkpoint.from_dict; use as_directory()"
        )
    try:
        return dict(torch.load(directory / DICT_FILE, map_location="cpu", weights_only=True))
    except Exception as error:
        raise StorageError(
            f"checkpoint file {directory / DICT_FILE} cannot be read: {error}"
        ) from error


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value in types that can be read back, refusing all others."""
    import torch

    kind = type(value)
    if kind in SCALARS or kind in (torch.dtype, torch.device, torch.Size):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, where)
    if depth >= DEPTH_MAX:
        raise UsageError(f"Checkpoint.from_dict: {where} is nested too deep, or contains itself")
    if kind in (list, tuple, set):
        return kind(_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value))
    if kind in (dict, OrderedDict):
        pairs = (
            (_key(key, where), _plain(item, f"{where}[{key!r}]", depth + 1))
            for key, item in value.items()
        )
        return kind(pairs)
    raise UsageError(
        f"Checkpoint.from_dict: value {where} is a {kind.__module__}.{kind.__qualname__}, which "
        f"cannot be read back without running code; expected numbers, text, bytes, tensors, and "
        f"lists, tuples, sets and dicts of them (an array: torch.from_numpy(a); an object: its "
        f"state_dict())"
    )


def _tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(
            f"Checkpoint.from_dict: value {where} is a {type(value).__qualname__}; expected a "
            f"plain tensor (of a sharded one, save its local part)"
        )
    # torch.save of a view would write all of its storage.
    value = value.detach()
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole else value.clone()


def _key(key: Any, where: str) -> Any:
    if type(key) not in SCALARS:
        raise UsageError(
            f"Checkpoint.from_dict: {where} has a key {key!r} of type {type(key).__qualname__}; "
            f"expected text or a number"
        )
    return key

"""Whether something is a DTensor, or a module of FSDP's, without importing either.

Rule: what is not imported has no objects. torch.distributed.tensor and .fsdp take half as long to
import as torch itself, and neither a driver nor a replicated model ever needs them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs  # mypy has it.


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return _is_a(value, "torch.distributed.tensor", "DTensor")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, without a copy.

    An operation on a DTensor itself may be a collective, for which no other rank may be there.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # With gradients it would be a view of its own, with other counts.
        return tensor.to_local()


def dtensor_class() -> tuple[type, ...]:
    """Return DTensor, or nothing if it is not imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return (kind,) if kind is not None else ()


def is_fsdp(module: object) -> TypeIs[FSDPModule]:
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def is_flat_fsdp(module: object) -> bool:
    """Return whether a module is one of FSDP's first version, with parts of flat parameters."""
    return _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is_a(value: object, module: str, name: str) -> bool:
    loaded: Any = sys.modules.get(module)
    kind = getattr(loaded, name, None)  # Absent while the module is being imported.
    return kind is not None and isinstance(value, kind)

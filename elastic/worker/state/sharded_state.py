"""The share of a tensor that a rank holds: how DTensors of a sharded model lie on their group.

A tensor that `fully_shard` has cut is saved by rows of the whole tensor: each rank writes those it
has, under the tensor's own shape. So what is stored does not depend on who wrote it, and is read at
any world size, by a model that is sharded in another way or not at all.

Rule: which rows a rank answers for follows from the tensor's mesh and placements alone, so that all
members know it of each other without a word.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elastic.core.policy.shares import RowRange, Spread, chunk, merged
from elastic.errors import UsageError
from elastic.worker.state.dtensor import is_dtensor, is_flat_fsdp, is_fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard
    from typing_extensions import TypeIs

Held = tuple[tuple[RowRange, ...] | None, ...]
"""Rows of each tensor of a state that a node has; None for all of them."""
WITH_HELD = "held"


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is cut over ranks, so that none has all of it."""
    return is_dtensor(tensor) and any(
        not placement.is_replicate() for placement in tensor.placements
    )


def has_shards(models: Iterable[nn.Module]) -> bool:
    """Return whether parameters of these models are cut over ranks, also while gathered."""
    return any(
        is_fsdp(module) or any(map(is_sharded, module.parameters(recurse=False)))
        for model in models
        for module in model.modules()
    )


def check_not_flat(model: nn.Module) -> None:
    """Refuse a model that was sharded by FSDP's first version; UsageError if it has such a part."""
    if any(map(is_flat_fsdp, model.modules())):
        raise UsageError(
            "prepare_model: the model is wrapped in FullyShardedDataParallel, whose shards cannot "
            "be saved by themselves: pass the plain model with parallel_strategy='fsdp', or call "
            "fully_shard on it"
        )


def shard(model: nn.Module, device_type: str, options: Mapping[str, Any]) -> None:
    """Let each rank of the group that is formed keep its rows of each parameter.

    Args:
        model: the same on all ranks; it is changed in place.
        device_type: "cpu" or "cuda".
        options: of `fully_shard`, and `modules`: classes of modules that are sharded one by one.

    Raises:
        UsageError: options of another FSDP.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    known = set(inspect.signature(fully_shard).parameters) - {"module"} | {"modules"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(
            f"prepare_model(parallel_strategy='fsdp', parallel_strategy_kwargs=...): "
            f"{', '.join(unknown)}: expected those of torch.distributed.fsdp.fully_shard "
            f"({', '.join(sorted(known))})"
        )
    options = dict(options)
    classes = tuple(options.pop("modules", ()))
    size = torch.distributed.get_world_size()
    options.setdefault("mesh", init_device_mesh(device_type, (size,)))
    # Inner ones first: the outer one takes what is left.
    for module in reversed(list(model.modules())) if classes else ():
        if isinstance(module, classes) and module is not model:
            fully_shard(module, **options)
    fully_shard(model, **options)


def let_ranks_differ(model: nn.Module) -> None:
    """Have parameters that a micro-batch does not use reduced as zeros.

    Otherwise a rank whose forward leaves one out sends less than the others expect.
    """
    if is_fsdp(model) and hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)  # Since torch 2.13.


def put_shards_back(models: Iterable[nn.Module]) -> None:
    """Have `fully_shard` models show their shards, also after an evaluation has gathered them."""
    for model in models:
        for module in model.modules():
            if is_fsdp(module):
                module.reshard()


def check_shards(name: str, tensor: torch.Tensor, world_size: int) -> None:
    """Refuse what cannot be saved and read again at another world size."""
    if not is_dtensor(tensor):
        raise UsageError(
            f"{name} is not sharded, while other parameters are: call fully_shard on the whole "
            f"model too, after its blocks, so that all gradients are reduced"
        )
    placements = tensor.placements
    cuts = [one for one in placements if not one.is_replicate()]
    if len(cuts) != 1 or not _is_plain_cut(cuts[0]) or cuts[0].dim != 0:
        raise UsageError(
            f"{name} is placed as {tuple(placements)}: expected one Shard(0), as fully_shard makes "
            f"it, with or without Replicate() beside it; pass no shard_placement_fn, and no mesh "
            f"of tensor parallelism"
        )
    size = tensor.device_mesh.size()
    if size != world_size:
        raise UsageError(
            f"{name} lies on a mesh of {size} ranks, and the group has {world_size}: let "
            f"fully_shard use a mesh of all ranks"
        )


def answered_by(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank, which is ours, answers for: all of a tensor, or rows; no copy."""
    if not is_dtensor(tensor):
        return tensor
    local, held, spread = tensor.to_local(), rows_of(tensor, rank), spread_of(tensor)
    if held is None or spread is None or held == spread[rank]:
        return local
    return local[spread[rank].first - held.first :][: spread[rank].rows]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """Return the rows that each rank answers for; None if every rank has the whole tensor.

    Copies of one shard, along a `Replicate` dimension of the mesh, answer for parts of it.
    """
    if not is_dtensor(tensor) or not is_sharded(tensor):
        return None
    dim, ranks = _dim_of(tensor), tensor.device_mesh.mesh
    return _spread(tensor.shape[0], tuple(ranks.flatten().tolist()), tuple(ranks.shape), dim)


def rows_of(tensor: torch.Tensor, rank: int) -> RowRange | None:
    """Return the rows that a rank holds of a tensor; None if it has all of it."""
    if not is_dtensor(tensor) or not is_sharded(tensor):
        return None
    dim, mesh = _dim_of(tensor), tensor.device_mesh
    place = (mesh.mesh == rank).nonzero().tolist()
    if not place:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} is not on rank {rank}")
    return chunk(tensor.shape[0], mesh.size(dim), place[0][dim])


def shard_number(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that ranks with the same part of these tensors share, and no others do.

    It is this rank's place along the dimensions of the mesh that the first one that is cut is cut
    over; 0 if none is.
    """
    for tensor in tensors:
        if is_dtensor(tensor) and is_sharded(tensor):
            mesh, number = tensor.device_mesh, 0
            places = mesh.get_coordinate() or [0] * mesh.ndim
            for dim, (place, one) in enumerate(zip(places, tensor.placements, strict=True)):
                if not one.is_replicate():
                    number = number * mesh.size(dim) + place
            return number
    return 0


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return these rows as part of a tensor that lies as this one does."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(tensor.to_local().device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _is_plain_cut(placement: Any) -> TypeIs[Shard]:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def _dim_of(tensor: DTensor) -> int:
    cuts = [n for n, one in enumerate(tensor.placements) if not one.is_replicate()]
    if len(cuts) != 1 or not _is_plain_cut(tensor.placements[cuts[0]]):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} is placed as {tuple(tensor.placements)}, "
            f"which cannot be saved: expected one Shard(0) as fully_shard makes it"
        )
    if tensor.placements[cuts[0]].dim != 0:  # type: ignore[attr-defined]
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} is sharded along dimension "
            f"{tensor.placements[cuts[0]].dim}, which cannot be saved: expected dimension 0"  # type: ignore[attr-defined]
        )
    return cuts[0]


@lru_cache(maxsize=4096)
def _spread(rows: int, ranks: tuple[int, ...], shape: tuple[int, ...], dim: int) -> Spread:
    """Return the rows that each rank answers for of a tensor cut along a dimension of this mesh.

    Of `ranks` the mesh's last dimension changes first.
    """
    places = torch.arange(len(ranks)).reshape(shape).movedim(dim, 0).reshape(shape[dim], -1)
    found = [RowRange(0, 0)] * (max(ranks) + 1)
    for shard, copies in enumerate(places.tolist()):
        held = chunk(rows, shape[dim], shard)
        for number, place in enumerate(copies):
            part = chunk(held.rows, len(copies), number)
            found[ranks[place]] = RowRange(held.first + part.first, part.rows)
    return tuple(found)


# -------------------------------------------------------------------------------------- nodes


def held_by(spreads: Sequence[Spread | None], ranks: Iterable[int]) -> Held:
    """Return the rows that the workers of a node have copied together."""
    here = list(ranks)
    return tuple(
        merged(spread[rank] for rank in here) if spread is not None else None for spread in spreads
    )


def with_held(skeleton: bytes, held: Held) -> bytes:
    """Return a skeleton that also lists which rows lie beside it; as it is if those are all."""
    if all(one is None for one in held):
        return skeleton
    buffer = io.BytesIO()
    plain = [None if one is None else [list(rows) for rows in one] for one in held]
    torch.save([WITH_HELD, plain, skeleton], buffer)
    return buffer.getvalue()


def without_held(text: bytes) -> tuple[bytes, Held | None]:
    """Return a skeleton as `with_held` got it, and the rows beside it; None for all.

    Raises:
        Exception: these are no such bytes.
    """
    found = torch.load(io.BytesIO(text), weights_only=True)
    if found[0] != WITH_HELD:
        return text, None
    held = tuple(
        None if one is None else tuple(RowRange(*rows) for rows in one) for one in found[1]
    )
    return found[2], held


# -------------------------------------------------------------------------------------- reading


def places_of(skeleton: Any, ours: Mapping[str, Any]) -> dict[int, DTensor]:
    """Return which tensors of a saved state are cut here, by number, each with one that lies so.

    Optimizers that have not stepped yet have no state in `ours`: theirs lies as the parameters do.
    """
    found: dict[int, DTensor] = {}

    def walk(node: Any, mine: Any) -> None:
        kind, content = node[0], node[1]
        if kind == "tensor":
            is_same = is_dtensor(mine) and list(mine.shape) == list(node[3])
            if is_same and is_sharded(mine):
                found[content] = mine
        elif kind == "dict" and isinstance(mine, ExpectedTensor):
            for _, value in content:
                walk(value, mine.tensor)
        elif kind == "dict" and isinstance(mine, Mapping):
            for key, value in content:
                walk(value, mine.get(key))
        elif kind in ("list", "tuple") and isinstance(mine, (list, tuple)):
            for value, one in zip(content, mine, strict=False):
                walk(value, one)

    walk(skeleton, ours)
    return found


@dataclass(frozen=True)
class ExpectedTensor:
    """Stands for a container in which tensors of this one's shape lie as it does.

    Attributes:
        tensor: a parameter, for what an optimizer keeps of it.
    """

    tensor: torch.Tensor


def with_expected(state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return a state in which optimizers have, for what they may have saved, their parameters."""
    expected = []
    for optimizer in optimizers:
        every = [one for group in optimizer.param_groups for one in group["params"]]
        expected.append({"state": {n: ExpectedTensor(one) for n, one in enumerate(every)}})
    return {**state, "optimizers": expected}

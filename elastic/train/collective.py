"""Small collectives for control flow, under Ray Train's names; every rank must call them."""

from __future__ import annotations

from typing import Any, TypeVar

from elastic.train.session import require_context, require_place

Data = TypeVar("Data")


def barrier() -> None:
    """Wait until every rank of the group has called this.

    Raises:
        UsageError: called outside a train function.
    """
    require_context("collective.barrier")
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def store() -> Any:
    """Return a key-value store shared by the ranks of this group: a `torch.distributed.Store`.

    The next group has a new, empty one. Each thread needs its own.

    Raises:
        UsageError: called outside a train function.
    """
    require_place("collective.store")
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    shared = _get_default_store() if dist.is_initialized() else dist.HashStore()
    return dist.PrefixStore("script", shared)


def broadcast_from_rank_zero(data: Data) -> Data:
    """Return rank 0's `data` on every rank; small objects that can be pickled.

    Raises:
        UsageError: called outside a train function.
    """
    require_context("collective.broadcast_from_rank_zero")
    import torch.distributed as dist

    if not dist.is_initialized():
        return data
    box = [data]
    dist.broadcast_object_list(box, src=0)
    return box[0]

"""Small collectives for control flow, under Ray Train's names; every rank must call them."""

from __future__ import annotations

from typing import TypeVar

from elastic.train.session import require_context

Data = TypeVar("Data")


def barrier() -> None:
    """Wait until every rank of the group is here.

    Raises:
        UsageError: called outside a train function.
    """
    require_context("collective.barrier")
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


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

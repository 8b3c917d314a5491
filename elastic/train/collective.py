"""Small collectives for control flow, under Ray Train's names; every rank must call them.

Also behind `destroy_process_group`, which only hides the group from the script.
"""

from __future__ import annotations

from typing import Any, TypeVar

from elastic.train.session import require_place

Data = TypeVar("Data")


def barrier() -> None:
    """Wait until every rank of the group has called this.

    Raises:
        UsageError: called outside a train function.
    """
    require_place("collective.barrier")
    import torch.distributed as dist

    from elastic.worker.group.c10d import shown_group

    with shown_group() as is_there:
        if is_there:
            dist.barrier()


def store() -> Any:
    """Return a key-value store shared by the ranks of this group: a `torch.distributed.Store`.

    The next group has a new, empty one. Each thread needs its own.

    Raises:
        UsageError: called outside a train function.
    """
    require_place("collective.store")
    import torch.distributed as dist

    from elastic.worker.group.c10d import default_store

    shared = default_store()
    return dist.PrefixStore("script", dist.HashStore() if shared is None else shared)


def broadcast_from_rank_zero(data: Data) -> Data:
    """Return rank 0's `data` on every rank; small objects that can be pickled.

    Raises:
        UsageError: called outside a train function.
    """
    require_place("collective.broadcast_from_rank_zero")
    import torch.distributed as dist

    from elastic.worker.group.c10d import shown_group

    box = [data]
    with shown_group() as is_there:
        if is_there:
            dist.broadcast_object_list(box, src=0)
    return box[0]

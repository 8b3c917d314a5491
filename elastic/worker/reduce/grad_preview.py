"""What `p.grad` holds before a step is complete, and in a step that is void.

Loops compute norms, clip or log without checking that there is a gradient. With one micro-batch for
each rank there always is one; with fewer ranks than micro-batches there must be one, too.

Rule: it is a copy, and changes to it have no effect. Backward never accumulates into it: -0.0 + 0.0
has other bits than -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from elastic.worker.reduce.buckets import Bucket, FlatTensor


def expose_partial_grad(bucket: Bucket, leaf: FlatTensor, idle: FlatTensor) -> None:
    """Show what a micro-batch has given so far."""
    if not any(bucket.used):
        return
    idle.tensor.copy_(leaf.tensor)
    for index, parameter in enumerate(bucket.parameters):
        if bucket.used[index]:
            parameter.grad = idle.views[index]


def show_zeros(buckets: Sequence[Bucket]) -> None:
    """Show zeros where backward has been; what it has given may still be on its way to others.

    All are views of the same memory: a survivor is to be in the next group soon.
    """
    bare = [
        (parameter, bucket.strides[index])
        for bucket in buckets
        for index, parameter in enumerate(bucket.parameters)
        if parameter.grad is None and (bucket.used[index] or index in bucket.touched)
    ]
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter, _ in bare:
        kind = (parameter.dtype, parameter.device)
        sizes[kind] = max(sizes.get(kind, 0), parameter.numel())
    # Without memory for that the loop has to do without.
    with suppress(RuntimeError):
        zeros = {kind: torch.zeros(n, dtype=kind[0], device=kind[1]) for kind, n in sizes.items()}
        for parameter, strides in bare:
            own = zeros[parameter.dtype, parameter.device]
            parameter.grad = own.as_strided(parameter.shape, strides)


def hide(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        for index, parameter in enumerate(bucket.parameters):
            if is_shown(bucket, index):
                parameter.grad = None


def is_shown(bucket: Bucket, index: int) -> bool:
    """Return whether what is in `p.grad` was taken already, or made of that by the loop."""
    if bucket.used[index]:
        return True
    shown = bucket.seen.views[index] if bucket.seen is not None else None
    return shown is not None and bucket.parameters[index].grad is shown

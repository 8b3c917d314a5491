"""Gradients in flat buffers: which parameter lies where, and the buffers themselves.

Rule: the layout is a function of the parameters alone (their order, shapes, strides, types,
devices), so that members and newcomers cut them alike without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic.errors import InvariantViolation, UsageError
from elastic.worker.group.shared_memory import OwnMemory
from elastic.worker.state.train_state import OptimizerUnit

FIRST_BUCKET_BYTES = 1 << 20
"""Of the first one: communication should begin early."""


class FlatTensor:
    """One flat tensor, and the parameters' places in it as views."""

    def __init__(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter, strides in zip(bucket.parameters, bucket.strides, strict=True):
            end = start + parameter.numel()
            self.views.append(self.tensor[start:end].as_strided(parameter.shape, strides))
            start = end
        # One number for each parameter shows whether it got a gradient; they add up like one.
        self.flags = self.tensor[start:]


@dataclass
class Bucket:
    """A few parameters whose gradients travel together.

    Attributes:
        number: in the order in which backward is expected to complete them.
        unit: number of the unit that they belong to.
        strides: of their gradients, without gaps: fused optimizers go through both side by side.
        touched: indices of parameters whose gradients are to be moved, in that order.
        used: which got a gradient in this micro-batch.
        leaf: what this micro-batch has given, None once it was added to others.
        pool: buffers that are not in use.
        seen: the last tensor that `view` was asked for.
        memory: where buffers lie that others read in place, None for memory of our own.
    """

    number: int
    unit: int
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    touched: dict[int, None] = field(default_factory=dict)
    used: list[bool] = field(default_factory=list)
    leaf: FlatTensor | None = None
    is_sent: bool = False
    pool: list[FlatTensor] = field(default_factory=list)
    seen: FlatTensor | None = None
    memory: OwnMemory | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def numel(self) -> int:
        """Return its length, flags included."""
        return sum(p.numel() for p in self.parameters) + len(self.parameters)

    def begin_micro_batch(self) -> None:
        """No parameter has a gradient yet."""
        self.touched.clear()
        self.used = [False] * len(self.parameters)

    def the_leaf(self) -> FlatTensor:
        """Return the buffer of the micro-batch at hand, open for more gradients."""
        if self.leaf is None:
            raise InvariantViolation(f"bucket {self.number} has no leaf")
        return self.leaf

    def forget(self, index: int) -> None:
        self.touched.pop(index, None)
        self.used[index] = False

    def flat(self) -> FlatTensor:
        """Return a buffer that is not in use."""
        if self.pool:
            return self.pool.pop()
        if self.memory is not None:
            return FlatTensor(self, self.memory.empty(self.numel, self.dtype))
        return FlatTensor(self, self.empty_like_total())

    def empty_like_total(self) -> torch.Tensor:
        """Return a tensor of its length, of our own."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def view(self, total: torch.Tensor) -> FlatTensor:
        """Return the parameters' places in a tensor of this bucket's size, made once."""
        known = self.seen
        if known is None or known.tensor is not total:
            known = self.seen = FlatTensor(self, total)
        return known

    def free(self, flat: FlatTensor) -> None:
        self.pool.append(flat)

    def move_gradients(self, leaf: FlatTensor) -> None:
        """Add the gradients of what was touched to the leaf, and take them from the parameters.

        Raises:
            UsageError: a gradient is sparse.
        """
        fresh_views, fresh, more_views, more = [], [], [], []
        for index in self.touched:
            parameter = self.parameters[index]
            gradient: Any = parameter.grad
            parameter.grad = None
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise UsageError(
                    f"parameter {self.names[index]} has a sparse gradient, which cannot be reduced "
                    f"in a fixed order: use sparse=False in its embedding"
                )
            if self.used[index]:
                more_views.append(leaf.views[index])
                more.append(gradient)
            else:
                self.used[index] = True
                fresh_views.append(leaf.views[index])
                fresh.append(gradient)
        with torch.no_grad():
            if fresh:
                torch._foreach_copy_(fresh_views, fresh)
            if more:
                torch._foreach_add_(more_views, more)
        self.touched.clear()

    def complete(self, leaf: FlatTensor, *, weight: float | None) -> None:
        """Make a leaf of what was moved: zeros where there was no gradient, flags, weight.

        Args:
            leaf: with the gradients of one micro-batch.
            weight: factor for all of it; None for a micro-batch that does not count.
        """
        with torch.no_grad():
            if weight is None:
                leaf.tensor.zero_()
                return
            if all(self.used):
                leaf.flags.fill_(1)
            else:
                for index, is_used in enumerate(self.used):
                    leaf.flags[index] = float(is_used)
                    if not is_used:
                        leaf.views[index].zero_()
            if weight != 1.0:
                leaf.tensor.mul_(weight)


def lay_out(units: Sequence[OptimizerUnit], bucket_bytes: int) -> list[Bucket]:
    """Cut the parameters of all units into buckets, last registered first.

    Backward reaches them in about this order. A bucket has one type and one device.
    """
    buckets: list[Bucket] = []
    for number, unit in enumerate(units):
        open_ones: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
        for name, parameter in reversed(unit.parameters):
            kind = (parameter.dtype, parameter.device)
            if kind not in open_ones:
                buckets.append(Bucket(len(buckets), number))
                open_ones[kind] = (buckets[-1], 0)
            bucket, size = open_ones[kind]
            bucket.names.append(name)
            bucket.parameters.append(parameter)
            bucket.strides.append(torch.empty_like(parameter, device="meta").stride())
            size += parameter.numel() * parameter.element_size()
            open_ones[kind] = (bucket, size)
            if size >= limit:
                del open_ones[kind]
                limit = bucket_bytes
    return buckets

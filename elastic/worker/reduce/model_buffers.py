"""Buffers that forward changes, such as BatchNorm's running statistics.

Rule: each micro-batch begins with the buffers of the step's beginning. After the step a buffer is
the mean of what its micro-batches made of it, added in the order of the tree; one of integers is
what micro-batch 0 made of it. So it depends neither on the number of ranks nor on who computed
what. Buffers that nothing changes cost one read of their version; torch's normalization layers
change theirs without a new version, and are always taken to have done so while they train; so are
layers of users' own whose code names torch's function for it, or `data` and a buffer, as those that
learn a codebook. They are put back without one too: a
graph that was made before has no use for their old values, and torch would refuse to go through it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elastic.core.policy.microbatch import Span, additions_in
from elastic.errors import UsageError
from elastic.worker.reduce.tree_exchange import Exchange, MicroBatchPartition, make_exchange

COUNTER = "num_batches_tracked"
"""Of torch's batch normalization."""


@dataclass
class _Kept:
    """A buffer, and its value at the step's beginning.

    Forward may write into it, or put another tensor in its place, as `self.mean = ...` does. One of
    another shape or type is not the same buffer any more but, say, a cache that grew: left alone.
    """

    name: str
    owner: nn.Module
    own_name: str
    buffer: torch.Tensor
    base: torch.Tensor
    version: int
    is_statistic: bool
    """Its layer may change it without a new version."""
    counter: _Kept | None = None
    """Of a normalization layer's statistics: the buffer that counts how often they changed."""

    @property
    def now(self) -> torch.Tensor:
        """Return what stands in its place."""
        standing = self.owner._buffers.get(self.own_name)
        if standing is None or standing is self.buffer:
            return self.buffer
        is_same = (standing.shape, standing.dtype) == (self.base.shape, self.base.dtype)
        return standing if is_same else self.buffer

    def has_changed(self) -> bool:
        """Return whether it may differ from its value at the step's beginning."""
        if self.buffer.shape != self.base.shape:
            return False  # Resized in place.
        if self.buffer._version != self.version or self.now is not self.buffer:
            return True
        is_torchs = isinstance(self.owner, _NormBase)
        if self.is_statistic and (is_torchs or self.buffer.is_floating_point()):
            if self.owner.training:
                return True  # Also if forward went around it: ranks must agree.
            if not is_torchs:
                return not torch.equal(self.buffer, self.base)  # It has no counter.
        # An evaluation at the end of an iteration may have left its layers in that mode.
        return self.counter is not None and self.counter.has_changed()

    def set_back(self, value: torch.Tensor, *, is_void: bool = False) -> None:
        """Have this value in the tensor that others know, and that one in its place.

        Args:
            value: of the buffer's shape.
            is_void: no gradient of a graph that has used the buffer counts any more.
        """
        if self.now is not self.buffer:
            self.owner._buffers[self.own_name] = self.buffer
        if is_void or self.is_statistic:
            with torch.autograd._unsafe_preserve_version_counter(self.buffer):
                self.buffer.copy_(value)
        else:
            self.buffer.copy_(value)


def _changes_unnoticed(owner: nn.Module, own_name: str) -> bool:
    """Return whether a layer may change a buffer by `torch.batch_norm` and the like, or `data`."""
    if isinstance(owner, _NormBase):
        return True
    users = [one for one in type(owner).__mro__ if not one.__module__.startswith("torch.")]
    methods = [thing for one in users for key, thing in vars(one).items() if key != "__init__"]
    codes = [code for one in methods if (code := getattr(one, "__code__", None)) is not None]
    if any({"data", own_name} <= {*code.co_names} for code in codes):
        return True
    names = {name for code in codes for name in code.co_names}
    # What the layer has itself, as a part of that name, is not torch's function.
    return any("batch_norm" in name and not hasattr(owner, name) for name in names)


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _width(buffer: torch.Tensor) -> int:
    return 2 if buffer.is_complex() or buffer.dtype is torch.int64 else 1


def _numbers(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer's values as float64, (n,), without loss: parts of complex ones, halves."""
    flat = buffer.reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1).to(torch.float64)
    if flat.dtype is torch.int64:  # Float64 has 53 bits.
        return torch.cat([flat >> 32, flat & 0xFFFFFFFF]).to(torch.float64)
    return flat.to(torch.float64)


def _buffer_of(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what `_numbers` was made of, in the shape of a buffer."""
    if like.is_complex():
        parts = numbers.to(torch.view_as_real(like).dtype).reshape(-1, 2)
        return torch.view_as_complex(parts).reshape(like.shape)
    if like.dtype is torch.int64:
        high, low = numbers.to(torch.int64).chunk(2)
        return (high << 32 | low).reshape(like.shape)
    return numbers.reshape(like.shape)


class ModelBuffers:
    """The buffers of all prepared modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._kept = [
            _Kept(
                f"{number}.{path}.{name}", part, name,
                buffer, buffer.detach().clone(), buffer._version, _changes_unnoticed(part, name),
            )
            for number, module in enumerate(modules)
            for path, part in module.named_modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]  # fmt: skip
        counters = {kept.owner: kept for kept in self._kept if kept.own_name == COUNTER}
        for kept in self._kept:
            if kept.own_name != COUNTER and isinstance(kept.owner, _NormBase):
                kept.counter = counters.get(kept.owner)
        self._changed: dict[str, _Kept] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._is_open = False
        self._group: Any = None
        # Of this group, by who holds what, and which buffers change.
        self._exchanges: dict[tuple[MicroBatchPartition, tuple[str, ...]], Exchange] = {}
        self._unreaped: Any = None

    def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close()

    def attach(self, group: Any) -> None:
        """Continue in another group; None for none, or for a group of one.

        A step of the group before is over: state that is received from now on is newer than its
        beginning, which must not be put back over it.
        """
        self.end_step()
        if self._exchanges:
            # The old group may write to their memory until its works are gone: not used again.
            self._unreaped, self._exchanges = self._exchanges, {}
        self._group = group

    def begin_step(self) -> None:
        """What the buffers are now is where each micro-batch begins."""
        with torch.no_grad():
            for kept in self._that_changed():
                kept.base.copy_(kept.now)
                if kept.now is not kept.buffer:
                    kept.set_back(kept.base)
                kept.version = kept.buffer._version
        self._changed, self._leaves, self._names = {}, {}, {}
        self._is_open = True

    def restore(self, *, is_void: bool = False) -> None:
        """Put the buffers back to the beginning of the step that is under way, if one is.

        Of a void one the user's code may still go through graphs that it has made.
        """
        if not self._is_open:
            return
        with torch.no_grad():
            for kept in self._that_changed():
                kept.set_back(kept.base, is_void=is_void)
                kept.version = kept.buffer._version

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Have the buffers as at the beginning of the step that is under way, for a block."""
        changed = self._that_changed() if self._is_open else []
        now = [kept.now.detach().clone() for kept in changed]
        with torch.no_grad():
            for kept in changed:
                kept.set_back(kept.base)
            try:
                yield
            finally:
                for kept, value in zip(changed, now, strict=True):
                    kept.set_back(value)

    def end_step(self) -> None:
        """No step is under way: what one that does not count has changed is put back, once."""
        self.restore()
        self._is_open = False

    def note_changes(self) -> float:
        """Note what forward has changed; return a number that is equal where it is the same."""
        for kept in self._that_changed():
            self._changed[kept.name] = kept
        names = sorted(self._changed)
        return float(zlib.crc32("\\0".join(names).encode())) if names else 0.0

    def end_micro_batch(self, number: int, count: int) -> None:
        """Keep what a micro-batch made of the buffers."""
        if not self._kept:
            return
        self.note_changes()
        parts = []
        for name in sorted(self._changed):
            buffer = self._changed[name].now.detach()
            value = _numbers(buffer)
            factor = float(count if _is_averaged(buffer) else number == 0)
            # Never multiplied by zero, which leaves what is infinite.
            parts.append(value * factor if factor else torch.zeros_like(value))
        if parts:
            self._leaves[number] = torch.cat(parts)
            self._names[number] = tuple(sorted(self._changed))

    def settle(self, partition: MicroBatchPartition, samples: int) -> None:
        """Make the buffers what they are after the step.

        Raises:
            RuntimeError: the group broke.
            UsageError: not every micro-batch has changed the same ones.
        """
        if self._changed:
            names = tuple(sorted(self._changed))
            first, last = partition.mine[0][0], partition.mine[-1][1]
            if any(self._names.get(number) != names for number in range(first, last)):
                raise UsageError(
                    f"forward changes buffers of the model ({', '.join(names[:3])}) in some "
                    f"micro-batches of a step and not in others, so that they cannot be averaged; "
                    f"let it change the same ones in every micro-batch"
                )
            sums = {part: self._sum(part) for part in partition.mine}
            exchange = self._exchange(partition, names, next(iter(sums.values())))
            exchange.start(sums, divisor=1.0)
            exchange.finish(1.0)
            self._put(exchange.total, samples)

    def _exchange(
        self, partition: MicroBatchPartition, names: tuple[str, ...], like: torch.Tensor
    ) -> Exchange:
        if (partition, names) not in self._exchanges:
            self._exchanges[partition, names] = make_exchange(partition, like, self._group)
        return self._exchanges[partition, names]

    def _that_changed(self) -> list[_Kept]:
        return [kept for kept in self._kept if kept.has_changed()]

    def keep(self) -> None:
        """The step counts: what the buffers are now is not put back any more."""
        self._is_open = False

    def _sum(self, tree: Span) -> torch.Tensor:
        values = {(number, number + 1): leaf for number, leaf in self._leaves.items()}
        for one in additions_in(tree):
            values[one.total] = values[one.left] + values[one.right]
        return values[tree]

    def _put(self, total: torch.Tensor, samples: int) -> None:
        start = 0
        with torch.no_grad():
            for name in sorted(self._changed):
                kept = self._changed[name]
                buffer = kept.buffer
                end = start + buffer.numel() * _width(buffer)
                value = total[start:end]
                kept.set_back(
                    _buffer_of(value / samples if _is_averaged(buffer) else value, buffer)
                )
                start = end

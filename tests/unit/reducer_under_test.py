"""What the tests of the gradient engine share: models, shares, oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from elastic.core.policy.microbatch import split
from elastic.worker.reduce import Reducer, Share, Unit

MICRO_BATCH = 4


Gradients = list[torch.Tensor | None]


Backward = Callable[[int], None]


"""Does forward and backward of a micro-batch."""


def unit_of(module: nn.Module, name: str = "all") -> Unit:
    return Unit(name, list(module.named_parameters()))


def data(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, generator=generator).to(dtype)


@contextmanager
def reducing(
    units: Sequence[Unit],
    modules: Sequence[nn.Module] = (),
    consistency: str = "bitwise",
    bucket_bytes: int = 64,
) -> Iterator[Reducer]:
    """Give a reducer in a group of one; buckets are small, so that there are several."""
    reducer = Reducer(units, modules, consistency=consistency, bucket_bytes=bucket_bytes)
    reducer.attach(None)
    try:
        yield reducer
    finally:
        reducer.close()


def share_of(num_micro_batches: int, counts: Sequence[int] = ()) -> Share:
    counts = tuple(counts or [MICRO_BATCH] * num_micro_batches)
    return Share(0, 1, num_micro_batches, MICRO_BATCH, counts)


def step(
    reducer: Reducer,
    units: Sequence[Unit],
    share: Share,
    backward: Backward,
    after: Callable[[], None] = lambda: None,
) -> Gradients:
    """Do one step, as the engine does; return what an optimizer would find, cloned."""
    reducer.begin_step(share)
    for number in range(*share.held):
        reducer.begin_micro_batch(number)
        backward(number)
        if number < share.held[1] - 1:
            for unit in units:
                reducer.unit_stepped(unit)
            after()
    for unit in units:
        assert reducer.settle(unit)
        reducer.unit_stepped(unit)
    assert reducer.settle_buffers()
    found = gradients_of(units)
    after()
    for unit in units:
        for _, parameter in unit.parameters:
            parameter.grad = None
    return found


def gradients_of(units: Sequence[Unit]) -> Gradients:
    parameters = [parameter for unit in units for _, parameter in unit.parameters]
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def plain(units: Sequence[Unit], backward: Backward, number: int) -> Gradients:
    """Return the gradients of one micro-batch by itself."""
    parameters = [parameter for unit in units for _, parameter in unit.parameters]
    for parameter in parameters:
        parameter.grad = None
    backward(number)
    found = gradients_of(units)
    for parameter in parameters:
        parameter.grad = None
    return found


def added(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up in the order of the tree."""
    if len(leaves) == 1:
        return leaves[0]
    middle = split((0, len(leaves)))
    return added(leaves[:middle]) + added(leaves[middle:])


def mean_of(units: Sequence[Unit], backward: Backward, share: Share) -> list[torch.Tensor]:
    """Return what a step must come to, by hand."""
    parameters = [parameter for unit in units for _, parameter in unit.parameters]
    leaves: list[list[torch.Tensor]] = [[] for _ in parameters]
    for number in range(share.num_micro_batches):
        count = share.counts[number]
        gradients = plain(units, backward, number)
        for into, gradient, parameter in zip(leaves, gradients, parameters, strict=True):
            if gradient is None or count == 0:
                gradient = torch.zeros_like(parameter)
            into.append(gradient if count == MICRO_BATCH else gradient * (count / MICRO_BATCH))
    return [added(one) / (share.samples / MICRO_BATCH) for one in leaves]


def assert_same_bits(found: Gradients, wanted: Sequence[torch.Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            bits = [t.contiguous().view(torch.uint8) for t in (one, other)]
            assert torch.equal(*bits), (one, other)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def squares(module: nn.Module, dtype: torch.dtype = torch.float32) -> Backward:
    return lambda number: module(data(number, 4, 5, dtype=dtype)).square().mean().backward()


class Branches(nn.Module):
    """Three layers; which of them are used is told with each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.layers[number](x) for number in used]).sum()


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))


class Replaces(nn.Module):
    """Puts a new tensor in its buffer's place, as `self.mean = ...` does, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x.mean(0).detach() * 0.5
        self.cache = torch.zeros(len(self.cache) + 1)
        return self.layer(x)


class Least(nn.Module):
    """Keeps the least that it has seen, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("least", torch.tensor(float("inf")))

    def forward(self, x: torch.Tensor, keeps: bool = True) -> torch.Tensor:
        if keeps:
            self.least.copy_(torch.minimum(self.least, x.min()))
        return self.layer(x)

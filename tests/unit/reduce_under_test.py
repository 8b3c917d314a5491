"""A step of a reducer in the plainest loop, and the same step written out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elastic.worker.reduce.reducer import OptimizerUnit, Reducer, StepShare

SIZE = 4
Loss = Callable[[Any, int], torch.Tensor]


def share_of(counts: Sequence[int], size: int = SIZE) -> StepShare:
    return StepShare(0, 1, len(counts), size, tuple(counts))


def unit_of(model: nn.Module, name: str = "model") -> OptimizerUnit:
    return OptimizerUnit(name, [(n, p) for n, p in model.named_parameters() if p.requires_grad])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(number: int, count: int = SIZE, like: nn.Module | None = None) -> torch.Tensor:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(number))
    return x if like is None else x.to(next(like.parameters()).dtype)


def mean_square(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number, like=model)).square().mean()


def tree_sum(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add as a binary counter does, which is the tree that everyone keeps to."""
    stack: list[tuple[int, torch.Tensor]] = []
    for leaf in leaves:
        stack.append((1, leaf.clone()))
        while len(stack) > 1 and stack[-2][0] == stack[-1][0]:
            (size, left), (_, right) = stack[-2:]
            stack[-2:] = [(2 * size, left + right)]
    while len(stack) > 1:
        (one, left), (other, right) = stack[-2:]
        stack[-2:] = [(one + other, left + right)]
    return stack[0][1]


def written_out(model: nn.Module, loss: Loss, counts: Sequence[int]) -> list[torch.Tensor | None]:
    """Return the gradients of one step, each micro-batch by itself on a copy of the model."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found: list[list[torch.Tensor | None]] = []
    for number, count in enumerate(counts):
        model.zero_grad()
        loss(model, number).backward()
        found.append([p.grad if count else None for p in parameters])
    totals: list[torch.Tensor | None] = []
    for place, parameter in enumerate(parameters):
        column = [row[place] for row in found]
        if all(one is None for one in column):
            totals.append(None)
            continue
        leaves = [torch.zeros_like(parameter) if one is None else one for one in column]
        if set(counts) != {SIZE}:
            leaves = [leaf * (n / SIZE) for leaf, n in zip(leaves, counts, strict=True)]
        totals.append(tree_sum(leaves) / (sum(counts) / SIZE))
    return totals


def same(found: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> bool:
    """Return whether all bits are the same."""
    return len(found) == len(right) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and bits(a) == bits(b))
        for a, b in zip(found, right, strict=True)
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


Make = Callable[..., Reducer]


def iterations(reducer: Reducer, counts: Sequence[int]) -> Iterator[int]:
    """Yield the micro-batches of a step, as the engine does."""
    reducer.begin_step(share_of(counts))
    for number in range(len(counts)):
        reducer.begin_micro_batch(number)
        yield number


def one_step(
    reducer: Reducer,
    unit: OptimizerUnit,
    model: nn.Module,
    loss: Loss,
    counts: Sequence[int] = (SIZE,) * 5,
) -> list[torch.Tensor | None]:
    """Do a step in the plainest loop, and return the gradients that the optimizer would meet."""
    for number in iterations(reducer, counts):
        loss(model, number).backward()
    assert reducer.settle(unit)
    assert reducer.settle_buffers()
    reducer.keep_buffers()
    return [None if p.grad is None else p.grad.clone() for _, p in unit.parameters]


def reducers() -> Iterator[Make]:
    """Give a function that makes reducers in no group; their hooks are taken off at the end."""
    made: list[Reducer] = []

    def begin(*args: Any, **named: Any) -> Reducer:
        reducer = Reducer(*args, **named)
        reducer.attach(None)
        made.append(reducer)
        return reducer

    yield begin
    for reducer in made:
        reducer.close()

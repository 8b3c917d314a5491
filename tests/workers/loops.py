"""Training loops as people write them, for one rank of a group that stands; for tests.

Each is a train function. What it returns goes to the test; `bits` are those of its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from elastic.worker import local
from elastic.worker.local import LocalRun, local_context

SAMPLES, MICRO, GLOBAL, EPOCHS = 40, 2, 12, 2
"""A step is six micro-batches: four of the ragged last one's are empty."""
LOOPS: dict[str, Callable[..., Any]] = {}


def run(name: str, arguments: dict[str, Any]) -> Any:
    """Be this rank of such a loop."""
    # Each group has a store of its own; members have been in different ones.
    local._contexts_opened = 0
    with local_context(LocalRun(job_name=name, timeout_s=60.0)):
        return LOOPS[name](**arguments)


def loop(function: Callable[..., Any]) -> Callable[..., Any]:
    LOOPS[function.__name__] = function
    return function


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))


def network(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, 1))


def loader(**options: Any) -> Any:
    made = DataLoader(data(), batch_size=MICRO, **({"shuffle": True} | options))
    return prepare_data_loader(made, global_batch_size=GLOBAL)


def square(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, y)


def bits(tensors: Iterable[torch.Tensor]) -> str:
    parts = b"".join(one.detach().numpy().tobytes() for one in tensors)
    return hashlib.sha256(parts).hexdigest()[:16]


# --------------------------------------------------------------------------- ranks that differ


@loop
def differing(what: str, ranks: list[int], at: int = 2, times: int = 1) -> dict[str, Any]:
    """Change something on some ranks after so many steps, so that it differs on all of them."""
    net = network(norm=True)
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, _: (old + new) / 2)
    counter = Counter()
    train.register(average=average, counter=counter)
    batches, left, steps = loader(), times, 0
    rank, state = dist.get_rank(), net.state_dict()

    def disturb() -> None:
        if what == "bit":
            state["2.weight"].view(torch.int32)[0, 0] ^= 1 << (3 + rank)
        elif what == "gradient":
            state["2.bias"].sub_(0.01 * (rank + 1))
        elif what == "buffer":
            state["1.running_mean"].add_(0.5 * rank + 0.1)
        elif what == "average":
            next(iter(average.parameters())).data.add_(rank + 1.0)
        elif what == "counter":
            counter.count += rank + 1

    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if train.stepped():
                average.update_parameters(net)
                counter.count += 1
                steps += 1
                if steps >= at and left and rank in ranks:
                    left -= 1
                    disturb()
    tensors = [*net.state_dict().values(), *average.state_dict().values()]
    return {"bits": bits(tensors), "count": counter.count, "steps": steps}


class Counter:
    """Something of a user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

"""What test_step_engine.py and its neighbour share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import (
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from elastic.worker.engine.recovery_modes import GroupProvider, ResumeState
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current, current_engine, set_current
from elastic.worker.process.local import LocalRun, local_context

SAMPLES, SIZE, GLOBAL = 22, 2, 8


STEPS, V = 3, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def square(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, y)


class Count:
    """What a script counts, part of the run's state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@dataclass
class Loop:
    """Everything that a plain loop has in its hands."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    plain: nn.Module

    @staticmethod
    def make(
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        *,
        shuffle: bool = False,
        **options: Any,
    ) -> Loop:
        plain = network()
        model = prepare_model(plain)
        made = prepare_optimizer(optimizer(model.parameters(), **({"lr": 0.1} | options)))
        loader = DataLoader(data(), batch_size=SIZE, shuffle=shuffle)
        prepared = prepare_data_loader(loader, global_batch_size=GLOBAL)
        return Loop(model, made, prepared, plain)

    def batches(self, epochs: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
        for _ in train.epochs(epochs):
            yield from self.loader


reported: list[dict[str, Any]] = []


@contextmanager
def inside_again(run_path: str = "") -> Iterator[None]:
    """Be called once more, as by a worker of another life."""
    outer, engine = current(), current_engine()
    try:
        with local_context(LocalRun(job_name="again", run_path=run_path)):
            yield
    finally:
        set_current(outer, engine)


@contextmanager
def called(
    home: GroupProvider, resume: ResumeState | None, generation: int
) -> Iterator[StepEngine]:
    """Be called by a worker, with what an earlier call in its process has left."""
    with inside_again():
        here = current()
        assert here is not None
        engine = StepEngine(home, resume_state=resume)
        place = replace(here, is_local=False, generation=generation)
        engine.enter(place)
        set_current(place, engine)
        try:
            yield engine
        finally:
            engine.close()


def bits(module: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def each(things: Iterable[Any], do: Callable[[Any], Any]) -> None:
    """Be a loop in one statement."""
    for thing in things:
        do(thing)


def near(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def whole_batches() -> list[tuple[torch.Tensor, ...]]:
    """Return what one process with the global batch as batch size would read, unshuffled."""
    return [tuple(batch) for batch in DataLoader(data(), batch_size=GLOBAL)]


class Pair:
    """A GAN of two layers."""

    def __init__(self, prepare: bool) -> None:
        torch.manual_seed(4)
        self.maker, self.judge = nn.Linear(5, 5), nn.Linear(5, 1)
        self.of_maker = torch.optim.SGD(self.maker.parameters(), lr=0.1, momentum=0.9)
        self.of_judge = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        if prepare:
            for module in (self.maker, self.judge):
                prepare_model(module)
            for optimizer in (self.of_maker, self.of_judge):
                prepare_optimizer(optimizer)

    def judge_loss(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.maker(x).detach()
        return (1 - self.judge(x)).square().mean() + self.judge(fake).square().mean()

    def maker_loss(self, x: torch.Tensor) -> torch.Tensor:
        return (1 - self.judge(self.maker(x))).square().mean()

    def train_maker(self, x: torch.Tensor) -> None:
        self.of_maker.zero_grad()
        self.maker_loss(x).backward()
        self.of_maker.step()

    def train_judge(self, x: torch.Tensor) -> None:
        self.of_judge.zero_grad()
        self.judge_loss(x).backward()
        self.of_judge.step()


def note(metrics: dict[str, Any]) -> None:
    reported.append(metrics)


def inside_a_run(tmp_path: Path) -> Iterator[None]:
    """Be inside a train function of this process; a fixture of those who test its loop."""
    reported.clear()
    with local_context(LocalRun(job_name="here", run_path=str(tmp_path), on_report=note)):
        yield

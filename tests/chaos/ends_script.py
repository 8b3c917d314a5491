"""Ranks that end at different moments, in the way that the argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)

STEPS, LEAVES_AT, LEAVER = 20, 5, 1
LATER_S = 5.0
"""By then the others have long closed the group."""


def plain(way: str) -> None:
    """Train as scripts for torchrun do; rank 1 leaves early, or rank 0 has more to do."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(STEPS):
        if way == "leaves" and step == LEAVES_AT and dist.get_rank() == LEAVER:
            sys.exit(0)
        model(torch.ones(2, 4)).mean().backward()
    if way != "leaves" and dist.get_rank() == 0:
        time.sleep(LATER_S)  # Not waiting: this is what takes it so long.
        if way == "fails":
            raise ValueError("no such column")


def told(storage: Path) -> None:
    """Train until some rank is told to end, then save and end as such scripts do.

    To save takes as long as there is a file "gate".
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGUSR1, lambda *_: (storage / f"usr1-{dist.get_rank()}").touch())
    dist.init_process_group("gloo")
    storage.mkdir(exist_ok=True)
    while True:
        ends = torch.tensor([len(asked)])
        dist.all_reduce(ends)
        (storage / f"trains-{dist.get_rank()}").write_text(str(os.getpid()))
        if ends:
            while (storage / "gate").exists():
                time.sleep(0.01)
            (storage / f"saved-{dist.get_rank()}").touch()
            sys.exit(128 + signal.SIGTERM)


def train_func() -> None:
    """Train in a loop that goes on in place; rank 1 returns in the middle of it."""
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = prepare_data_loader(torch.utils.data.DataLoader(torch.ones(120, 4), batch_size=2))
    for _ in train.epochs(3):
        for step, batch in enumerate(loader):
            if step == LEAVES_AT and train.get_context().get_world_rank() == LEAVER:
                return
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    if sys.argv[1] == "epochs":
        TorchTrainer(train_func).fit()
    elif sys.argv[1] == "told":
        told(Path(sys.argv[2]))
    else:
        plain(sys.argv[1])

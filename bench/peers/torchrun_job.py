"""The model and data of our `steps_job` under plain DDP, as torchrun's users write it.

Rule: it needs torch only, so that a restart imports nothing else. Rank 0 saves a checkpoint every
few steps, everyone starts from the newest one. After each step a line "unix_ns rank life step pid
world" is appended to the marks, as `bench/marks.py` reads them; a life is torchrun's restart count.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 10


class Net(nn.Module):
    """The `mlp` of steps_job, with its ledger."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, CLASSES)
        )
        self.ledger = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and what counts these samples."""
        return self.net(x), self.ledger[ids].mean()


def data_of(size: int) -> TensorDataset:
    """Return noise with a label, and each sample's number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 64, generator=generator)
    y = torch.randint(0, CLASSES, (size,), generator=generator)
    return TensorDataset(x, y, torch.arange(size))


def save(path: Path, content: dict[str, object]) -> None:
    """Replace the checkpoint by a newer one, at once."""
    fresh = path.with_suffix(".fresh")
    torch.save(content, fresh)
    os.replace(fresh, path)


def train(args: argparse.Namespace, life: int) -> None:
    """Train until somebody ends this process; a life is what ends with a kill."""
    rank, world = dist.get_rank(), dist.get_world_size()
    marks = os.open(args.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    data = data_of(args.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=-(-args.global_batch // world), sampler=sampler)
    torch.manual_seed(0)
    module = Net(args.width, args.samples)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.net.parameters(), lr=1e-3, weight_decay=0.01)
    counter = torch.optim.SGD([module.ledger], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    things: dict[str, Any] = {
        "model": module, "optimizer": optimizer, "counter": counter, "scheduler": scheduler,
    }  # fmt: skip
    number = 0
    if args.checkpoint.exists():
        content = torch.load(args.checkpoint, weights_only=True)
        for name, thing in things.items():
            thing.load_state_dict(content[name])
        number = content["step"]
    while True:
        epoch, done = divmod(number, len(loader))
        sampler.set_epoch(epoch)
        for index, (x, y, ids) in enumerate(loader):
            if index < done:
                continue
            time.sleep(args.pace)
            logits, count = model(x, ids)
            (F.cross_entropy(logits, y) + count).backward()
            torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0)
            optimizer.step()
            counter.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.zero_grad()
            number += 1
            line = f"{time.time_ns()} {rank} {life} {number} {os.getpid()} {world}\n"
            os.write(marks, line.encode())
            if rank == 0 and number % args.every == 0:
                content = {name: thing.state_dict() for name, thing in things.items()}
                save(args.checkpoint, content | {"step": number})


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options that all peers have."""
    found = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    found.add_argument("--marks", required=True)
    found.add_argument("--checkpoint", type=Path, required=True)
    found.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    found.add_argument("--width", type=int, default=64)
    found.add_argument("--samples", type=int, default=1000)
    found.add_argument("--global-batch", type=int, default=32)
    found.add_argument("--pace", type=float, default=0.0, help="seconds for each step")
    return found


def main() -> None:
    """Join the group and train."""
    args = parser().parse_args()
    dist.init_process_group("gloo")
    train(args, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))


if __name__ == "__main__":
    main()

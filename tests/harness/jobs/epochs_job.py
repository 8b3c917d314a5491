"""A train script of chaos runs: its weights count epochs, so that a lost or repeated one shows.

Rule: every epoch adds exactly 1 to a tensor, by an all-reduced mean; whatever happens to the
group, the tensor equals the number of epochs, in every checkpoint and at the end. Run by its
path, as users' scripts are.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from elastic import train
from elastic.train.torch import TorchTrainer, prepare_data_loader


def train_func(config: dict) -> dict:
    """Count epochs, with a checkpoint after each, until the finish file exists."""
    numbers = config["numbers"]
    count, first = torch.zeros(numbers), 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
        count, first = state["count"], state["epoch"] + 1
        if not torch.equal(count, torch.full((numbers,), float(first))):
            raise ValueError(f"{checkpoint.path} is torn: {count.mean()} after {first} epochs")
    # One epoch is `steps` iterations of a loader, so that telemetry has steps as in any script.
    data = torch.utils.data.TensorDataset(torch.arange(config["steps"] * dist.get_world_size()))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=1))
    epoch = first - 1
    while not is_over(epoch, config):
        epoch += 1
        total = torch.zeros(numbers)
        for _ in loader:
            part = torch.ones(numbers) / config["steps"]
            dist.all_reduce(part)
            total += part / dist.get_world_size()
            work = torch.randn(160, 160)
            for _ in range(8):
                work = torch.tanh(work @ work.T)
        if config["raise_at"] == epoch:
            raise ValueError(f"bad batch in epoch {epoch}")
        count = count + total.round()
        with tempfile.TemporaryDirectory() as directory:
            if dist.get_rank() == 0:
                torch.save({"count": count, "epoch": epoch}, Path(directory) / "state.pt")
            train.report(
                {"epoch": epoch, "count": count[0].item()},
                checkpoint=train.Checkpoint.from_directory(directory),
            )
    return {"count": count.mean().item(), "epochs": epoch + 1}


def is_over(epoch: int, config: dict) -> bool:
    """Return whether this epoch was the last one; all ranks return the same."""
    finish = config["finish"]
    may_end = torch.tensor([float(not finish or Path(finish).exists())])
    dist.all_reduce(may_end, op=dist.ReduceOp.MIN)
    return epoch + 1 >= config["epochs"] and bool(may_end.item())


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--numbers", type=int, default=1000, help="size of the weights")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--finish", default="", help="go on until this file is there")
    args = parser.parse_args()
    TorchTrainer(train_func, train_loop_config=vars(args)).fit()


if __name__ == "__main__":
    main()

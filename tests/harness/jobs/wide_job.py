"""A model of many parameters, whose state after every step is written as checksums.

    python -m tests.harness.chaos --job wide --width 5000 --kills 200

Four layers of `--width` have 4 x width^2 parameters: 1580 are 10 million, 5000 are 100 million.
SHA-256 of that state would take longer than the step, CRC-32 takes 0.1 s for each 100 million.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)

MICRO_BATCH = 2
MICRO_BATCHES = 4
"""Of a step."""
STEPS = 8
"""Of an epoch."""


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).numpy().data)


def train_func(config: dict) -> dict:
    """Train until the finish file exists; return how far."""
    torch.manual_seed(0)
    width = config["width"]
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(4)]
    model = prepare_model(nn.Sequential(*layers, nn.BatchNorm1d(width)))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    data = TensorDataset(torch.randn(MICRO_BATCH * MICRO_BATCHES * STEPS, width))
    loader = prepare_data_loader(
        DataLoader(data, batch_size=MICRO_BATCH, shuffle=True),
        global_batch_size=MICRO_BATCH * MICRO_BATCHES,
    )
    context = train.get_context()
    for epoch in train.epochs(config["epochs"]):
        for (x,) in loader:
            loss = (model(x) - x).square().mean()
            loss.backward()
            is_over = bool(config["finish"]) and Path(config["finish"]).exists()
            train.log(over=float(is_over))
            optimizer.step()
            optimizer.zero_grad()
            if train.stepped():
                trace(
                    config["trace"],
                    {
                        "epoch": context.get_epoch(),
                        "step": context.get_step(),
                        "parameters": [crc(one) for one in model.state_dict().values()],
                        "optimizers": [
                            crc(one["momentum_buffer"])
                            for one in optimizer.state_dict()["state"].values()
                        ],
                    },
                )
        train.report({"epoch": epoch})
        if train.get_logged()["over"] > 0:
            break
    result = {"epochs": epoch + 1, "steps": (epoch + 1) * len(loader)}
    train.report(result)
    return result


def trace(directory: str, line: dict) -> None:
    """Append a line to this process's file by a single write, so that a kill leaves whole lines."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = Path(directory, f"{os.getpid()}.jsonl")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--trace", required=True, help="folder for the checksums of every step")
    parser.add_argument("--finish", default="", help="end with the epoch in which this file comes")
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            checkpoint_config=train.CheckpointConfig(every_s=None),
        ),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()

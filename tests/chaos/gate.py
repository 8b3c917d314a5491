"""The train script of the gate test: breaks its group where an epoch ends, for one rank only."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

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
from elastic.worker.engine import step_engine as step
from elastic.worker.engine.train_call import current, current_engine

EPOCHS = 2
real = step.send_metadata


def train_func(config: dict[str, Any]) -> None:
    """Train for two epochs; at the gate of the asked one, rank 1 loses the group as others pass."""
    epoch_of_fault, path = config["epoch"], Path(config["directory"])

    def send_metadata(group: Any, values: Any) -> Any:
        context = current()
        rows = real(group, values)
        if context.world_rank == 1 and current_engine().cursor.epoch == epoch_of_fault:
            try:
                os.close(os.open(path / "broken", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return rows
            raise RuntimeError("[gloo] Connection closed by peer (planted)")
        return rows

    step.send_metadata = send_metadata
    model = prepare_model(nn.Linear(4, 1))
    optimizer = prepare_optimizer(torch.optim.Adam(model.parameters()))
    data = TensorDataset(torch.arange(128.0).reshape(32, 4) / 128)
    loader = prepare_data_loader(DataLoader(data, batch_size=2), global_batch_size=8)
    model.module.bias.requires_grad = False
    for epoch in train.epochs(EPOCHS):
        model.module.bias.requires_grad = epoch > 0
        for (x,) in loader:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.log(loss=loss)
        context = train.get_context()
        loss = train.get_logged()["loss"]
        weights = model.module.weight.tolist()
        line = f"{epoch} {context.get_world_rank()} {loss!r} {weights!r}\n"
        with (path / "epochs").open("a") as file:
            file.write(line)
    train.report({"epochs": EPOCHS})


def main() -> None:
    """Run as a script of `elastic submit`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    TorchTrainer(train_func, train_loop_config=vars(parser.parse_args())).fit()


if __name__ == "__main__":
    main()

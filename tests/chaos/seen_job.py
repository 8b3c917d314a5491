"""Trains until a file is there, and prints a line for each micro-batch that it also writes down."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer

PACE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
    loader = prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    with (folder / f"{os.getpid()}.lines").open("a") as written:
        number = 0
        for epoch in train.epochs(10_000):
            for x, y in loader:
                threading.Event().wait(PACE_S)
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                train.log(loss=loss, _finish=float((folder / "finish").exists()))
                number += 1
                line = f"printed {os.getpid()} {number}"
                print(line, flush=True)
                written.write(line + "\n")
                written.flush()
            train.report({"epoch": epoch})
            if train.get_logged()["_finish"] > 0:
                break


if __name__ == "__main__":
    main()

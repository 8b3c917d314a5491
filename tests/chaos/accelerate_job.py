"""A plain loop over an Accelerator under chaos: every step's state, by each rank.

It classifies scikit-learn's digits, and evaluates them between epochs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.accelerate import prepare_accelerator
from tests.harness.jobs.steps_job import Orders, is_over, trace
from tests.harness.jobs.struck_job import run

SAMPLES, MICRO_BATCH, GLOBAL_BATCH = 50, 4, 16


def digits() -> TensorDataset:
    """Return a few of them."""
    data = load_digits()
    x = torch.tensor(data.data[:SAMPLES], dtype=torch.float32) / 16
    return TensorDataset(x, torch.tensor(data.target[:SAMPLES]))


def train_func(config: dict) -> dict[str, Any]:
    """Train, and say how well it went."""
    torch.manual_seed(0)
    accelerator = prepare_accelerator(Accelerator(cpu=True), global_batch_size=GLOBAL_BATCH)
    model: Any = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.99)
    loader: Any = DataLoader(digits(), batch_size=MICRO_BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    others = accelerator.prepare(DataLoader(digits(), batch_size=20))
    orders, right = Orders(config["orders"]), 0
    for epoch in train.epochs(config["epochs"]):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                time.sleep(config["pace"])
                orders.at("forward")
                loss = nn.functional.cross_entropy(model(x), y)
                orders.at("backward")
                accelerator.backward(loss)
                orders.at("step")
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                orders.at("commit")
                scheduler.step()
                optimizer.zero_grad()
                train.log(loss=loss, over=float(is_over(config)))
            if config["trace"] and train.stepped():
                trace(config["trace"], model, [optimizer.optimizer], scheduler.scheduler)
            orders.at("between")
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in others]
        right = sum(int((guess == y).sum()) for guess, y in found)
        train.report({"epoch": epoch, "right": right, "of": sum(len(y) for _, y in found)})
        if train.get_logged()["over"] > 0:
            break
    return {"right": right}


if __name__ == "__main__":
    run(train_func)
